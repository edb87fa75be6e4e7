package backends

import "slices"

// Rule is one reason why a backend cannot run a kernel call. Facts about backends and their
// versions are in rules and nowhere else.
type Rule struct {
	ID      string
	Backend Backend
	// Since and Until bound the versions, of cuDNN for Fused, in which the rule holds: [Since,
	// Until), 0 is open. A rule with a bound does not hold without the library, since another rule
	// says that it is missing.
	Since, Until Version
	// PerHop is set where lengths or the mask of the single kernel call decide; the rule
	// is then reported for each hop. Others are reported once for the run.
	PerHop bool
	// NoGPU is set for a rule of Fused or Unfused that also holds on a machine without a GPU; their
	// other rules are not asked there.
	NoGPU bool
	// Warns is set for a rule that rejects nothing: a choice of its backend has a warning.
	Warns  bool
	Speaks func(*Call) bool
	Reason string // one sentence
	Fix    string // one sentence
	Source string // where the fact is from: a number of the reference that docs/backends.md explains
	Remedy Remedy // zero: none
}

// Rules returns a copy of the table of all rules.
func Rules() []Rule { return slices.Clone(rules) }

var rules = slices.Concat(commonRules, flashRules, fusedRunRules, fusedWarnings, fusedDimRules, fusedHopRules,
	fusedFP8Rules, unfusedRules, referenceRules)

// speaks reports whether r rejects call c.
func (r *Rule) speaks(c *Call) bool {
	if r.Warns {
		return false
	}
	if c.Arch == 0 && !r.NoGPU && (r.Backend == Fused || r.Backend == Unfused) {
		return false
	}
	if r.Since != 0 || r.Until != 0 {
		v := c.CUDNN
		if r.Backend == Flash {
			v = c.Flash
		}
		if v == 0 || v < r.Since || r.Until != 0 && v >= r.Until {
			return false
		}
	}
	return r.Speaks(c)
}
