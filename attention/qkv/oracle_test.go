package qkv_test

import (
	"slices"
	"strings"

	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/tensor"
)

// place is one element of memory.
type place struct {
	mem tensor.Memory
	at  int64
}

// element is the place of [b, s, group, head, d] of a described tensor.
func element(d *qkv.TensorDesc, c [5]int) place {
	at := d.Offset
	for a := range c {
		at += int64(c[a]) * d.Strides[a]
	}
	return place{d.Memory, at}
}

// coords lists all coordinates, the last fastest.
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

// ravel is the row-major index.
func ravel(axes ...length) (index int64, inside bool) {
	for _, x := range axes {
		if x.at >= x.n {
			return 0, false
		}
		index = index*int64(x.n) + int64(x.at)
	}
	return index, true
}

// tokens is the outer axes of a word of a layout's name: bs, sb or t.
func tokens(word string, b, s length) (rest string, axes []length, ok bool) {
	switch {
	case strings.HasPrefix(word, "bs"):
		return word[2:], []length{b, s}, true
	case strings.HasPrefix(word, "sb"):
		return word[2:], []length{s, b}, true
	}
	return word[1:], []length{s}, b.n == 1
}

// named is the place of an element as the name of a layout says it, worked out from the
// name's letters alone: the tensor in memory (0, 1, 2) and the index in it. ok is false where
// the layout has no place for it.
func named(name string, n qkv.LayoutDims, batchQ int, which byte, c [5]int) (buffer int, index int64, ok bool) {
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
	kv := length{x - 1, 2} // of an axis over k and v
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

// describes is the definition that detection is held against: whether the name gives the
// place of every element, relative to one beginning for each tensor in memory, and no two
// elements share one.
func describes(name string, t *qkv.QKV) bool {
	if !sameLengths(t) {
		return false
	}
	n := qkv.LayoutDims{
		Batch: t.K.Shape[0], SeqQ: t.Q.Shape[1], SeqKV: t.K.Shape[1],
		Heads: t.Q.Shape[2] * t.Q.Shape[3], KVHeads: t.K.Shape[2], HeadDim: t.Q.Shape[4], HeadDimV: t.V.Shape[4],
	}
	if t.Q.Shape[0] != n.Batch && !strings.HasPrefix(name, "thd_") {
		return false
	}
	begin := map[int]place{}
	seen := map[place]bool{}
	for i, d := range []*qkv.TensorDesc{&t.Q, &t.K, &t.V} {
		for _, c := range coords(d.Shape) {
			buffer, index, ok := named(name, n, t.Q.Shape[0], "qkv"[i], c)
			if !ok {
				return false
			}
			p := element(d, c)
			if seen[p] {
				return false
			}
			seen[p] = true
			p.at -= index
			if b, known := begin[buffer]; !known {
				begin[buffer] = p
			} else if b != p {
				return false
			}
		}
	}
	return true
}

// sameLengths reports whether q, k and v can be the inputs of one call.
func sameLengths(t *qkv.QKV) bool {
	q, k, v := t.Q.Shape, t.K.Shape, t.V.Shape
	return (q[0] == k[0] || q[0] == 1) && q[2] == k[2] && k[3] == 1 && q[4] == k[4] &&
		k[0] == v[0] && k[1] == v[1] && k[2] == v[2] && v[3] == 1
}

// describing lists the layouts that describe t, in the order of attention.Layouts.
func describing(t *qkv.QKV) []qkv.Layout {
	return slices.DeleteFunc(qkv.Layouts(), func(l qkv.Layout) bool {
		return !describes(l.String(), t)
	})
}

// startsItsMemory reports whether element 0 of every tensor in memory is element 0 of its
// memory.
func startsItsMemory(l qkv.Layout, t *qkv.QKV) bool {
	first := []*qkv.TensorDesc{&t.Q, &t.K, &t.V}
	return !slices.ContainsFunc(first[:1+strings.Count(strings.ReplaceAll(l.String(), "h_g", "G"), "_")], func(d *qkv.TensorDesc) bool {
		return d.Offset != 0
	})
}
