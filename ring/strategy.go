package ring

import (
	"cmp"
	"fmt"

	"github.com/cprun/cprun/partition"
)

// A Strategy says how attention runs over the ranks that share a sequence. A run has one for all its layers.
// Strategies are comparable.
type Strategy struct {
	Layout      string `json:"layout"`                 // of partition.Names
	Algorithm   string `json:"algorithm"`              // of Algorithms
	Inner       int    `json:"inner,omitempty"`        // of hierarchical: neighbouring ranks that exchange heads
	GatherHeads int    `json:"gather_heads,omitempty"` // of allgather: key-value heads at a time; 0: all
	Gather      string `json:"gather,omitempty"`       // of Gathers: when rows travel that come in one hop; "": Beside
	Backend     string `json:"backend"`                // of package internal/model/backends
}

func (s Strategy) String() string {
	text := s.Algorithm
	switch {
	case s.Inner > 0:
		text += fmt.Sprintf(" (inner %d)", s.Inner)
	case s.GatherHeads > 0:
		text += fmt.Sprintf(" (gather_heads %d)", s.GatherHeads)
	}
	if s.Algorithm == "allgather" {
		text += map[string]string{Before: " (before)", Auto: " (before, forward)"}[s.Gather]
	}
	return text + ", " + s.Layout + ", " + s.Backend
}

// When returns Gather, or Beside if it is empty.
func (s Strategy) When() string { return cmp.Or(s.Gather, Beside) }

// Spec returns the input of the schedules of an attention by s.
func (s Strategy) Spec(shape partition.Shape, heads, kvHeads int) Spec {
	return Spec{
		Shape: shape, Heads: heads, KVHeads: kvHeads,
		Inner: s.Inner, GatherHeads: s.GatherHeads, Gather: s.Gather,
	}
}

// Traders returns how many ranks exchange heads with each other by s, if that many share a sequence.
func (s Strategy) Traders(ranks int) int { return Traders(s.Algorithm, ranks, s.Inner) }
