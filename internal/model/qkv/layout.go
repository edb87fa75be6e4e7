// Package qkv describes the layouts of q, k and v in memory: three tensors, or views of one packed tensor, with the
// batch or the sequence first, or documents one after another. Named returns a Layout by name, Layout.Dims the lengths
// for given shapes, and Layout.Bind the views.
package qkv

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/tensor"
)

// Format is the order of the axes of q, k and v in memory.
type Format uint8

// THD packs documents one after another, without padding.
const (
	BSHD Format = iota
	SBHD
	THD
)

// Packing describes how q, k and v share memory.
type Packing uint8

// Each comment gives the axes after batch and seq, with h query heads, g KV heads and head dim d, and their name.
const (
	Separate  Packing = iota // three tensors: hd_hd_hd
	QKV3HD                   // [3, h, d]: 3hd
	QKVH3D                   // [h, 3, d]: h3d
	KV2HD                    // q separate, [2, g, d]: hd_2hd
	KVH2D                    // q separate, [g, 2, d]: hd_h2d
	QKVHeads                 // [h + 2g, d], q heads first, then k, then v: (h+2g)d
	QKVGroups                // [g, h/g + 2, d], each group's q heads, its k, its v: g(h/g+2)d
)

// Layout is the order of batch, sequence and heads of q and of k and v, and the packing. It is comparable.
//
// The names are from TransformerEngine's get_qkv_layout: one word for each tensor in memory, one letter for each axis,
// outermost first. b: batch, s: sequence, t: all tokens of all documents, h: query heads (for k and v their own heads),
// h_g and g: KV heads, d: head dim, 2 and 3: an axis over (k, v) and (q, k, v).
type Layout struct {
	Q, KV   Format  // the order of the axes of q, and of k and v
	Packing Packing // shared memory of the three
}

type namedLayout struct {
	Layout
	name string
}

// layouts are in order of preference among those with the same addresses: the simpler one of two equal packings (one KV
// head, or as many KV heads as query heads); mixed formats last.
var layouts = slices.Concat(
	perFormat(QKV3HD, "bs3hd", "sb3hd", "t3hd"),
	perFormat(QKVH3D, "bsh3d", "sbh3d", "th3d"),
	perFormat(QKVHeads, "bs(h+2h_g)d", "sb(h+2h_g)d", "t(h+2h_g)d"),
	perFormat(QKVGroups, "bsg(h/g+2)d", "sbg(h/g+2)d", "tg(h/g+2)d"),
	perFormat(KV2HD, "bshd_bs2hd", "sbhd_sb2hd", "thd_t2hd"),
	perFormat(KVH2D, "bshd_bsh2d", "sbhd_sbh2d", "thd_th2d"),
	perFormat(Separate, "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "thd_thd_thd"),
	[]namedLayout{
		{Layout{SBHD, BSHD, Separate}, "sbhd_bshd_bshd"},
		{Layout{BSHD, SBHD, Separate}, "bshd_sbhd_sbhd"},
		{Layout{THD, BSHD, Separate}, "thd_bshd_bshd"},
		{Layout{THD, SBHD, Separate}, "thd_sbhd_sbhd"},
	},
)

func perFormat(p Packing, names ...string) []namedLayout {
	var ls []namedLayout
	for i, f := range []Format{BSHD, SBHD, THD} {
		ls = append(ls, namedLayout{Layout{f, f, p}, names[i]})
	}
	return ls
}

// Layouts lists all layouts, preferred ones first.
func Layouts() []Layout {
	ls := make([]Layout, len(layouts))
	for i, l := range layouts {
		ls[i] = l.Layout
	}
	return ls
}

// String returns the layout's name, such as "sbhd_sbhd_sbhd" or "bs3hd".
func (l Layout) String() string {
	for i := range layouts {
		if layouts[i].Layout == l {
			return layouts[i].name
		}
	}
	return fmt.Sprintf("layout(%d,%d,%d)", l.Q, l.KV, l.Packing)
}

func (l Layout) valid() bool { return slices.Contains(Layouts(), l) }

// Named returns the layout with a full name such as "sbhd_sbh2d" or "bs3hd", or with a short one: "sbh2d" for a packed
// tensor beside q, "sbhd" for three equal tensors.
func Named(name string) (Layout, error) {
	for i := range layouts {
		if l := &layouts[i]; name != "" && (name == l.name || name == l.short()) {
			return l.Layout, nil
		}
	}
	names := make([]string, len(layouts))
	for i, l := range layouts {
		names[i] = l.name
	}
	return Layout{}, fmt.Errorf("layout %q: want one of %v", name, names)
}

// short returns the last word of a name if the other words follow from it, else "".
func (l *namedLayout) short() string {
	if l.Q != l.KV || l.Packing.oneTensor() {
		return ""
	}
	return l.name[strings.LastIndex(l.name, "_")+1:]
}

// LayoutDims holds the lengths of a layout. Batch is the batch of k and v, and of q unless q is thd. A thd tensor has
// batch 1, and its sequence has the tokens of all documents.
type LayoutDims struct {
	Batch, SeqQ, SeqKV int
	Heads, KVHeads     int
	HeadDim, HeadDimV  int // of q and k, and of v
}

// A spot is the place of q, k or v: the index of its tensor in memory, its offset there, and the strides between
// tokens, groups and heads of a group.
type spot struct {
	buffer                  int
	off, token, group, head int64
}

// spots returns the places of q, k and v for each packing.
func (l Layout) spots(n *LayoutDims) (q, k, v spot) {
	h, g, d, e := int64(n.Heads), int64(n.KVHeads), int64(n.HeadDim), int64(n.HeadDimV)
	r := h / max(g, 1)
	all := (h + 2*g) * d // of one token, if the three share a tensor
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

// strides returns the strides of a tensor. A thd tensor is a bshd tensor of batch 1 with all tokens in its sequence.
func (s *spot) strides(f Format, batch, seq int) [5]int64 {
	if f == SBHD {
		return [5]int64{s.token, int64(batch) * s.token, s.group, s.head, 1}
	}
	return [5]int64{int64(seq) * s.token, s.token, s.group, s.head, 1}
}

func (l Layout) batchQ(n *LayoutDims) int {
	if l.Q == THD {
		return 1
	}
	return n.Batch
}

func (p Packing) oneTensor() bool {
	return p == QKV3HD || p == QKVH3D || p == QKVHeads || p == QKVGroups
}

// cannotHold returns the reason why the layout does not fit these lengths, or "".
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

// Alike reports whether two layouts of these lengths have the same tensors and the same address for every element.
func Alike(a, b Layout, n LayoutDims) bool {
	if len(a.Tensors()) != len(b.Tensors()) || a.cannotHold(&n) != "" || b.cannotHold(&n) != "" {
		return false
	}
	pa, pb := a.placed(n), b.placed(n)
	for i := range pa {
		x, y := &pa[i], &pb[i]
		if x.buffer != y.buffer || x.off != y.off || x.shape != y.shape {
			return false
		}
		for axis, length := range x.shape {
			if length > 1 && x.strides[axis] != y.strides[axis] {
				return false
			}
		}
	}
	return true
}

// A placed tensor is q, k or v with axes [batch, seq, group, head in the group, dim]: a group is one KV head with its
// query heads. In a layout such as sbg(h/g+2)d, query heads of different groups are not evenly spaced.
type placed struct {
	spot
	shape   [5]int
	strides [5]int64
}

func (l Layout) placed(n LayoutDims) (out [3]placed) {
	q, k, v := l.spots(&n)
	for i, x := range []struct {
		spot
		format                 Format
		batch, seq, heads, dim int
	}{
		{q, l.Q, l.batchQ(&n), n.SeqQ, n.Heads / n.KVHeads, n.HeadDim},
		{k, l.KV, n.Batch, n.SeqKV, 1, n.HeadDim},
		{v, l.KV, n.Batch, n.SeqKV, 1, n.HeadDimV},
	} {
		out[i] = placed{x.spot, [5]int{x.batch, x.seq, n.KVHeads, x.heads, x.dim}, x.strides(x.format, x.batch, x.seq)}
	}
	return out
}

// QKV is q, k and v of a layout in memory.
type QKV struct {
	buffers []tensor.View
	three   [3]placed
}

// Bind returns q, k and v of a layout as views of its dense tensors. It panics if a tensor is too small.
func (l Layout) Bind(tensors []tensor.View, n LayoutDims) (*QKV, error) {
	if !l.valid() {
		return nil, fmt.Errorf("layout %v is not known", l)
	}
	if why := l.cannotHold(&n); why != "" {
		return nil, fmt.Errorf("layout %v of %+v: %s", l, n, why)
	}
	return &QKV{tensors, l.placed(n)}, nil
}

// Groups returns the number of KV heads.
func (t *QKV) Groups() int { return t.three[0].shape[2] }

// Group returns the three views of one KV head and its query heads: [batch, seq, heads of the group, dim].
func (t *QKV) Group(i int) (q, k, v tensor.View) {
	return t.group(0, i), t.group(1, i), t.group(2, i)
}

func (t *QKV) group(which, i int) tensor.View {
	p := &t.three[which]
	in, n, s := t.buffers[p.buffer], p.shape, p.strides
	return tensor.NewView(in.Memory(), in.DType(), in.Offset()+p.off+int64(i)*s[2],
		[4]int{n[0], n[1], n[3], n[4]}, [4]int64{s[0], s[1], s[3], s[4]})
}
