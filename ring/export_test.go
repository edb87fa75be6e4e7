package ring

import "strings"

// Variants are the Algorithms, and those that fetch rows in one hop with these before the first call.
var Variants = append([]string{"allgather before", "hierarchical before", "allgather auto"}, Algorithms...)

// As is the algorithm of a variant, and its spec.
func As(variant string, s Spec) (string, Spec) {
	algorithm, gather, _ := strings.Cut(variant, " ")
	s.Gather = gather
	return algorithm, s
}

// Make is New, but knows variants and the builders of the tests, too.
func Make(algorithm string, s Spec, rank int) (*Schedule, error) {
	built := map[string]func(*Planner, int) *Schedule{"gated": (*Planner).gated, "both ways": (*Planner).bothWays}
	if built[algorithm] == nil {
		algorithm, s = As(algorithm, s)
		return New(algorithm, s, rank)
	}
	p, err := newPlanner("ring", s)
	if err != nil {
		return nil, err
	}
	return built[algorithm](p, rank), nil
}
