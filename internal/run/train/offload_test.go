package train_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// layers makes a model with more layers than there are slots of moved activations.
var layers = []string{"model.num_hidden_layers=6", "train.steps=3", "data.validation.samples=1"}

// State and activations on the host change no bit, for any sharding, recompute, accumulation and layout.
func TestOffloadLeavesNoTrace(t *testing.T) {
	t.Parallel()
	modes := [][]string{
		{"memory.recompute=full"},
		{"memory.recompute=selective", "train.global_batch_size=4", "model.architecture=qwen3"},
		{"memory.recompute=none", "train.global_batch_size=4", "parallel.data=2"},
		{"memory.recompute=full", "data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2"},
		{"memory.recompute=selective", "model.tie_word_embeddings=false", "precision.compute=bf16"},
	}
	for m, mode := range modes {
		for _, ranks := range fewer(1, 2, 4) {
			for i, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
				if ranks == 1 && (i > 0 || slices.Contains(mode, "parallel.data=2")) || testing.Short() && (i+m)%4 != 3 {
					continue
				}
				set := slices.Concat(layers, mode, []string{"memory.shard=" + shard})
				want := losses(curve(t, tiny, ranks, set...))
				for j, what := range []string{"activations", "optimizer", "both"} {
					if testing.Short() && j == (m+ranks)%2 {
						continue // both, and one of them in turn
					}
					if got := losses(curve(t, tiny, ranks, append(set, "memory.offload="+what)...)); got != want {
						t.Errorf("%v, %d ranks, shard %s, offload %s:\n%s\nwant\n%s", mode, ranks, shard, what, got, want)
					}
				}
			}
		}
	}
}

// Checkpoints move between runs with and without state on the host. The async save of the state on the host, of which
// there is no copy, keeps the bits of its step, also if copies to the host are late.
func TestCheckpointsOfStateOnTheHost(t *testing.T) {
	t.Parallel()
	const half, whole = 3, 6
	for i, shard := range []string{"none", "gradients", "parameters"} {
		for _, ranks := range []int{1, 2} {
			set := []string{"memory.shard=" + shard, "checkpoint.async=true", fmt.Sprintf("checkpoint.every=%d", half),
				fmt.Sprintf("train.steps=%d", whole)}
			run := func(offload string, o train.Options) outcome {
				cfg := load(t, tiny, ranks, append(set, "memory.offload="+offload)...)
				out, err := runOn(t, cfg, ranks, o, func(d *device.Device) {
					d.Store = lateCopies{d.Store, d.Stream, "state out"}
				})
				if err != nil {
					t.Fatal(err)
				}
				return out
			}
			want := curve(t, tiny, ranks, set...)
			for j, pair := range [][2]string{{"optimizer", "off"}, {"off", "optimizer"}, {"both", "both"}} {
				if testing.Short() && (i+j+ranks)%2 == 0 {
					continue // one rank or two for each, in turn
				}
				first := run(pair[0], train.Options{})
				from := first.dir + "/checkpoints/step-00000003"
				second := run(pair[1], train.Options{From: from, NoSave: true}).steps
				if got := losses(append(first.steps[:half], second...)); got != losses(want) {
					t.Errorf("%d ranks, shard %s, offload %v:\n%s\nwant\n%s", ranks, shard, pair, got, losses(want))
				}
			}
		}
	}
}

// Whichever stream is late, the bits are the same.
func TestLateStreamsLeaveNoTrace(t *testing.T) {
	t.Parallel()
	set := append(layers, "memory.shard=parameters", "memory.offload=both", "memory.recompute=full",
		"train.global_batch_size=2")
	cfg, want := load(t, tiny, 2, set...), losses(curve(t, tiny, 2, set...))
	for _, slow := range []string{"compute", "offload", "reload", "state in", "update", "state out"} {
		got, err := runOn(t, cfg, 2, train.Options{}, func(d *device.Device) {
			d.Store = lateCopies{d.Store, d.Stream, slow}
			for range 100 { // also before it zeroes the state
				late(d.Stream, slow)
			}
			create := d.NewOptim
			d.NewOptim = func(s tensor.Stream) optim.Device { return lateUpdates{create(s), s, slow} }
		})
		if err != nil {
			t.Fatal(err)
		}
		if losses(got.steps) != want {
			t.Errorf("%s is late:\n%s\nwant\n%s", slow, losses(got.steps), want)
		}
	}
}

// lateCopies delays the copies of a stream, or the compute stream before each copy.
type lateCopies struct {
	device.Store
	compute tensor.Stream
	slow    string
}

func (l lateCopies) Copy(s tensor.Stream, dst, src tensor.View) {
	late(s, l.slow)
	late(l.compute, l.slow)
	l.Store.Copy(s, dst, src)
}

type lateUpdates struct {
	optim.Device
	s    tensor.Stream
	slow string
}

func (l lateUpdates) AdamW(p, c, g, m, v, sum tensor.View, h optim.AdamStep) {
	late(l.s, l.slow)
	l.Device.AdamW(p, c, g, m, v, sum, h)
}

func late(s tensor.Stream, name string) {
	if h := s.(*tensor.HostStream); h.Name() == name {
		h.Do("late", func() error { time.Sleep(time.Millisecond); return nil })
	}
}
