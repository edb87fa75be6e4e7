package backends

// commonRules are those that every backend has, a rule for each.
var commonRules = common()

func common() []Rule {
	var out []Rule
	for _, b := range Backends {
		out = append(out,
			Rule{ID: b.String() + "-disabled", Backend: b, NoGPU: true,
				Speaks: func(c *Call) bool { return c.Disabled&(1<<b) != 0 },
				Reason: "It was switched off by the user.",
				Fix:    "Unset the environment variable that switches it off; cprun doctor lists those it read.",
				Source: "U01, U03, U04"},
			Rule{ID: b.String() + "-ulysses-heads", Backend: b, NoGPU: true,
				Speaks: func(c *Call) bool {
					return c.Algorithm == "ulysses" && (c.RunHeads%c.ContextSize != 0 || c.RunKVHeads%c.ContextSize != 0)
				},
				Reason: "Ulysses gives each rank the same number of heads, so query heads and KV heads must be multiples of the ranks.",
				Fix:    "Set parallel.algorithm to ring, or parallel.context to a divisor of both.",
				Source: "section 1.3, P11, U81"},
			Rule{ID: b.String() + "-hierarchical-heads", Backend: b, NoGPU: true,
				Speaks: func(c *Call) bool {
					return c.Algorithm == "hierarchical" && (c.RunHeads%c.InnerSize != 0 || c.RunKVHeads%c.InnerSize != 0)
				},
				Reason: "Inside a group heads are exchanged, so query heads and KV heads must be multiples of the ranks of a group.",
				Fix:    "Set parallel.algorithm to ring, or make the groups smaller.",
				Source: "section 1.3, U81"},
		)
	}
	return out
}
