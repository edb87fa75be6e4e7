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
		)
	}
	return out
}
