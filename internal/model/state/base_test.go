package state

import (
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// Frozen weights take their bytes in the compute type, in parts if weights are, and nothing else; only the adapters have
// masters, gradients and moments.
func TestBytesOfFrozenWeights(t *testing.T) {
	const ranks = 4
	cfg := &hf.Config{
		Architecture: hf.Llama, VocabSize: 37, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6,
		Tuning: hf.Tuning{LoRA: &hf.LoRA{R: 2, Alpha: 4}},
	}
	flat := model.NewLayout(cfg, ranks)
	base := flat.Frozen
	whole := func(b int) int64 { return base.Buckets[b].Size() }
	buffers := 2 * (whole(flat.Layer(0)) + whole(flat.Layer(1)) + max(whole(flat.Embedding()), whole(base.Head())))
	vectors, longest := 4*whole(base.Vectors()), int64(4*cfg.HiddenSize)
	for _, c := range []struct {
		shard  Sharding
		copies int
		frozen bool
		want   int64
	}{
		{ShardNone, 1, false, 2*base.Size() + vectors + longest},
		{ShardNone, 1, true, 2*base.Size() + vectors},
		{ShardGradients, 1, false, 2*base.Size() + vectors + longest},
		{ShardParameters, 1, false, 2*base.Size()/ranks + buffers + vectors + longest},
		{ShardParameters, 2, false, 2*base.Size()/2 + buffers + vectors + longest},
		{ShardParameters, ranks, false, 2*base.Size() + vectors + longest},
	} {
		meter := Meter{}
		s := must.Have(New(meter, Options{Layout: flat, Groups: Groups(flat, Group{Rank: 3, Size: ranks, Copies: c.copies}),
			Shard: c.shard, Compute: tensor.BF16, Frozen: c.frozen}))
		if meter[Base] != c.want {
			t.Errorf("%+v: %d bytes", c, meter[Base])
		}
		trained := *flat
		trained.Frozen = nil
		alone := Meter{}
		must.Have(New(alone, Options{Layout: &trained, Groups: Groups(flat, Group{Rank: 3, Size: ranks,
			Copies: c.copies}), Shard: c.shard, Compute: tensor.BF16, Frozen: c.frozen}))
		for _, what := range []string{Weights, Compute, Gradients, Moments} {
			if meter[what] != alone[what] {
				t.Errorf("%+v: %s take %d bytes, of the adapters %d", c, what, meter[what], alone[what])
			}
		}
		held := int64(0)
		for b := range base.Buckets {
			v, part := s.Base.Place(b)
			if int64(v.Size()) != part.Size() || part.Lo < base.Buckets[b].Lo || part.Hi > base.Buckets[b].Hi {
				t.Errorf("%+v: bucket %d, %v, has a part of %v in %d elements", c, b, base.Buckets[b], part, v.Size())
			}
			held += part.Size()
		}
		if held < base.Size()/ranks {
			t.Errorf("%+v: a rank holds %d of %d elements", c, held, base.Size())
		}
	}
}
