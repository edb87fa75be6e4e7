package ring

// Make is New, but knows the builders of the tests, too.
func Make(algorithm string, s Spec, rank int) (*Schedule, error) {
	built := map[string]func(*Planner, int) *Schedule{"gated": (*Planner).gated, "both ways": (*Planner).bothWays}
	if built[algorithm] == nil {
		return New(algorithm, s, rank)
	}
	p, err := newPlanner("ring", s)
	if err != nil {
		return nil, err
	}
	return built[algorithm](p, rank), nil
}
