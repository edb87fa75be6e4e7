package ring

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

var errNoArena = errors.New("ring: Ring.Arena is nil; set it to tensor.NewHostArena(0), or to an arena of the device")

// Source is rows of the keys that a rank owns.
type Source struct {
	Rank int
	Rows partition.Range
}

// positions tells where the keys of a hop stand in the whole sequence; nil where nobody asks.
type positions struct{ shape *partition.Shape }

// place is p with the positions of the rank's queries, and what tells those of keys, where p adds to
// scores by position. Groups of heads would each reset what all of them share.
func (s *Schedule) place(p attention.Softmax) (attention.Softmax, *positions, error) {
	if p.Scores == nil {
		return p, nil, nil
	}
	if s.GatherHeads > 0 {
		return p, nil, fmt.Errorf("schedule %s of rank %d takes %d heads at a time, and slopes, a bias and largest scores need all at once",
			s.Algorithm, s.Rank, s.GatherHeads)
	}
	if !p.Scores.Positions() {
		return p, nil, nil
	}
	if s.Shape.Layout == nil {
		return p, nil, fmt.Errorf("schedule %s of rank %d does not say where its rows stand", s.Algorithm, s.Rank)
	}
	scores := *p.Scores
	scores.Rows = partition.Positions(s.Shape.Layout.Spans(s.Shape.SeqQ, s.Shape.Size, s.Part))
	for i, at := range scores.Rows {
		scores.Rows[i] = s.Shape.Aligned(at)
	}
	p.Scores = &scores
	return p, &positions{&s.Shape}, nil
}

// scores returns p for the heads that the rank computes, and its bias, the gradient of that and the largest
// scores as traded tensors. A pass uses the first and one of the others.
func (r *Ring) scores(s *Schedule, p attention.Softmax, backward bool) (_ attention.Softmax, bias, dbias, largest traded) {
	if s.Q == nil || p.Scores == nil {
		return p, bias, dbias, largest
	}
	x := *p.Scores
	if backward {
		x.Max = View{}
	} else {
		x.DBias = View{}
	}
	if !x.Slopes.IsZero() {
		x.Slopes = x.Slopes.Slice(tensor.Heads, s.Q.First, s.Q.First+s.Q.Heads)
	}
	for _, t := range []struct {
		view *View
		to   *traded
	}{{&x.Bias, &bias}, {&x.DBias, &dbias}, {&x.Max, &largest}} {
		if v := *t.view; !v.IsZero() {
			*t.to = r.traded(s.Q.like(v.Len(tensor.Heads)), v)
			*t.view = t.to.all
		}
	}
	p.Scores = &x
	return p, bias, dbias, largest
}

// of lists the positions of keys.
func (p *positions) of(from []Source) []int {
	if p == nil {
		return nil
	}
	var at []int
	for _, s := range from {
		all := partition.Positions(p.shape.Layout.Spans(p.shape.SeqKV, p.shape.Size, s.Rank))
		at = append(at, all[s.Rows.Lo:s.Rows.Hi]...)
	}
	return at
}
