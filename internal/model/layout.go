package model

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// Bucket is the elements [Lo, Hi) of the flat buffers: parameters used at the same time of a pass, and gathered and
// reduced in one piece. Bucket 0 is the embedding, 1 to L are the matrices of the layers, L+1 is the head (empty if
// tied), and L+2 is all vectors, the only parameters without weight decay.
type Bucket struct{ Lo, Hi int64 }

// Size returns the elements of the bucket.
func (b Bucket) Size() int64 { return b.Hi - b.Lo }

// of returns the bucket of a flat buffer.
func (b Bucket) of(flat View) View {
	return flat.Reshape([4]int{1, 1, 1, flat.Size()}).Slice(tensor.Dim, int(b.Lo), int(b.Hi))
}

// FlatLayout maps every trained parameter to its place in the flat buffers.
type FlatLayout struct {
	Params  []Param
	Buckets []Bucket
	// Frozen maps the parameters that training does not change to buffers of their own. Its buckets have the same
	// numbers; some of either are empty. nil: none.
	Frozen *FlatLayout

	owner []int // the bucket of each parameter
	unit  int64 // divides the sizes of buckets
}

// NewLayout returns the layout for a number of ranks. Every bucket divides into that many equal parts, each a multiple
// of Align.
func NewLayout(cfg *hf.Config, ranks int) *FlatLayout {
	all, n := slices.Concat(cfg.Tensors(), cfg.Adapters()), cfg.NumHiddenLayers
	slices.SortStableFunc(all, func(a, b hf.Tensor) int { return cmp.Compare(bucketOf(a, n), bucketOf(b, n)) })
	l := newLayout(cfg, ranks, all, func(t hf.Tensor) bool { return !cfg.Frozen(t) })
	if f := newLayout(cfg, ranks, all, cfg.Frozen); len(f.Params) > 0 {
		l.Frozen = f
	}
	return l
}

func newLayout(cfg *hf.Config, ranks int, all []hf.Tensor, has func(hf.Tensor) bool) *FlatLayout {
	l := &FlatLayout{unit: Align * int64(max(ranks, 1))}
	for _, t := range all {
		if !has(t) {
			continue
		}
		for len(l.Buckets) < bucketOf(t, cfg.NumHiddenLayers) {
			l.close()
		}
		l.add(NewParam(t, cfg))
	}
	for len(l.Buckets) < cfg.NumHiddenLayers+3 {
		l.close()
	}
	return l
}

func bucketOf(t hf.Tensor, layers int) int {
	switch {
	case len(t.Shape) == 1:
		return layers + 2
	case t.Role == hf.Head:
		return layers + 1
	}
	return t.Layer + 1 // 0 for the embedding
}

func (l *FlatLayout) add(p Param) {
	p.Offset = l.Size()
	if n := len(l.Params); n > 0 && l.owner[n-1] == len(l.Buckets) {
		last := l.Params[n-1]
		p.Offset = roundUp(last.Offset+int64(last.Size()), Align)
	}
	l.Params = append(l.Params, p)
	l.owner = append(l.owner, len(l.Buckets))
}

// close ends a bucket.
func (l *FlatLayout) close() {
	b := Bucket{Lo: l.Size(), Hi: l.Size()}
	if n := len(l.Params); n > 0 && l.owner[n-1] == len(l.Buckets) {
		last := l.Params[n-1]
		b.Hi = b.Lo + roundUp(last.Offset+int64(last.Size())-b.Lo, l.unit)
	}
	l.Buckets = append(l.Buckets, b)
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

// Empty reports whether a bucket has no parameters, trained or frozen.
func (l *FlatLayout) Empty(bucket int) bool {
	return l.Buckets[bucket].Size() == 0 && (l.Frozen == nil || l.Frozen.Buckets[bucket].Size() == 0)
}

// Of returns the bucket of the i-th parameter.
func (l *FlatLayout) Of(i int) int { return l.owner[i] }

// Rest returns the ranges inside a bucket, gaps among them, whose gradients no product sets.
func (l *FlatLayout) Rest(bucket int) (list []Bucket) {
	start, lo := l.Buckets[bucket].Lo, int64(0)
	for i, p := range l.Params {
		if l.owner[i] == bucket && p.Product {
			list = append(list, Bucket{lo, p.Offset - start})
			lo = p.Offset - start + int64(p.Size())
		}
	}
	list = append(list, Bucket{lo, l.Buckets[bucket].Size()})
	return slices.DeleteFunc(list, func(b Bucket) bool { return b.Size() == 0 })
}

// Head returns the number of the head's bucket.
func (l *FlatLayout) Head() int { return len(l.Buckets) - 2 }

// Vectors returns the number of the bucket of all vectors.
func (l *FlatLayout) Vectors() int { return len(l.Buckets) - 1 }

// Embedding is the number of the embedding's bucket.
const Embedding = 0

// NoBucket follows the last bucket of a pass.
const NoBucket = -1

// Layer returns the number of a layer's bucket.
func Layer(i int) int { return i + 1 }
