package train

import (
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/device"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/plan"
)

// planned is a kernel that counts the passes which it is told of beforehand.
type planned struct {
	attention.Kernel
	passes *atomic.Int64
}

func (p planned) Planning() attention.Kernel { return planning{passes: p.passes} }

type planning struct {
	attention.Idle
	passes *atomic.Int64
}

func (p planning) Forward(o View, acc attention.Partial, q View, s attention.Softmax) (attention.ForwardPass, error) {
	p.passes.Add(1)
	return p.Idle.Forward(o, acc, q, s)
}

func (p planning) Backward(dq, do, q View, saved attention.Saved, s attention.Softmax) (attention.BackwardPass, error) {
	p.passes.Add(1)
	return p.Idle.Backward(dq, do, q, saved, s)
}

// A kernel that can get ready is told of every mask of the model once, and of none where documents
// whose lengths nobody knows are packed.
func TestKernelsGetReady(t *testing.T) {
	const ranks = 2
	for set, want := range map[string]int64{
		"model.sliding_window=null": 2,
		"model={sliding_window: 9, layer_types: [full_attention, sliding_attention, full_attention, sliding_attention]}": 4,
		"data.pack_documents=true": 0,
	} {
		cfg, err := config.Load("../../examples/opticks.yaml", config.Options{Ranks: ranks, Device: "cpu", Set: []string{"data.seq_len=100", "model.num_hidden_layers=4", set}})
		if err != nil {
			t.Fatal(err)
		}
		m, err := plan.MemoryOf(cfg, ranks, machine.Machine{})
		if err != nil {
			t.Fatal(err)
		}
		var passes atomic.Int64
		onRanks(t, ranks, cfg, m, func(d *device.Device) { d.Kernel = planned{d.Kernel, &passes} }, func(*Trainer, *counted) error { return nil })
		if got := passes.Load(); got != want*ranks {
			t.Errorf("%s: told of %d passes on %d ranks, want %d on each", set, got, ranks, want)
		}
	}
}
