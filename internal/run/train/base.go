package train

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels"
)

// Initial reads the values of parameters before the first step: from the directories of model.from and lora.from, or
// random ones from the seed. They do not depend on the number of ranks. Frozen parameters keep them.
type Initial struct {
	cfg     *config.Config
	base    *hf.Weights // nil: random
	adapter *hf.Weights // nil: random
}

// NewInitial opens the directories of a config. If a checkpoint has the trained parameters, it opens those of frozen
// ones alone. The caller closes the result.
func NewInitial(cfg *config.Config, saved bool) (*Initial, error) {
	s, m := &Initial{cfg: cfg}, &cfg.Model
	needs := func(list []hf.Tensor) bool { return !saved || slices.ContainsFunc(list, m.Frozen) }
	var err error
	if m.From != "" && needs(m.Tensors()) {
		if s.base, err = hf.OpenWeights(m.From); err == nil {
			err = s.base.Check(m.Tensors())
		}
	}
	if l := m.Tuning.LoRA; err == nil && l != nil && l.From != "" && needs(append(m.Adapters(), m.Kept()...)) {
		if s.adapter, err = hf.OpenAdapter(l.From); err == nil {
			err = s.adapter.CheckAdapter(&m.Config)
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close closes the files.
func (s *Initial) Close() error {
	var errs []error
	for _, w := range []*hf.Weights{s.base, s.adapter} {
		if w != nil {
			errs = append(errs, w.Close())
		}
	}
	return errors.Join(errs...)
}

// Read sets dst to the elements of a parameter from offset. Of random ones it generates whole blocks, even for a part.
// Several goroutines may call it.
func (s *Initial) Read(p model.Param, offset int64, dst []float32) error {
	if from, t := s.files(p); from != nil {
		return from.Read(t, dst, offset)
	}
	for len(dst) > 0 {
		lo := offset / model.InitBlock * model.InitBlock
		hi := min(lo+model.InitBlock, int64(p.Size()))
		n := min(hi-offset, int64(len(dst)))
		if n == hi-lo {
			p.Init(dst[:n], lo, s.cfg.Train.Seed)
		} else {
			block := make([]float32, hi-lo)
			p.Init(block, lo, s.cfg.Train.Seed)
			copy(dst, block[offset-lo:])
		}
		dst, offset = dst[n:], offset+n
	}
	return nil
}

// drawn returns the random numbers of a parameter that has no file, if they have a normal distribution.
func (s *Initial) drawn(p model.Param) (kernels.Normals, bool) {
	from, _ := s.files(p)
	return p.Normals(s.cfg.Train.Seed), p.Std > 0 && from == nil
}

// files returns the files of a parameter's first values, and its tensor there; nil: random.
func (s *Initial) files(p model.Param) (*hf.Weights, hf.Tensor) {
	if t := hf.InAdapter(p.Tensor); s.adapter != nil && s.adapter.Has(t) {
		return s.adapter, t
	}
	if _, _, adapts := hf.Adapted(p.Name); adapts {
		return nil, p.Tensor
	}
	return s.base, p.Tensor
}

// baseState names the record of the frozen weights in the extra state of a checkpoint.
const baseState = "base"

// A base identifies the frozen weights of a run.
type base struct {
	From     string `json:"from,omitempty"` // model.from
	Checksum string `json:"checksum"`       // of its files, or the seed of random weights
}

// identify returns the record of the frozen weights; nil if there are none.
func (s *Initial) identify(ctx context.Context) (b *base, err error) {
	if model.NewLayout(&s.cfg.Model.Config, 1).Frozen == nil {
		return nil, nil
	}
	b = &base{From: s.cfg.Model.From, Checksum: fmt.Sprintf("seed %d", s.cfg.Train.Seed)}
	if s.base != nil {
		b.Checksum, err = s.base.Checksum(ctx)
	}
	return b, err
}

// Matches returns an error if a checkpoint belongs to other frozen weights.
func (s *Initial) Matches(ctx context.Context, c *checkpoint.Checkpoint) error {
	have, err := s.identify(ctx)
	if err == nil && have != nil {
		err = have.matches(c)
	}
	return err
}

func (b *base) matches(c *checkpoint.Checkpoint) error {
	var want base
	if err := json.Unmarshal(c.Manifest.Extra[baseState], &want); err != nil {
		return fmt.Errorf("%s: its manifest has no record of the frozen weights: %w", c.Dir, err)
	}
	if b.Checksum != want.Checksum {
		return fmt.Errorf("%s: its frozen weights, from %s, have checksum %.20s, but those of %s have %.20s; set "+
			"model.from to an unchanged copy", c.Dir, cmp.Or(terminal.Name(want.From), "a seed"), want.Checksum,
			cmp.Or(terminal.Name(b.From), "this config"), b.Checksum)
	}
	return nil
}

// Saved returns a function that reads the matrices and vectors of a run: trained ones from a checkpoint, frozen ones as
// they were, and with merge W + scale * B A of a matrix with an adapter. It is for one goroutine.
func (s *Initial) Saved(ctx context.Context, c *checkpoint.Checkpoint, merge bool) func(hf.Tensor, int64,
	[]float32) error {
	m := &s.cfg.Model
	read := func(t hf.Tensor, off int64, dst []float32) error {
		if m.Frozen(t) {
			return s.Read(model.NewParam(t, &m.Config), off, dst)
		}
		return c.Read(ctx, t.Name, checkpoint.FieldParam, off, dst)
	}
	adapters := map[string][2]hf.Tensor{}
	for pair := range slices.Chunk(m.Adapters(), 2) {
		matrix, _, _ := hf.Adapted(pair[0].Name)
		adapters[matrix] = [2]hf.Tensor(pair)
	}
	var last string // the matrix of a and b
	var ab [2][]float32
	return func(t hf.Tensor, off int64, dst []float32) error {
		err := read(t, off, dst)
		name, row, rows := t.Matrix()
		pair, ok := adapters[name]
		if err != nil || !ok || !merge {
			return err
		}
		for i, p := range pair {
			if name != last && err == nil {
				ab[i] = make([]float32, p.Shape[0]*p.Shape[1])
				err = read(p, 0, ab[i])
			}
		}
		last = name
		r := pair[1].Shape[1]
		addProduct(dst, int(off), ab[0], ab[1][row*r:], r, rows, t.Shape[1], m.Tuning.LoRA.Scale(name))
		return err
	}
}

// addProduct adds scale * B A, from an element on, to dst: of experts, to the rows of each its own. Each element is
// rounded once.
func addProduct(dst []float32, off int, a, b []float32, r, rows, in int, scale float64) {
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for row := off / in; row*in < off+len(dst); row++ {
		g.Go(func() error {
			lo, hi := max(row*in, off), min((row+1)*in, off+len(dst))
			sums, a := make([]float64, hi-lo), a[row/rows*r*in:]
			for k := range r {
				factor := scale * float64(b[row*r+k])
				for i, x := range a[k*in+lo-row*in : k*in+hi-row*in] {
					sums[i] += factor * float64(x)
				}
			}
			for i, x := range sums {
				dst[lo-off+i] = float32(float64(dst[lo-off+i]) + x)
			}
			return nil
		})
	}
	_ = g.Wait() // no error
}

// fillBase sets this rank's shard of the frozen weights.
func (t *Trainer) fillBase(ctx context.Context, from source32, drawn drawn) error {
	base := t.share.Base
	if base == nil {
		return nil
	}
	return t.stage.indirect(func() error {
		for b, bucket := range base.Flat.Buckets {
			if bucket.Size() == 0 {
				continue
			}
			v, held := base.Place(b)
			if !base.Sharded() {
				v, held = t.divide(b, v, held)
			}
			err := error(nil)
			if base.Flat.Scaled(b) {
				err = t.fillCodes(ctx, b, v, held, from, drawn)
			} else {
				err = t.fillBucket(ctx, base.Flat.Params, v, held, from, drawn)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// fillCodes sets the codes of a range of a bucket. Rows that its ends cut are read whole, for their factors.
func (t *Trainer) fillCodes(ctx context.Context, bucket int, v View, held model.Range, from source32,
	drawn drawn) error {
	base := t.share.Base
	for _, r := range base.Rows(bucket, held, state.LoadSize) {
		if err := t.fillBucket(ctx, base.Flat.Params, base.Loaded(r), r.Whole, from, drawn); err != nil {
			return err
		}
		base.QuantizeLoaded(t.dev.Ops, r, state.Part(v, int(r.Lo-held.Lo), int(r.Hi-held.Lo)))
	}
	return nil
}
