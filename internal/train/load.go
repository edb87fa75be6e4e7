package train

import (
	"slices"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// load is what the attention of a step asks of the ranks that share its sequences.
type load struct {
	// slowest and mean are visible pairs of all heads: of the rank with most and of the mean rank,
	// over the layers and sequences, after each of which the ranks wait for each other.
	slowest, mean float64
	sent          int64 // bytes that this rank sends of keys, values and their gradients
}

// add adds times the load of another.
func (l *load) add(o load, times int) {
	l.slowest += float64(times) * o.slowest
	l.mean += float64(times) * o.mean
	l.sent += int64(times) * o.sent
}

// imbalance is the work of the slowest rank over that of the mean: 1 where all have as much.
func (l *load) imbalance() float64 {
	if l.mean == 0 {
		return 1
	}
	return l.slowest / l.mean
}

// wire is how work and bytes of a sequence are counted.
type wire struct {
	bytes          ring.HeadBytes
	heads, kvHeads int
	forwards       int64 // forward passes of a layer in a step
}

// wireOf is that of a run; what kernels read travels as it is computed, and gradients in the type that
// sums are kept in.
func wireOf(cfg *config.Config, compute tensor.DType) wire {
	in, sum := int64(compute.Size()), int64(tensor.F32.Size())
	dim := int64(cfg.Model.HeadDim)
	w := wire{
		bytes: ring.HeadBytes{Q: dim * in, O: dim * in, LSE: sum, KV: 2 * dim * in, DQ: dim * sum, DKV: 2 * dim * sum},
		heads: cfg.Model.NumAttentionHeads, kvHeads: cfg.Model.NumKeyValueHeads,
		forwards: 1,
	}
	if model.Recompute(cfg.Memory.Recompute) == model.RecomputeFull {
		w.forwards = 2
	}
	return w
}

// of is the load of one layer by its schedule, for one sequence, where so many ranks trade heads with each other.
func (w *wire) of(s *ring.Schedule, shape partition.Shape, traders int) load {
	work := partition.WorkOfHeads(partition.Work(shape), traders, w.heads)
	forward, backward := s.Traffic(w.bytes, w.kvHeads)
	l := load{slowest: float64(slices.Max(work)), sent: w.forwards*forward + backward}
	for _, n := range work {
		l.mean += float64(n) / float64(len(work))
	}
	return l
}
