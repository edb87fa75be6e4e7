package qkv

import (
	"slices"
	"strings"
	"testing"
)

// lengthsOf returns lengths that differ on every axis if the layout allows it.
func lengthsOf(l Layout) LayoutDims {
	n := LayoutDims{Batch: 2, SeqQ: 7, SeqKV: 7, Heads: 10, KVHeads: 5, HeadDim: 6, HeadDimV: 6}
	if l.Packing == QKV3HD || l.Packing == QKVH3D {
		n.KVHeads = n.Heads
	}
	if !l.Packing.oneTensor() {
		n.SeqKV = 9
	}
	if l.Packing == Separate {
		n.HeadDimV = 4
	}
	if l.KV == THD {
		n.Batch = 1
	}
	return n
}

// Every layout has an axis for each letter of its name, and its lengths can be derived from the shapes.
func TestShapesOfEveryLayout(t *testing.T) {
	for _, l := range Layouts() {
		n := lengthsOf(l)
		shapes := l.Shapes(n)
		words := strings.Split(strings.NewReplacer("(h+2h_g)", "x", "(h/g+2)", "x").Replace(l.String()), "_")
		if len(words) != len(shapes) || len(l.Tensors()) != len(shapes) {
			t.Fatalf("%v has %d tensors %v, shapes %v", l, len(words), l.Tensors(), shapes)
		}
		for i, w := range words {
			if len(w) != len(shapes[i]) {
				t.Errorf("%v: %s has shape %v", l, w, shapes[i])
			}
		}
		known := Known{Heads: n.Heads}
		got, err := l.Dims(shapes, known)
		if err != nil || got != n {
			t.Errorf("%v: %v are %+v, %v; want %+v", l, shapes, got, err, n)
		}
		if got, err = l.Dims(shapes, Known{KVHeads: n.KVHeads}); err != nil || got != n {
			t.Errorf("%v: with the KV heads %v are %+v, %v", l, shapes, got, err)
		}
		for _, wrong := range []Known{{Heads: 20}, {Heads: n.Heads, KVHeads: 2}, {Heads: n.Heads, HeadDim: 5}} {
			if _, err := l.Dims(shapes, wrong); err == nil {
				t.Errorf("%v: %v are taken for %+v", l, shapes, wrong)
			}
		}
		if _, err := l.Dims([][]int{{2, 7}}, known); err == nil {
			t.Errorf("%v takes two axes", l)
		}
	}
}

func TestDimsSaysWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		layout string
		shapes [][]int
		want   string
	}{
		{"bs3hd", [][]int{{2, 7, 4, 5, 6}}, "demands qkv of shape [2 7 3 5 6]"},
		{"bs(h+2h_g)d", [][]int{{2, 7, 9, 6}}, "say heads"},
		{"bsg(h/g+2)d", [][]int{{2, 7, 4, 2, 6}}, "0 query heads"},
		{"bshd_bs2hd", [][]int{{2, 7, 4, 6}, {3, 9, 2, 2, 6}}, "demands q of shape [3 7 4 6]"},
		{"bshd_bshd_bshd", [][]int{{2, 7, 4, 6}, {2, 9, 3, 6}, {2, 9, 3, 6}}, "multiple"},
		{"thd_thd_thd", [][]int{{2, 7, 4, 6}, {9, 2, 6}, {9, 2, 6}}, "3 axes in q"},
	} {
		l, err := Named(c.layout)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Dims(c.shapes, Known{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s of %v: %v does not say %q", c.layout, c.shapes, err, c.want)
		}
	}
}

func TestNames(t *testing.T) {
	var names []string
	for _, l := range Layouts() {
		got, err := Named(l.String())
		if err != nil || got != l {
			t.Errorf("%v is read as %v, %v", l, got, err)
		}
		names = append(names, l.String())
	}
	for short, full := range map[string]string{
		"bshd": "bshd_bshd_bshd", "sbhd": "sbhd_sbhd_sbhd", "thd": "thd_thd_thd", "bs2hd": "bshd_bs2hd",
		"sbh2d": "sbhd_sbh2d", "t2hd": "thd_t2hd", "th2d": "thd_th2d", "bsh2d": "bshd_bsh2d", "sb2hd": "sbhd_sb2hd",
	} {
		if got, err := Named(short); err != nil || got.String() != full {
			t.Errorf("%s is read as %v, %v; want %s", short, got, err, full)
		}
		if slices.Contains(names, short) {
			t.Errorf("%s is a full name too", short)
		}
	}
	for _, bad := range []string{"", "bhsd", "bs4hd", "bshd_sbhd"} {
		if l, err := Named(bad); err == nil {
			t.Errorf("%q is read as %v", bad, l)
		}
	}
}

// With a group for each head, h3d has a second name. Other names with one shape have other addresses.
func TestAlike(t *testing.T) {
	n := LayoutDims{Batch: 2, SeqQ: 7, SeqKV: 7, Heads: 3, KVHeads: 3, HeadDim: 6, HeadDimV: 6}
	for _, c := range []struct {
		a, b  string
		alike bool
	}{
		{"bsh3d", "bsg(h/g+2)d", true}, {"bsg(h/g+2)d", "bsh3d", true}, {"bs3hd", "bs(h+2h_g)d", true},
		{"bs3hd", "bsh3d", false}, {"bs3hd", "sb3hd", false}, {"bs3hd", "bs3hd", true},
		{"bshd_bs2hd", "bshd_bsh2d", false}, {"bshd_bs2hd", "bs3hd", false},
	} {
		a, errA := Named(c.a)
		b, errB := Named(c.b)
		if errA != nil || errB != nil {
			t.Fatal(errA, errB)
		}
		if got := Alike(a, b, n); got != c.alike {
			t.Errorf("%s and %s: alike %t", c.a, c.b, got)
		}
	}
}
