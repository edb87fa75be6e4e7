package model

import (
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/partition"
)

// An alone implements Recurrence for a rank without others: each segment is a document.
type alone struct {
	kernel   delta.Kernel
	ops      Ops
	segments []partition.Range
}

// documents returns the segments of the documents of positions; nil: one.
func documents(docs []int, seq int) (list []partition.Range) {
	for i := range seq {
		if i > 0 && (docs == nil || docs[i] == docs[i-1]) {
			list[len(list)-1].Hi++
			continue
		}
		list = append(list, partition.Range{Lo: i, Hi: i + 1})
	}
	return list
}

func (r alone) Segments() []partition.Range { return r.segments }

func (alone) States() int { return 0 }

func (r alone) Halo(_ int, before, _ View) error {
	r.ops.Zero(before)
	return nil
}

func (r alone) HaloBackward(int, View, View) error { return nil }

func (r alone) Recur(_ int, a delta.Args, beside func()) error {
	beside()
	return r.kernel.Forward(a)
}

func (r alone) RecurBackward(_ int, a delta.Args, beside func()) error {
	a.DState = a.State
	beside()
	return r.kernel.Backward(a)
}
