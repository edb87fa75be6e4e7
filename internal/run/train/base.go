package train

import (
	"context"
	"errors"
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
)

// Initial reads the values of parameters before the first step: from the directories of model.from and lora.from, or
// random ones from the seed. They do not depend on the number of ranks. Frozen parameters keep them.
type Initial struct {
	cfg     *config.Config
	base    *hf.Weights // nil: random
	adapter *hf.Weights // nil: random
}

// NewInitial opens the directories of a config. The caller closes the result.
func NewInitial(cfg *config.Config) (*Initial, error) {
	s, m := &Initial{cfg: cfg}, &cfg.Model
	var err error
	if m.From != "" {
		if s.base, err = hf.OpenWeights(m.From); err == nil {
			err = s.base.Check(m.Family(), m.Tensors())
		}
	}
	if l := m.Tuning.LoRA; err == nil && l != nil && l.From != "" {
		if s.adapter, err = hf.OpenAdapter(l.From); err == nil {
			err = s.adapter.Check(m.Family(), m.Adapters())
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
func (s *Initial) Read(p model.Param, offset int64, dst []float32) error {
	from := s.base
	if _, _, adapts := hf.Adapted(p.Name); adapts {
		from = s.adapter
	}
	if from != nil {
		return from.Read(p.Tensor, dst, offset)
	}
	end := offset + int64(len(dst))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for lo := offset / model.InitBlock * model.InitBlock; lo < end; lo += model.InitBlock {
		g.Go(func() error {
			hi := min(lo+model.InitBlock, int64(p.Size()))
			if lo >= offset && hi <= end {
				p.Init(dst[lo-offset:hi-offset], lo, s.cfg.Train.Seed)
				return nil
			}
			block := make([]float32, hi-lo)
			p.Init(block, lo, s.cfg.Train.Seed)
			first := max(lo, offset)
			copy(dst[first-offset:], block[first-lo:])
			return nil
		})
	}
	return g.Wait()
}

// fillBase sets this rank's shard of the frozen weights.
func (t *Trainer) fillBase(ctx context.Context, from *Initial) error {
	base := t.share.Base
	if base == nil {
		return nil
	}
	return t.stage.indirect(func() error {
		for b := range base.Flat.Buckets {
			v, held := base.Place(b)
			if err := t.fillBucket(ctx, base.Flat.Params, v, held, from.Read); err != nil {
				return err
			}
		}
		return nil
	})
}
