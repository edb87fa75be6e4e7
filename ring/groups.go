package ring

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// An all-gather may gather some KV heads at a time, in a kernel pass for each group of heads. Two sets of buffers take
// turns: while kernels compute with one group, the rows of the next arrive.

func groups(n, heads int) (list []partition.Range) {
	for lo := 0; lo < heads; lo += n {
		list = append(list, partition.Range{Lo: lo, Hi: min(lo+n, heads)})
	}
	return list
}

// groupHeads returns how many KV heads are gathered at a time; 0: all.
func (p *Planner) groupHeads() int {
	if n := p.spec.GatherHeads; p.algorithm == "allgather" && p.size > 1 && n < p.spec.KVHeads {
		return n
	}
	return 0
}

// grouped repeats the three hops of an all-gather for each group. The transfers of a group begin in the second hop of
// the group before. They send a dense copy of the rank's own rows, made one hop earlier. A group has kv buffers of K
// and V, and grads buffers of gradients.
func (p *Planner) grouped(base []Hop, kv, grads, own int) (hops []Hop) {
	list := groups(p.groupHeads(), p.spec.KVHeads)
	copyOf := func(g int) Copy {
		part := 1 + g*(kv+1)
		return Copy{Dst: Block{part + 1, 0, own}, Src: Block{part, 0, own}}
	}
	for g, heads := range list {
		label := fmt.Sprintf("KV heads %d to %d/", heads.Lo, heads.Hi-1)
		if heads.Len() == 1 {
			label = fmt.Sprintf("KV head %d/", heads.Lo)
		}
		if g == 0 && own > 0 {
			hops = append(hops, Hop{Label: label + "own heads", CopyKV: []Copy{copyOf(0)}})
		}
		first, second := inGroup(base[0], g, kv, grads), inGroup(base[1], g, kv, grads)
		third := inGroup(base[2], g, kv, grads)
		first.Begins = true
		if g > 0 {
			first.SendKV, first.RecvKV, first.CopyKV = nil, nil, nil
		}
		if g+1 < len(list) {
			next := inGroup(base[0], g+1, kv, grads)
			second.SendKV, second.RecvKV, second.CopyKV = next.SendKV, next.RecvKV, next.CopyKV
			second.Late = len(next.SendKV)+len(next.RecvKV) > 0
			if own > 0 {
				first.CopyKV = append(first.CopyKV, copyOf(g+1))
			}
		}
		for _, h := range []Hop{first, second, third} {
			h.Label = label + h.Label
			hops = append(hops, h)
		}
	}
	return hops
}

// inGroup returns a hop with the buffers of group g. Buffer 0 becomes the dense copy of the own rows, and of gradients
// the group's part of the rank's own.
func inGroup(h Hop, g, kv, grads int) Hop {
	h.SendKV, h.RecvKV, h.CopyKV = slices.Clone(h.SendKV), slices.Clone(h.RecvKV), slices.Clone(h.CopyKV)
	h.SendGrad, h.RecvGrad, h.CopyGrad = slices.Clone(h.SendGrad), slices.Clone(h.RecvGrad), slices.Clone(h.CopyGrad)
	h.Fold = slices.Clone(h.Fold)
	h.blocks(func(b *Block) { b.Buf += 2 + g*(kv+1) }, func(b *Block) { b.Buf += 1 + g*grads })
	return h
}

// groupBuffers lists the buffers of all groups. A group has its part of the rank's own tensor, then workspace with the
// rows of list[from:]. Groups take turns with sets of workspace.
func (p *Planner) groupBuffers(list []Buffer, from, sets int) []Buffer {
	all := list[:1:1]
	for g, heads := range groups(p.groupHeads(), p.spec.KVHeads) {
		all = append(all, Buffer{Rows: list[0].Rows, Heads: heads})
		for _, x := range list[from:] {
			x.Heads, x.In = heads, len(all)
			if g >= sets {
				x.In = all[x.In-sets*(1+len(list[from:]))].In
			}
			all = append(all, x)
		}
	}
	return all
}

// groupKernel gives each pass the heads of the next group.
type groupKernel struct {
	attention.Kernel
	kvHeads int
	groups  []partition.Range // of the passes to come
}

func (k *groupKernel) next(all int, p attention.Softmax) (heads partition.Range, err error) {
	if p.Scores != nil {
		return heads, fmt.Errorf(
			"heads are gathered %d at a time, and slopes, a bias and largest scores need all at once",
			k.groups[0].Len())
	}
	each := all / k.kvHeads
	heads = partition.Range{Lo: k.groups[0].Lo * each, Hi: k.groups[0].Hi * each}
	k.groups = k.groups[1:]
	return heads, nil
}

func (k *groupKernel) Forward(
	o View, acc attention.Partial, q View, p attention.Softmax,
) (attention.ForwardPass, error) {
	h, err := k.next(q.Len(tensor.Heads), p)
	if err != nil {
		return nil, err
	}
	part := attention.Partial{O: narrow(acc.O, h.Len()), LSE: someHeads(acc.LSE, h)}
	if acc.O == o { // no workspace of one group
		part.O = someHeads(o, h)
	}
	return k.Kernel.Forward(someHeads(o, h), part, someHeads(q, h), p)
}

func (k *groupKernel) Backward(
	dq, do, q View, s attention.Saved, p attention.Softmax,
) (attention.BackwardPass, error) {
	h, err := k.next(q.Len(tensor.Heads), p)
	if err != nil {
		return nil, err
	}
	s = attention.Saved{O: someHeads(s.O, h), LSE: someHeads(s.LSE, h), Delta: narrow(s.Delta, h.Len())}
	return k.Kernel.Backward(someHeads(dq, h), someHeads(do, h), someHeads(q, h), s, p)
}
