package state

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// A host is an Allocator of memory.
type host struct{}

func (host) Vector(_ string, t tensor.DType, n int) (View, error)     { return tensor.New(t, n), nil }
func (host) HostVector(_ string, t tensor.DType, n int) (View, error) { return tensor.New(t, n), nil }

// Codes and factors of parts are those of the whole: of updated weights after the largest factors of the ranks, and of
// a base in pieces of any size.
func TestCodesOfParts(t *testing.T) {
	defer func(n int) { LoadSize = n }(LoadSize)
	stream := tensor.NewHostStream("test")
	defer stream.Close()
	ops := cpu.New(stream)
	cfg := &hf.Config{
		Architecture: hf.Llama, VocabSize: 37, HiddenSize: 48, IntermediateSize: 80, NumHiddenLayers: 2,
		NumAttentionHeads: 3, NumKeyValueHeads: 1, HeadDim: 16, RMSNormEps: 1e-6,
		Tuning: hf.Tuning{Linears: "fp8", Freeze: []string{"*.1.*"}},
	}
	random := func(p model.Param, i int64) float32 {
		r := rand.New(rand.NewPCG(uint64(p.Offset), uint64(i)))
		return float32(math.Exp(3 * r.NormFloat64()))
	}
	// set sets the elements of a vector that begins at lo.
	set := func(flat *model.FlatLayout, v View, lo int64) {
		values := make([]float32, v.Size())
		for _, p := range flat.Params {
			for i := max(p.Offset, lo); i < min(p.Offset+int64(p.Size()), lo+int64(v.Size())); i++ {
				values[i-lo] = random(p, i-p.Offset)
			}
		}
		ops.Copy(v, tensor.FromSlice(values, len(values)))
	}
	type codes struct{ codes, factors []byte }
	results := func(ranks int, compute tensor.DType) (trained, frozen codes) {
		flat := model.NewLayout(cfg, 3) // the same for any number of ranks
		scaled, base := flat.With(flat.Layer(0))[1], flat.With(flat.Layer(1))[1]
		var states []*State
		factors := make([]float32, flat.FactorsSize())
		each := func(f func(s *State)) {
			for _, s := range states {
				f(s)
				must.Do(t, stream.Sync(context.Background()))
			}
		}
		for rank := range ranks {
			s := must.Have(New(host{}, Options{Layout: flat, Groups: Groups(flat, Group{Rank: rank, Size: ranks}),
				Shard: ShardParameters, Compute: compute}))
			s.Zero(ops)
			states = append(states, s)
		}
		each(func(s *State) {
			set(flat, s.Held(s.Masters, scaled), s.HeldRange(scaled).Lo)
			s.CopyCompute(ops, scaled)
			s.Quantize(ops, scaled, false)
		})
		for _, s := range states {
			for i, f := range tensor.Data[float32](s.Factors) {
				factors[i] = max(factors[i], f)
			}
		}
		each(func(s *State) {
			ops.Copy(s.Factors, tensor.FromSlice(factors, len(factors)))
			s.Quantize(ops, scaled, true)
			must.Do(t, stream.Sync(context.Background()))
			trained.codes = append(trained.codes, tensor.Bytes(s.Held(s.codes, scaled))...)
			trained.factors = tensor.Bytes(s.Factors)
		})
		sum := make([]float32, flat.Frozen.FactorsSize())
		each(func(s *State) {
			v, held := s.Base.Place(base)
			for _, r := range s.Base.Rows(base, held, LoadSize) {
				set(s.Base.Flat, s.Base.Loaded(r), r.Whole.Lo)
				s.Base.QuantizeLoaded(ops, r, Part(v, int(r.Lo-held.Lo), int(r.Hi-held.Lo)))
			}
			must.Do(t, stream.Sync(context.Background()))
			frozen.codes = append(frozen.codes, tensor.Bytes(v)...)
			for i, f := range tensor.Data[float32](s.Base.Factors) {
				if sum[i] != 0 && f != 0 && f != sum[i] {
					t.Errorf("%d ranks: factor %d of the base is %v, and %v on another rank", ranks, i, f, sum[i])
				}
				sum[i] = max(sum[i], f)
			}
		})
		for _, f := range sum {
			frozen.factors = append(frozen.factors, tensor.Bytes(tensor.FromSlice([]float32{f}, 1))...)
		}
		return trained, frozen
	}
	for _, compute := range []tensor.DType{tensor.F32, tensor.BF16} {
		LoadSize = 1 << 20
		trained, frozen := results(1, compute)
		if !slices.ContainsFunc(trained.codes, func(c byte) bool { return c == 0x7e }) { // the largest
			t.Fatal("no code of a row's largest element")
		}
		for ranks := 1; ranks <= 3; ranks += 2 {
			for _, LoadSize = range []int{1, 200, 1 << 20} {
				got, gotFrozen := results(ranks, compute)
				if !bytes.Equal(got.codes, trained.codes) || !bytes.Equal(got.factors, trained.factors) {
					t.Errorf("%d ranks, %v: other codes or factors than on one rank", ranks, compute)
				}
				if !bytes.Equal(gotFrozen.codes, frozen.codes) || !bytes.Equal(gotFrozen.factors, frozen.factors) {
					t.Errorf("%d ranks, %v, pieces of %d: other codes or factors of the base", ranks, compute, LoadSize)
				}
			}
		}
	}
}

// Codes take a byte an element, in the state and in gathers, and factors four a row; bfloat16 takes two.
func TestBytesOfCodes(t *testing.T) {
	for _, lora := range []*hf.LoRA{nil, {R: 2, Alpha: 4}, {R: 2, Alpha: 4, Base: "bf16"}} {
		cfg := &hf.Config{
			Architecture: hf.Llama, VocabSize: 37, HiddenSize: 48, IntermediateSize: 80, NumHiddenLayers: 3,
			NumAttentionHeads: 3, NumKeyValueHeads: 1, HeadDim: 16, RMSNormEps: 1e-6, Tuning: hf.Tuning{LoRA: lora},
		}
		// bytes returns the bytes of weights in some state, of codes' other memory there, and of a layer's gathers.
		bytes := func(linears string, shard Sharding) (held, beside, gathered int64) {
			own := *cfg
			own.Tuning.Linears = linears
			flat, meter := model.NewLayout(&own, 4), Meter{}
			s := must.Have(New(meter, Options{Layout: flat, Groups: Groups(flat, Group{Rank: 1, Size: 4}), Shard: shard,
				Compute: tensor.BF16}))
			of, what := s, Compute
			if lora != nil {
				of, what = s.Base, Base
			}
			for _, v := range []View{of.Factors, of.updated, of.cut} {
				if !v.IsZero() {
					beside += int64(v.Size() * v.DType().Size())
				}
			}
			for _, b := range flat.With(flat.Layer(1)) {
				if dst, src := of.Gathered(b); !dst.IsZero() && dst.Size() > 0 {
					if dst.DType() != src.DType() || dst.Size() != 4*src.Size() {
						t.Errorf("a gather of %v to %v", src, dst)
					}
					gathered += int64(dst.Size() * dst.DType().Size())
				}
			}
			return meter[what], beside, gathered
		}
		for _, shard := range []Sharding{ShardNone, ShardGradients, ShardParameters} {
			held, beside, gathered := bytes("fp8", shard)
			plainHeld, _, plainGathered := bytes("bf16", shard)
			layer := int64(48*48*2 + 2*48*16 + 3*48*80)
			saved := 3 * layer
			if shard == ShardParameters {
				saved = 3*layer/4 + LeastSlots*layer // and the memory of gathered layers
			}
			want := plainGathered / 2
			if lora != nil && lora.Base == "bf16" {
				saved, want = 0, plainGathered
			}
			if plainHeld-held+beside != saved || gathered != want {
				t.Errorf("LoRA %v, sharding %d: %d bytes for %d, %d beside; gathers of %d for %d; want %d less", lora, shard, held,
					plainHeld, beside, gathered, plainGathered, saved)
			}
		}
	}
}

// A step that fp16 skips sets no weights. The codes then stay, also of several layers.
func TestCodesOfSkippedSteps(t *testing.T) {
	stream := tensor.NewHostStream("test")
	defer stream.Close()
	ops := cpu.New(stream)
	cfg := &hf.Config{
		Architecture: hf.Llama, VocabSize: 37, HiddenSize: 48, IntermediateSize: 80, NumHiddenLayers: 3,
		NumAttentionHeads: 3, NumKeyValueHeads: 1, HeadDim: 16, RMSNormEps: 1e-6, Tuning: hf.Tuning{Linears: "fp8"},
	}
	flat := model.NewLayout(cfg, 1)
	s := must.Have(New(host{}, Options{Layout: flat, Groups: Groups(flat, Group{Size: 1}), Compute: tensor.F16}))
	for i := range tensor.Data[float32](s.Masters) {
		tensor.Data[float32](s.Masters)[i] = float32(i%1009) - 500
	}
	codes := func(update bool) []byte {
		for b := range flat.Buckets {
			if !flat.Scaled(b) {
				continue
			}
			if update {
				s.CopyCompute(ops, b)
			}
			s.Quantize(ops, b, false)
		}
		must.Do(t, stream.Sync(context.Background()))
		return bytes.Clone(tensor.Bytes(s.codes))
	}
	if updated := codes(true); !bytes.Equal(codes(false), updated) {
		t.Error("codes without an update are not those of the update before")
	}
}
