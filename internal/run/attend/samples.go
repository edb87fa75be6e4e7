package attend

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// group is neighbouring samples of one mask, which go through the ring together. Kernels take one
// list of tiles for all samples of a call, so samples with documents of their own go one by one.
type group struct {
	lo, hi   int // samples
	shape    partition.Shape
	schedule *ring.Schedule
}

// groups returns the samples of a case in groups, with what a rank does for each.
func (s *Spec) groups(c *Case, shape partition.Shape, rank int) ([]group, error) {
	list := []group{{0, c.Batch, shape, nil}}
	if c.Masks.Apart() {
		list = list[:0]
		last := ""
		for i, mask := range c.Masks.of {
			masked := shape
			masked.Mask = mask
			if key := masked.Key(); key == last {
				list[len(list)-1].hi++
			} else {
				list, last = append(list, group{i, i + 1, masked, nil}), key
			}
		}
	}
	for i := range list {
		var err error
		if list[i].schedule, err = ring.New(s.Algorithm, s.spec(c, list[i].shape), rank); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// of is the rows of a group's samples on the device.
func (l *local) of(g group) local {
	if l.q.Len(tensor.Batch) == g.hi-g.lo {
		return *l
	}
	part := *l
	part.terms = l.terms.of(g.lo, g.hi)
	for _, v := range []*View{&part.q, &part.k, &part.v, &part.do, &part.out.dev, &part.lse.dev, &part.dq.dev, &part.dk.dev, &part.dv.dev} {
		if v.Len(tensor.Batch) > 0 { // else it is not there
			*v = v.Slice(tensor.Batch, g.lo, g.hi)
		}
	}
	return part
}

func (l *local) partial() attention.Partial { return attention.Partial{O: l.out.dev, LSE: l.lse.dev} }

func (l *local) grads() attention.Grads {
	return attention.Grads{DQ: l.dq.dev, DK: l.dk.dev, DV: l.dv.dev}
}

// work returns the visible pairs of every rank: of a sample where all have one mask, else of all samples.
func (c *Case) work(groups []group) []int {
	total := partition.Work(groups[0].shape)
	if !c.Masks.Apart() {
		return total
	}
	clear(total)
	for _, g := range groups {
		for r, n := range partition.Work(g.shape) {
			total[r] += n * (g.hi - g.lo)
		}
	}
	return total
}

// layoutDocs are the documents that a layout of documents goes by: those of all samples, or where these
// differ the pieces that the ends of all of them leave, so that no piece is in two documents of a sample.
func (c *Case) layoutDocs(layout string) ([]int, error) {
	if c.SeqQ != c.SeqKV {
		return nil, fmt.Errorf("layout %s needs as many queries (%d) as keys (%d); use zigzag", layout, c.SeqQ, c.SeqKV)
	}
	switch len(c.Masks.Docs) {
	case 0:
		return []int{c.SeqQ}, nil
	case 1:
		return c.Masks.Docs[0], nil
	}
	var ends []int
	for _, docs := range c.Masks.Docs {
		at := 0
		for _, n := range docs {
			at += n
			ends = append(ends, at)
		}
	}
	slices.Sort(ends)
	docs, at := []int{}, 0
	for _, end := range slices.Compact(ends) {
		if end > at {
			docs, at = append(docs, end-at), end
		}
	}
	return docs, nil
}
