package ring

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
)

// Source is rows of the keys that a rank owns.
type Source struct {
	Rank int
	Rows partition.Range
}

// positions tells where the keys of a hop stand in the whole sequence; nil where nobody asks.
type positions struct{ shape *partition.Shape }

// place is p with the positions of the rank's queries, and what tells those of keys, where p adds to
// scores by position. What it adds belongs to the rank's own rows and all heads, so that a
// schedule that trades them cannot have it.
func (s *Schedule) place(p attention.Softmax) (attention.Softmax, *positions, error) {
	if p.Scores == nil {
		return p, nil, nil
	}
	if s.Q != nil || s.KV != nil || s.GatherHeads > 0 {
		return p, nil, fmt.Errorf("schedule %s of rank %d trades heads for rows, or takes some at a time, and slopes, a bias and largest scores are of all heads", s.Algorithm, s.Rank)
	}
	if !p.Scores.Positions() {
		return p, nil, nil
	}
	if s.Shape.Layout == nil {
		return p, nil, fmt.Errorf("schedule %s of rank %d does not say where its rows stand", s.Algorithm, s.Rank)
	}
	scores := *p.Scores
	scores.Rows = partition.Positions(s.Shape.Layout.Spans(s.Shape.SeqQ, s.Shape.Size, s.Rank))
	for i, at := range scores.Rows {
		scores.Rows[i] = s.Shape.Aligned(at)
	}
	p.Scores = &scores
	return p, &positions{&s.Shape}, nil
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
