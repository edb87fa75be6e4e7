// Package qkv knows the layouts of q, k and v in memory: three tensors, or views of one packed tensor, with the batch
// or the sequence first, or documents one after another. Named finds a Layout by its name, Layout.Dims finds lengths by
// shapes, Layout.Place returns the views.
package qkv

import (
	"fmt"
	"slices"
	"strings"
)

// Format is the order of the axes of q, k and v in memory.
type Format uint8

// The formats. THD packs documents one after another, without padding.
const (
	BSHD Format = iota
	SBHD
	THD
)

// Packing describes how q, k and v share memory.
type Packing uint8

// The packings, h query heads, g KV heads, d head dim. The names follow the axes of a packed tensor after batch and
// seq.
const (
	Separate  Packing = iota // three tensors: hd_hd_hd
	QKV3HD                   // [3, h, d]: 3hd
	QKVH3D                   // [h, 3, d]: h3d
	KV2HD                    // q apart, [2, g, d]: hd_2hd
	KVH2D                    // q apart, [g, 2, d]: hd_h2d
	QKVHeads                 // [h + 2g, d], q heads first, then k, then v: (h+2g)d
	QKVGroups                // [g, h/g + 2, d], each group's q heads, its k, its v: g(h/g+2)d
)

// Layout is the order of batch, sequence and heads of q and of k and v, and the packing. It is comparable.
//
// The names are those of TransformerEngine's get_qkv_layout: one word for each tensor in memory, one letter for each
// axis, outermost first. b: batch, s: sequence, t: all tokens of all documents, h: query heads (in the words of k and v
// their own heads), h_g and g: KV heads, d: head dim, 2 and 3: an axis over (k, v) and (q, k, v).
type Layout struct {
	Q, KV   Format  // the order of the axes of q, and of k and v
	Packing Packing // which of the three share memory
}

type namedLayout struct {
	Layout
	name string
}

// layouts in the order of preference if several describe the same addresses: of two packings that agree (one KV head,
// as many KV heads as query heads) the plainer one; mixed formats last.
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

func (l Layout) valid() bool { return slices.Contains(Layouts(), l) }

// Named returns the layout of a name: a full one such as "sbhd_sbh2d" or "bs3hd", or the short one
// of a packed tensor beside q, "sbh2d", or of three tensors alike, "sbhd".
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

// short returns the last word of a name if its other words follow from it, else "".
func (l *namedLayout) short() string {
	if l.Q != l.KV || l.Packing.oneTensor() {
		return ""
	}
	return l.name[strings.LastIndex(l.name, "_")+1:]
}
