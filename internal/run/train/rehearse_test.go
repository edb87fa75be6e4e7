package train

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/device"
)

// A planned is a kernel that counts planned passes.
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

// A kernel with a Planner plans every mask of the model once, and none for packed documents of unknown lengths.
func TestKernelsGetReady(t *testing.T) {
	const ranks = 2
	for set, want := range map[string]int64{
		"model.sliding_window=null": 2,
		"model={sliding_window: 9, layer_types: [full_attention, sliding_attention, full_attention, sliding_attention]}": 4,
		"data.pack_documents=true": 0,
	} {
		cfg, m := example(t, ranks, "cpu", "data.seq_len=100", "model.num_hidden_layers=4", set)
		var passes atomic.Int64
		onRanks(t, ranks, cfg, m.Room(), func(d *device.Device) { d.Kernel = planned{d.Kernel, &passes} },
			func(*Trainer, *counted) error { return nil })
		if got := passes.Load(); got != want*ranks {
			t.Errorf("%s: told of %d passes on %d ranks, want %d on each", set, got, ranks, want)
		}
	}
}

// A watched is a kernel that records the shapes of each call.
type watched struct {
	attention.Kernel
	plans attention.Kernel // result of Planning; nil: this kernel
	saw   func(call string)
}

func (w watched) Planning() attention.Kernel { return watched{Kernel: w.plans, saw: w.saw} }

func (w watched) tell(pass string, q View, b attention.Block) {
	planned := "step"
	if w.plans == nil {
		planned = "plan"
	}
	w.saw(fmt.Sprint(planned, " ", pass, q.Shape(), b.K.Shape(), b.Tiles))
}

func (w watched) Forward(o View, acc attention.Partial, q View, s attention.Softmax) (attention.ForwardPass, error) {
	p, err := w.Kernel.Forward(o, acc, q, s)
	return watchedForward{p, w, q}, err
}

func (w watched) Backward(dq, do, q View, saved attention.Saved, s attention.Softmax) (attention.BackwardPass, error) {
	p, err := w.Kernel.Backward(dq, do, q, saved, s)
	return watchedBackward{p, w, q}, err
}

type watchedForward struct {
	attention.ForwardPass
	w watched
	q View
}

func (p watchedForward) Block(b attention.Block) error {
	p.w.tell("forward", p.q, b)
	return p.ForwardPass.Block(b)
}

type watchedBackward struct {
	attention.BackwardPass
	w watched
	q View
}

func (p watchedBackward) Block(b attention.GradBlock) error {
	p.w.tell("backward", p.q, b.Block)
	return p.BackwardPass.Block(b)
}

// A kernel with a Planner plans exactly the calls of a step, for each kind of layer.
func TestKernelsGetReadyForEachKind(t *testing.T) {
	const ranks = 2
	for _, algorithm := range []string{"ring", "ulysses", "allgather"} {
		cfg, m := example(t, ranks, "cpu", append([]string{"data.seq_len=100", "parallel.algorithm=" + algorithm,
			"model={sliding_window: 9, layer_types: [full_attention, sliding_attention, full_attention]}"}, small...)...)
		var mu sync.Mutex
		calls := map[string]bool{}
		saw := func(call string) {
			mu.Lock()
			defer mu.Unlock()
			calls[call] = true
		}
		onRanks(t, ranks, cfg, m.Room(), func(d *device.Device) { d.Kernel = watched{d.Kernel, attention.Idle{}, saw} },
			func(tr *Trainer, _ *counted) error {
				return tr.oneStep(t.Context())
			})
		for call := range calls {
			other := map[string]string{"plan": "step", "step": "plan"}[call[:4]] + call[4:]
			if !calls[other] {
				t.Errorf("%s: there is %q, and not %q", algorithm, call, other)
			}
		}
	}
}

// oneStep runs a step.
func (t *Trainer) oneStep(ctx context.Context) error {
	f, err := t.begin(ctx, false, false)
	if err == nil {
		_, err = t.finish(ctx, f)
	}
	return err
}
