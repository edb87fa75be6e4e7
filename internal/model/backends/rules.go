package backends

import "slices"

// Rule is one reason why a backend cannot run a kernel call. Facts about backends and their versions are in rules and
// nowhere else. The comment beside a rule's ID names its source: a letter and a number are TransformerEngine
// 2.20.0.dev0 of 2026-08-22 (U its selector in Python, C its probe of cuDNN, G its graphs for cuDNN, D its checks
// before the selection, P its context-parallel code, H its history of fixes), a section is one of notes on it, kernels
// are our own.
type Rule struct {
	ID      string
	Backend Backend
	// Since and Until bound the versions of cuDNN in which the rule holds: [Since, Until), 0 is open. A bounded rule
	// does not hold without the library, whose absence is a rule of its own.
	Since, Until Version
	// PerHop is set for rules about the lengths or the mask of a single kernel call: they are reported for each hop,
	// others once for the run.
	PerHop bool
	NoGPU  bool // for Fused: holds without a GPU too; its other rules are not asked there
	Warns  bool // rejects nothing: a choice of its backend has a warning
	Speaks func(*Call) bool
	Reason string // one sentence
	Fix    string // one sentence
	Remedy *Remedy
}

// Rules returns a copy of the table of all rules.
func Rules() []Rule { return slices.Clone(rules) }

var rules = slices.Concat(disabledRules, flashRules, fusedRunRules, fusedWarnings, fusedDimRules, fusedHopRules)

// speaks reports whether r rejects call c.
func (r *Rule) speaks(c *Call) bool {
	if r.Warns {
		return false
	}
	if r.Backend == Fused && !gpu(c) && !r.NoGPU {
		return false
	}
	if v := c.CUDNN; (r.Since != 0 || r.Until != 0) && (v == 0 || v < r.Since || r.Until != 0 && v >= r.Until) {
		return false
	}
	return r.Speaks(c)
}
