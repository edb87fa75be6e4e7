// Package qkv knows the layouts in which q, k and v lie in memory: three tensors or views of one
// packed tensor, with the batch or the sequence first, or documents one behind another. It names
// them, finds which one three views have, checks a declared one to the stride, and places or copies
// tensors so.
package qkv

import (
	"fmt"
	"slices"
)

// Layout says where every element of q, k and v lies: the order of batch, sequence and
// heads of q and of k and v, and how the three share memory. It is comparable. A kernel that
// is given the layout, the address of the first element and the lengths needs no strides.
//
// The names are those of TransformerEngine's get_qkv_layout: one word for each tensor in
// memory, one letter for each axis, outermost first. b: batch, s: sequence, t: all tokens of
// all documents, h: query heads (in the words of k and v their own heads), h_g and g: KV
// heads, d: head dim, 2 and 3: an axis over (k, v) and (q, k, v).
type Layout struct {
	Q, KV   Format  // the order of the axes of q, and of k and v
	Packing Packing // which of the three share memory
}

type namedLayout struct {
	Layout
	name string
}

// layouts holds every layout in the order of preference where several describe the same
// addresses: packed before separate, because it says more; of two packings that agree (one
// KV head, as many KV heads as query heads) the plainer one; mixed formats last, because the
// fewest kernels take them.
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

// formatPreference is the order of formats in layouts, which breaks the tie at batch 1.
var formatPreference = [...]Format{BSHD, SBHD, THD}

func perFormat(p Packing, names ...string) []namedLayout {
	var ls []namedLayout
	for i, f := range formatPreference {
		ls = append(ls, namedLayout{Layout{f, f, p}, names[i]})
	}
	return ls
}

// Layouts lists every layout there is, the preferred ones first.
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

// Valid reports whether l is one of Layouts. Q and KV of different formats are known only
// where all three tensors are separate.
func (l Layout) Valid() bool {
	for i := range layouts {
		if layouts[i].Layout == l {
			return true
		}
	}
	return false
}

// Parse returns the layout of that full name.
func Parse(name string) (Layout, error) {
	for i := range layouts {
		if layouts[i].name == name {
			return layouts[i].Layout, nil
		}
	}
	names := make([]string, len(layouts))
	for i, l := range layouts {
		names[i] = l.name
	}
	return Layout{}, fmt.Errorf("layout %q: want one of %v", name, names)
}
