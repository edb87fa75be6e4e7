package qkv

import (
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// LayoutDims is the lengths that a layout is filled with. Batch is that of k and v; it is 1
// where they are thd, and that of q is 1 where q is thd, else the same. SeqQ and SeqKV then
// count the tokens of all documents.
type LayoutDims struct {
	Batch, SeqQ, SeqKV int
	Heads, KVHeads     int
	HeadDim, HeadDimV  int // of q and k, and of v
}

// Base is where a tensor in memory begins.
type Base struct {
	Memory tensor.Memory // the allocation
	Offset int64         // of the first element, in elements
}

// Bases is where q, k and v begin. A kernel is given the first element of each tensor in
// memory: only Q counts where the three are packed in one, only Q and K where k and v are.
type Bases struct{ Q, K, V Base }

// Bases returns where the three begin.
func (t *QKV) Bases() Bases {
	return Bases{t.Q.base(), t.K.base(), t.V.base()}
}

func (d *TensorDesc) base() Base { return Base{d.Memory, d.Offset} }

// spot is the place of q, k or v in a layout: which of its tensors in memory, the offset of
// the first element in it, and the distances between tokens, groups, heads of a group.
type spot struct {
	buffer                  int
	off, token, group, head int64
}

// spots is the definition of the packings: where each of q, k and v lies.
func (l Layout) spots(n *LayoutDims) (q, k, v spot) {
	h, g, d, e := int64(n.Heads), int64(n.KVHeads), int64(n.HeadDim), int64(n.HeadDimV)
	r := h / max(g, 1)
	all := (h + 2*g) * d // of one token, where the three are packed in one
	switch l.Packing {
	case QKV3HD:
		return spot{0, 0, all, r * d, d}, spot{0, h * d, all, d, d}, spot{0, 2 * h * d, all, d, d}
	case QKVH3D:
		return spot{0, 0, all, 3 * d, 3 * d}, spot{0, d, all, 3 * d, 3 * d}, spot{0, 2 * d, all, 3 * d, 3 * d}
	case QKVHeads:
		return spot{0, 0, all, r * d, d}, spot{0, h * d, all, d, d}, spot{0, (h + g) * d, all, d, d}
	case QKVGroups:
		w := (r + 2) * d
		return spot{0, 0, all, w, d}, spot{0, r * d, all, w, w}, spot{0, (r + 1) * d, all, w, w}
	case KV2HD:
		return spot{0, 0, h * d, r * d, d}, spot{1, 0, 2 * g * d, d, d}, spot{1, g * d, 2 * g * d, d, d}
	case KVH2D:
		return spot{0, 0, h * d, r * d, d}, spot{1, 0, 2 * g * d, 2 * d, 2 * d}, spot{1, d, 2 * g * d, 2 * d, 2 * d}
	}
	return spot{0, 0, h * d, r * d, d}, spot{1, 0, g * d, d, d}, spot{2, 0, g * e, e, e}
}

// strides is the strides of a tensor in a spot. A thd tensor has batch 1, so it is a bshd
// tensor whose sequence is all tokens.
func (s *spot) strides(f Format, batch, seq int) [axes]int64 {
	if f == SBHD {
		return [axes]int64{s.token, int64(batch) * s.token, s.group, s.head, 1}
	}
	return [axes]int64{int64(seq) * s.token, s.token, s.group, s.head, 1}
}

// batchQ is the batch of q.
func (l Layout) batchQ(n *LayoutDims) int {
	if l.Q == THD {
		return 1
	}
	return n.Batch
}

// oneTensor reports whether q, k and v are packed in one tensor.
func (p Packing) oneTensor() bool {
	return p == QKV3HD || p == QKVH3D || p == QKVHeads || p == QKVGroups
}

// cannotHold is why the layout has no place for these lengths, or "".
func (l Layout) cannotHold(n *LayoutDims) string {
	switch {
	case l.KV == THD && n.Batch != 1:
		return "thd takes k and v of batch 1, with all tokens on the sequence axis"
	case n.KVHeads <= 0 || n.Heads <= 0 || n.Heads%n.KVHeads != 0:
		return "the query heads must be a multiple of the KV heads"
	case l.Packing != Separate && n.HeadDim != n.HeadDimV:
		return "packed tensors have one head dim for q, k and v"
	case l.Packing.oneTensor() && n.SeqQ != n.SeqKV:
		return "q, k and v in one tensor have one length"
	case (l.Packing == QKV3HD || l.Packing == QKVH3D) && n.Heads != n.KVHeads:
		return "an axis of length 3 needs as many KV heads as query heads"
	}
	return ""
}

// Place returns q, k and v of a layout as a kernel addresses them: from the beginning of each
// tensor in memory, the lengths and the layout, and from nothing else. It fails where the
// layout cannot hold such lengths, and panics where the memory is too small.
func Place(l Layout, t tensor.DType, at Bases, n LayoutDims) (QKV, error) {
	if !l.Valid() {
		return QKV{}, fmt.Errorf("layout %v is not known", l)
	}
	if why := l.cannotHold(&n); why != "" {
		return QKV{}, fmt.Errorf("layout %v of %+v: %s", l, n, why)
	}
	q, k, v := l.spots(&n)
	bases := [3]Base{at.Q, at.K, at.V}
	desc := func(s spot, f Format, batch, seq, heads, dim int) TensorDesc {
		return TensorDesc{
			Memory: bases[s.buffer].Memory, Offset: bases[s.buffer].Offset + s.off, DType: t,
			Shape: [axes]int{batch, seq, n.KVHeads, heads, dim}, Strides: s.strides(f, batch, seq),
		}
	}
	out := QKV{
		Q: desc(q, l.Q, l.batchQ(&n), n.SeqQ, n.Heads/n.KVHeads, n.HeadDim),
		K: desc(k, l.KV, n.Batch, n.SeqKV, 1, n.HeadDim),
		V: desc(v, l.KV, n.Batch, n.SeqKV, 1, n.HeadDimV),
	}
	for g := range out.Groups() { // NewView checks the bounds
		out.Group(g)
	}
	return out, nil
}
