package backends

// disabledRules reject the backends that the environment can switch off.
var disabledRules = []Rule{disabled(Flash), disabled(Fused)}

func disabled(b Backend) Rule {
	return Rule{ID: b.String() + "-disabled", Backend: b, NoGPU: true, // U01, U03, U04
		Speaks: func(c *Call) bool { return c.Disabled&(1<<b) != 0 },
		Reason: "It was switched off by the user.",
		Fix:    "Unset the environment variable that switches it off; cprun doctor lists those it read."}
}
