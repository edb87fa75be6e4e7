package qkv

import (
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// coords lists all coordinates, the last axis fastest.
func coords(shape [5]int) [][5]int {
	list := [][5]int{{}}
	for a, n := range shape {
		var next [][5]int
		for _, c := range list {
			for i := range n {
				c[a] = i
				next = append(next, c)
			}
		}
		list = next
	}
	return list
}

type length struct{ at, n int }

// ravel returns the row-major index.
func ravel(axes ...length) (index int64, inside bool) {
	for _, x := range axes {
		if x.at >= x.n {
			return 0, false
		}
		index = index*int64(x.n) + int64(x.at)
	}
	return index, true
}

// tokens returns the outer axes of a word of a layout's name: bs, sb or t.
func tokens(word string, b, s length) (rest string, axes []length, ok bool) {
	switch {
	case strings.HasPrefix(word, "bs"):
		return word[2:], []length{b, s}, true
	case strings.HasPrefix(word, "sb"):
		return word[2:], []length{s, b}, true
	}
	return word[1:], []length{s}, b.n == 1
}

// named returns the place of an element by the letters of a layout's name alone: the tensor in memory (0, 1, 2) and the
// index in it. ok is false if the layout has no place for it.
func named(name string, n LayoutDims, batchQ int, which byte, c [5]int) (buffer int, index int64, ok bool) {
	word, seq, batch, dim := 0, n.SeqKV, n.Batch, n.HeadDim
	group := n.Heads / n.KVHeads
	head := length{c[2], n.KVHeads}
	x := strings.IndexByte("qkv", which)
	if which == 'q' {
		seq, batch = n.SeqQ, batchQ
		head = length{c[2]*group + c[3], n.Heads}
	}
	if which == 'v' {
		dim = n.HeadDimV
	}
	words := strings.Split(strings.ReplaceAll(name, "h_g", "G"), "_")
	if len(words) == 1 && (n.SeqQ != n.SeqKV || batchQ != n.Batch) || len(words) < 3 && n.HeadDim != n.HeadDimV {
		return 0, 0, false
	}
	word = min(x, len(words)-1)
	kv := length{x - 1, 2} // the axis over k and v
	rest, axes, ok := tokens(words[word], length{c[0], batch}, length{c[1], seq})
	if !ok {
		return 0, 0, false
	}
	d := length{c[4], dim}
	switch rest {
	case "hd":
		axes = append(axes, head, d)
	case "2hd":
		axes = append(axes, kv, head, d)
	case "h2d":
		axes = append(axes, head, kv, d)
	case "3hd", "h3d":
		if n.Heads != n.KVHeads {
			return 0, 0, false
		}
		axes = append(axes, length{x, 3}, head, d)
		if rest == "h3d" {
			i := len(axes) - 3
			axes[i], axes[i+1] = axes[i+1], axes[i]
		}
	case "(h+2G)d":
		before := [...]int{0, n.Heads, n.Heads + n.KVHeads}[x]
		axes = append(axes, length{before + head.at, n.Heads + 2*n.KVHeads}, d)
	case "g(h/g+2)d":
		inner := [...]int{c[3], group, group + 1}[x]
		axes = append(axes, length{c[2], n.KVHeads}, length{inner, group + 2}, d)
	default:
		panic("layout word " + words[word])
	}
	index, ok = ravel(axes...)
	return word, index, ok
}

// layoutNames lists the names of TransformerEngine, and the packings for fewer KV heads.
const layoutNames = `bs3hd sb3hd t3hd bsh3d sbh3d th3d
bs(h+2h_g)d sb(h+2h_g)d t(h+2h_g)d bsg(h/g+2)d sbg(h/g+2)d tg(h/g+2)d
bshd_bs2hd sbhd_sb2hd thd_t2hd bshd_bsh2d sbhd_sbh2d thd_th2d
bshd_bshd_bshd sbhd_sbhd_sbhd thd_thd_thd
sbhd_bshd_bshd bshd_sbhd_sbhd thd_bshd_bshd thd_sbhd_sbhd`

// The letters of the layout's name give the place of every element of q, k and v.
func TestPlaceFollowsTheName(t *testing.T) {
	var names []string
	for _, l := range Layouts() {
		names = append(names, l.String())
		n := lengthsOf(l)
		var tensors []tensor.View
		for _, shape := range l.Shapes(n) {
			size := 1
			for _, d := range shape {
				size *= d
			}
			tensors = append(tensors, tensor.New(tensor.F32, size))
		}
		three, err := l.Bind(tensors, n)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[[2]int64]bool{}
		for which := range 3 {
			for _, c := range coords(three.three[which].shape) {
				buffer, index, ok := named(l.String(), n, l.batchQ(&n), "qkv"[which], c)
				v := three.group(which, c[2])
				s := v.Strides()
				at := v.Offset() + int64(c[0])*s[0] + int64(c[1])*s[1] + int64(c[3])*s[2] + int64(c[4])*s[3]
				if !ok || v.Memory() != tensors[buffer].Memory() || at != index || seen[[2]int64{int64(buffer), at}] {
					t.Fatalf("%v: %c%v is at %d of tensor %d, want %d, %t", l, "qkv"[which], c, at, buffer, index, ok)
				}
				seen[[2]int64{int64(buffer), at}] = true
			}
		}
	}
	if want := strings.Fields(layoutNames); !slices.Equal(names, want) {
		t.Errorf("layouts %v, want %v", names, want)
	}
	mixed := Layout{Q: SBHD, KV: BSHD, Packing: KV2HD}
	if _, err := mixed.Bind(nil, lengthsOf(mixed)); err == nil || mixed.String() != "layout(1,0,3)" {
		t.Errorf("%v has places", mixed)
	}
}
