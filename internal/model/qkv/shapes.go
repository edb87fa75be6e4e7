package qkv

import (
	"errors"
	"fmt"
	"slices"
)

// Known holds lengths given in addition to the shapes: Heads (of q), KVHeads and HeadDim. 0: not given.
type Known struct{ Heads, KVHeads, HeadDim int }

// ErrHeads is the cause if the shape fits, but Dims needs Known to separate query heads from KV heads.
var ErrHeads = errors.New("the shape does not tell query heads from KV heads: say heads or kv_heads")

// Tensors returns the names of the tensors in memory: "qkv", "q" and "kv", or "q", "k" and "v".
func (l Layout) Tensors() []string {
	switch {
	case l.Packing.oneTensor():
		return []string{"qkv"}
	case l.Packing == Separate:
		return []string{"q", "k", "v"}
	}
	return []string{"q", "kv"}
}

// Shapes returns the shapes of Tensors, one axis for each letter of the layout's name, outermost first; h+2h_g is one
// axis.
func (l Layout) Shapes(n LayoutDims) [][]int {
	q, k := l.Q.tokens(l.batchQ(&n), n.SeqQ), l.KV.tokens(n.Batch, n.SeqKV)
	h, g, d, e := n.Heads, n.KVHeads, n.HeadDim, n.HeadDimV
	of := func(tokens []int, rest ...int) []int { return slices.Concat(tokens, rest) }
	switch l.Packing {
	case QKV3HD:
		return [][]int{of(q, 3, h, d)}
	case QKVH3D:
		return [][]int{of(q, h, 3, d)}
	case QKVHeads:
		return [][]int{of(q, h+2*g, d)}
	case QKVGroups:
		return [][]int{of(q, g, h/max(g, 1)+2, d)}
	case KV2HD:
		return [][]int{of(q, h, d), of(k, 2, g, d)}
	case KVH2D:
		return [][]int{of(q, h, d), of(k, g, 2, d)}
	}
	return [][]int{of(q, h, d), of(k, g, d), of(k, g, e)}
}

func (f Format) tokens(batch, seq int) []int {
	switch f {
	case SBHD:
		return []int{seq, batch}
	case THD:
		return []int{seq}
	}
	return []int{batch, seq}
}

// of returns the batch and the sequence of a shape in this format.
func (f Format) of(shape []int) (batch, seq int) {
	switch f {
	case SBHD:
		return shape[1], shape[0]
	case THD:
		return 1, shape[0]
	}
	return shape[0], shape[1]
}

// Dims returns the lengths of a layout from the shapes of its Tensors. The error names the axis that does not fit.
func (l Layout) Dims(shapes [][]int, known Known) (LayoutDims, error) {
	var n LayoutDims
	if !l.valid() {
		return n, fmt.Errorf("layout %v is not known", l)
	}
	letters := l.Shapes(LayoutDims{}) // only their ranks matter
	for i, name := range l.Tensors() {
		if len(shapes) != len(letters) || len(shapes[i]) != len(letters[i]) {
			return n, fmt.Errorf("layout %v has %d axes in %s, which has shape %v", l, len(letters[i]), name, shapes[i])
		}
	}
	q := shapes[0]
	kv := shapes[len(shapes)/2] // k of three tensors, kv of two
	_, n.SeqQ = l.Q.of(q)
	n.Batch, n.SeqKV = l.KV.of(kv)
	n.HeadDim = q[len(q)-1]
	n.HeadDimV = n.HeadDim
	heads := func(shape []int, axis int) int { return shape[len(shape)-axis] } // counted from the last
	switch l.Packing {
	case QKV3HD:
		n.Heads, n.KVHeads = heads(q, 2), heads(q, 2)
	case QKVH3D:
		n.Heads, n.KVHeads = heads(q, 3), heads(q, 3)
	case QKVHeads:
		if n.Heads, n.KVHeads = known.Heads, known.KVHeads; n.Heads == 0 && n.KVHeads == 0 {
			return n, fmt.Errorf("layout %v of shape %v: %w", l, q, ErrHeads)
		}
		if n.Heads == 0 {
			n.Heads = heads(q, 2) - 2*n.KVHeads
		} else if n.KVHeads == 0 {
			n.KVHeads = (heads(q, 2) - n.Heads) / 2
		}
	case QKVGroups:
		n.Heads, n.KVHeads = heads(q, 3)*(heads(q, 2)-2), heads(q, 3)
	case KV2HD:
		n.Heads, n.KVHeads = heads(q, 2), heads(kv, 2)
	case KVH2D:
		n.Heads, n.KVHeads = heads(q, 2), heads(kv, 3)
	default:
		n.Heads, n.KVHeads, n.HeadDimV = heads(q, 2), heads(kv, 2), heads(shapes[2], 1)
	}
	return n, l.fault(n, shapes, known)
}

// fault compares lengths from some axes with all axes.
func (l Layout) fault(n LayoutDims, shapes [][]int, known Known) error {
	if n.Heads < 1 || n.KVHeads < 1 {
		return fmt.Errorf("layout %v leaves %d query heads and %d KV heads in shapes %v", l, n.Heads, n.KVHeads, shapes)
	}
	for i, want := range l.Shapes(n) {
		if !slices.Equal(want, shapes[i]) {
			return fmt.Errorf("layout %v demands %s of shape %v beside the rest; it is %v", l, l.Tensors()[i], want,
				shapes[i])
		}
	}
	if why := l.cannotHold(&n); why != "" {
		return fmt.Errorf("layout %v of shapes %v: %s", l, shapes, why)
	}
	for _, k := range []struct {
		what       string
		said, have int
	}{{"query heads", known.Heads, n.Heads}, {"KV heads", known.KVHeads, n.KVHeads},
		{"head dim", known.HeadDim, n.HeadDim}} {
		if k.said != 0 && k.said != k.have {
			return fmt.Errorf("layout %v has %s %d in shapes %v, not %d", l, k.what, k.have, shapes, k.said)
		}
	}
	return nil
}
