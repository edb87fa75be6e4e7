package model

import (
	"slices"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A Range is the elements [Lo, Hi) of a flat buffer.
type Range struct{ Lo, Hi int64 }

// Size returns the elements of the range.
func (r Range) Size() int64 { return r.Hi - r.Lo }

// of returns the range of a flat buffer.
func (r Range) of(flat View) View {
	return flat.Reshape([4]int{1, 1, 1, flat.Size()}).Slice(tensor.Dim, int(r.Lo), int(r.Hi))
}

// A Bucket holds parameters used at the same time of a pass, gathered and reduced in one piece by the ranks of a group.
// The buckets of a model follow each other in the flat buffers.
type Bucket struct {
	Range
	Key
	Used int64 // elements, without the padding after the last parameter
	Rows Range // of its matrices in E4M3, among all of the layout
}

// A Key names a bucket. Layer is -1 outside the layers.
type Key struct {
	Layer int
	Part  Section // of the layer or the model
}

// A Section is a part of a model with a bucket of its own, in each layer or once.
type Section int

// The sections, in the order of the flat buffers.
const (
	EmbeddingTable Section = iota
	LayerMatrices          // of a layer, except those in E4M3
	HeadMatrix             // empty if tied
	AllVectors             // all vectors, the only parameters without weight decay
	ScaledMatrices         // matrices of a layer in E4M3, before all others; only with Tuning.FP8
)

// keys lists the buckets of a model.
func keys(cfg *hf.Config) (list []Key) {
	for i := range cfg.NumHiddenLayers {
		if cfg.Tuning.FP8() {
			list = append(list, Key{i, ScaledMatrices})
		}
	}
	list = append(list, Key{-1, EmbeddingTable})
	for i := range cfg.NumHiddenLayers {
		list = append(list, Key{i, LayerMatrices})
	}
	return append(list, Key{-1, HeadMatrix}, Key{-1, AllVectors})
}

func keyOf(cfg *hf.Config, t hf.Tensor) Key {
	switch {
	case cfg.InE4M3(t):
		return Key{t.Layer, ScaledMatrices}
	case t.Kind != hf.Product:
		return Key{-1, AllVectors}
	case t.Layer >= 0:
		return Key{t.Layer, LayerMatrices}
	case t.Role == hf.Head:
		return Key{-1, HeadMatrix}
	}
	return Key{-1, EmbeddingTable}
}

// FlatLayout maps every trained parameter to its place in the flat buffers.
type FlatLayout struct {
	Params  []Param
	Buckets []Bucket
	// Frozen maps the parameters that training does not change to buffers of their own. Its buckets have the same
	// numbers; some of either are empty. nil: none.
	Frozen *FlatLayout

	owner []int // the bucket of each parameter
	index map[Key]int
	rows  int // of matrices in E4M3
}

// NewLayout returns the layout for a number of ranks. Every bucket divides into that many equal parts, each a multiple
// of Align.
func NewLayout(cfg *hf.Config, ranks int) *FlatLayout {
	trained, frozen := map[Key][]hf.Tensor{}, map[Key][]hf.Tensor{}
	for _, t := range slices.Concat(cfg.Tensors(), cfg.Adapters()) {
		list := trained
		if cfg.Frozen(t) {
			list = frozen
		}
		key := keyOf(cfg, t)
		list[key] = append(list[key], t)
	}
	l := newLayout(cfg, ranks, trained)
	if len(frozen) > 0 {
		l.Frozen = newLayout(cfg, ranks, frozen)
	}
	return l
}

func newLayout(cfg *hf.Config, ranks int, tensors map[Key][]hf.Tensor) *FlatLayout {
	l := &FlatLayout{index: map[Key]int{}}
	for b, key := range keys(cfg) {
		lo, row := l.Size(), int64(l.rows)
		hi := lo
		for _, t := range tensors[key] {
			p := NewParam(t, cfg)
			p.Offset = roundUp(hi, Align)
			hi = p.Offset + int64(p.Size())
			if key.Part == ScaledMatrices {
				p.Row = l.rows
				l.rows += p.Shape[0]
			}
			l.Params, l.owner = append(l.Params, p), append(l.owner, b)
		}
		l.Buckets = append(l.Buckets, Bucket{Range{lo, lo + roundUp(hi-lo, Align*int64(max(ranks, 1)))}, key, hi - lo,
			Range{row, int64(l.rows)}})
		l.index[key] = b
	}
	return l
}

// Size returns the elements of a flat buffer.
func (l *FlatLayout) Size() int64 {
	if len(l.Buckets) == 0 {
		return 0
	}
	return l.Buckets[len(l.Buckets)-1].Hi
}

// FrozenSize returns the elements of a flat buffer of Frozen.
func (l *FlatLayout) FrozenSize() int64 {
	if l.Frozen == nil {
		return 0
	}
	return l.Frozen.Size()
}

// Empty reports whether the buckets of With have no parameters, trained or frozen.
func (l *FlatLayout) Empty(bucket int) bool {
	return !slices.ContainsFunc(l.With(bucket), func(b int) bool {
		return l.Buckets[b].Size() > 0 || l.Frozen != nil && l.Frozen.Buckets[b].Size() > 0
	})
}

// Scaled reports whether a bucket has matrices in E4M3.
func (l *FlatLayout) Scaled(bucket int) bool { return l.Buckets[bucket].Part == ScaledMatrices }

// CodesSize returns the elements of the matrices in E4M3, the first of a flat buffer.
func (l *FlatLayout) CodesSize() int64 { return l.Buckets[l.Embedding()].Lo }

// FactorsSize returns the rows of the matrices in E4M3.
func (l *FlatLayout) FactorsSize() int { return l.rows }

// With returns a bucket and the others that a pass uses with it: beside a layer's, its matrices in E4M3.
func (l *FlatLayout) With(bucket int) []int {
	key := l.Buckets[bucket].Key
	if b, ok := l.index[Key{key.Layer, ScaledMatrices}]; ok && key.Part == LayerMatrices {
		return []int{bucket, b}
	}
	return []int{bucket}
}

// Of returns the bucket of the i-th parameter.
func (l *FlatLayout) Of(i int) int { return l.owner[i] }

// Rest returns the ranges inside a bucket, gaps among them, whose gradients no product sets.
func (l *FlatLayout) Rest(bucket int) (list []Range) {
	start, lo := l.Buckets[bucket].Lo, int64(0)
	for i, p := range l.Params {
		if l.owner[i] == bucket && p.Product {
			list = append(list, Range{lo, p.Offset - start})
			lo = p.Offset - start + int64(p.Size())
		}
	}
	list = append(list, Range{lo, l.Buckets[bucket].Size()})
	return slices.DeleteFunc(list, func(r Range) bool { return r.Size() == 0 })
}

// Embedding returns the number of the embedding's bucket, the first of a pass.
func (l *FlatLayout) Embedding() int { return l.index[Key{-1, EmbeddingTable}] }

// Layer returns the number of a layer's bucket.
func (l *FlatLayout) Layer(i int) int { return l.index[Key{i, LayerMatrices}] }

// Head returns the number of the head's bucket.
func (l *FlatLayout) Head() int { return l.index[Key{-1, HeadMatrix}] }

// Vectors returns the number of the bucket of all vectors.
func (l *FlatLayout) Vectors() int { return l.index[Key{-1, AllVectors}] }

// NoBucket follows the last bucket of a pass.
const NoBucket = -1
