package train

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// An attend implements model.Attention over a context group: it runs the ring with the schedule of a layer's mask.
type attend struct {
	ring      *ring.Ring
	cfg       *hf.Config
	algorithm string
	traders   int // number of ranks that exchange heads
	rank      int
	spec      ring.Spec // of the present batch, with a mask per window
	softmax   attention.Softmax
	schedules map[hf.Mixer]*ring.Schedule   // of the present batch
	cache     *ring.Cache                   // schedules of recurring batches and of the next one
	kernels   map[hf.Mixer][]string         // launched ones; nil: not recorded
	keys      func(layer int, k View) error // called before each forward pass of a layer, unless nil
	*recur                                  // nil: no layer is recurrent
}

func newAttend(r *ring.Ring, cfg *config.Config, layout partition.Layout, rank int) *attend {
	n, m := cfg.Data.SeqLen, &cfg.Model.Config
	return &attend{
		ring: r, cfg: m, algorithm: cfg.Parallel.Algorithm, rank: rank,
		traders: cfg.Parallel.UlyssesDegree(cfg.Parallel.Context),
		spec: cfg.Parallel.Spec(
			partition.Shape{SeqQ: n, SeqKV: n, Size: cfg.Parallel.Context, Layout: layout},
			m.NumAttentionHeads, m.NumKeyValueHeads,
		),
		softmax:   model.Softmax(m),
		schedules: make(map[hf.Mixer]*ring.Schedule),
		cache:     ring.NewCache(ring.CacheBytes),
	}
}

// rehearse lets a kernel with a slow setup prepare for the calls of a step. It skips packed documents, whose lengths
// are not known yet.
func (t *Trainer) rehearse(o *Options) error {
	k, ok := t.dev.Kernel.(attention.Planner)
	if !ok || t.cfg.Data.PackDocuments {
		return nil
	}
	defer o.timed("attention plans")()
	n := t.cfg.Data.SeqLen
	layout := t.cfg.Parallel.Layout.Layout([]int{n}, partition.Windows(t.cfg.Model.Windows())...)
	a := newAttend(nil, t.cfg, layout, t.mesh.world.Rank()%t.cfg.Parallel.Context)
	rows := partition.Count(layout.Spans(n, a.spec.Size, a.rank))
	for _, mixer := range a.cfg.Mixers() {
		s, err := a.schedule(mixer)
		if err != nil {
			return err
		}
		of := planner.Attention{DType: t.dev.Compute, Batch: t.cfg.Train.MicroBatchSize, Mixer: mixer}
		r := planner.Recorder{Kernel: k.Planning()}
		for _, backward := range []bool{false, true} {
			if err := r.Run(s, of, rows, backward); err != nil {
				return fmt.Errorf("attention with %+v: %w", mixer, err)
			}
		}
	}
	return nil
}

// begin sets the layout of the sequences of the next batch. It keeps schedules of an unchanged shape.
func (a *attend) begin(b *microBatch) error {
	// without documents, neither the layout nor the mask changes
	if a.spec.Layout != nil && len(b.docs) == 0 && len(a.spec.Mask.Docs) == 0 {
		return nil
	}
	a.spec = a.specOf(b.laid)
	clear(a.schedules)
	if a.recur == nil {
		return nil
	}
	return a.recur.begin(a.spec.Shape, a.rank)
}

func (a *attend) specOf(l laid) ring.Spec {
	s := a.spec
	s.Layout, s.Mask.Docs, s.SeqQ, s.SeqKV = l.layout, l.docs, l.seqLen, l.seqLen
	return s
}

func (a *attend) schedule(m hf.Mixer) (*ring.Schedule, error) {
	if s, ok := a.schedules[m]; ok {
		return s, nil
	}
	s, err := a.scheduleOf(a.spec, m)
	if err == nil {
		a.schedules[m] = s
	}
	return s, err
}

func (a *attend) scheduleOf(spec ring.Spec, m hf.Mixer) (s *ring.Schedule, err error) {
	spec.Heads, spec.KVHeads = m.Heads, m.KVHeads
	if spec.Shape, err = masked(spec.Shape, m.Window); err != nil {
		return nil, fmt.Errorf("attention with %+v: %w", m, err)
	}
	return a.cache.New(a.algorithm, spec, a.rank)
}

// masked returns a shape with the mask of a window.
func masked(shape partition.Shape, window int) (partition.Shape, error) {
	mask, err := partition.NewMask(true, window, shape.SeqQ, shape.SeqKV, shape.Mask.Docs)
	shape.Mask = mask
	return shape, err
}

// prepare makes the schedules of the next batch, while the device computes the present one.
func (a *attend) prepare(l laid) error {
	spec := a.specOf(l)
	for _, m := range a.cfg.Mixers() {
		if _, err := a.scheduleOf(spec, m); err != nil {
			return err
		}
	}
	return nil
}

// load returns the work of all layers for a sequence of the present batch.
func (a *attend) load() (total load, err error) {
	known := make(map[hf.Mixer]load, 2)
	for _, layer := range a.cfg.Layers() {
		m := layer.Mixer
		l, ok := known[m]
		if !ok && !m.Recurs() {
			shape, err := masked(a.spec.Shape, m.Window)
			if err != nil {
				return total, err
			}
			l = loadOf(shape, a.traders, m.Heads)
			known[m] = l
		}
		total.add(l, 1)
	}
	return total, nil
}

// Forward computes causal attention over the group into acc.
func (a *attend) Forward(layer int, acc attention.Partial, q, k, v View) error {
	m := a.cfg.Layer(layer).Mixer
	s, err := a.schedule(m)
	if err != nil {
		return err
	}
	defer a.note(m)
	if a.keys != nil {
		if err := a.keys(layer, k); err != nil {
			return err
		}
	}
	return a.ring.Forward(acc, q, k, v, s, a.softmax)
}

// Backward computes the gradients into g.
func (a *attend) Backward(layer int, g attention.Grads, do, q, k, v View, acc attention.Partial) error {
	m := a.cfg.Layer(layer).Mixer
	s, err := a.schedule(m)
	if err != nil {
		return err
	}
	defer a.note(m)
	return a.ring.Backward(g, do, q, k, v, acc, s, a.softmax)
}

// note records the kernels that a call has launched.
func (a *attend) note(m hf.Mixer) {
	k, ok := a.ring.Kernel.(interface{ Launched() []string })
	if a.kernels == nil || !ok {
		return
	}
	for _, name := range k.Launched() {
		if !slices.Contains(a.kernels[m], name) {
			a.kernels[m] = append(a.kernels[m], name)
		}
	}
}

var _ model.Attention = (*attend)(nil)
