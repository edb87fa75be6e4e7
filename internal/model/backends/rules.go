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
	When   func(*Call) bool
	Reason string // one sentence
	Fix    string // one sentence
	Remedy *Remedy
}

// Rules returns a copy of the table of all rules.
func Rules() []Rule { return slices.Clone(rules) }

var rules = slices.Concat(disabledRules, flashRules, fusedRunRules, fusedWarnings, fusedDimRules, fusedHopRules)

func (r *Rule) applies(c *Call) bool {
	if r.Warns {
		return false
	}
	if r.Backend == Fused && !gpu(c) && !r.NoGPU {
		return false
	}
	if v := c.CUDNN; (r.Since != 0 || r.Until != 0) && (v == 0 || v < r.Since || r.Until != 0 && v >= r.Until) {
		return false
	}
	return r.When(c)
}

// disabledRules reject the backends that the environment can switch off.
var disabledRules = []Rule{disabled(Flash), disabled(Fused)}

func disabled(b Backend) Rule {
	return Rule{ID: b.String() + "-disabled", Backend: b, NoGPU: true, // U01, U03, U04
		When:   func(c *Call) bool { return c.Disabled&(1<<b) != 0 },
		Reason: "It was switched off by the user.",
		Fix:    "Unset the environment variable that switches it off; cprun doctor lists those it read."}
}

// Facts about versions of cuDNN that more than one rule depends on. Plans and kernels call the functions of this
// file, so that each version is written once.
var (
	// OldestCUDNN is the oldest version that the rules know.
	OldestCUDNN = V(9, 0, 0)
	// packsSince takes 64-bit offsets of documents and a packed LSE.
	packsSince = V(9, 6, 0)
	// clearsSince clears the workspace of the backward pass of packed documents itself.
	clearsSince = V(9, 18, 0)
	// matrixUntil ends the versions whose deterministic backward pass on Hopper keeps the matrix dP.
	matrixUntil = V(9, 25, 0)
)

// PossibleCUDNN reports whether v may be a version of cuDNN: anything else is a typing error.
func PossibleCUDNN(v Version) bool { return v >= V(5, 0, 0) && v < V(20, 0, 0) }

// Packs reports whether packed documents can go to cuDNN as such, many in one call. sm120 and sm121
// lack it in the backward pass (cudnn-frontend 1.23.0). Elsewhere documents go one by one, each
// length under a plan of its own.
func Packs(arch int, cudnn Version) bool { return cudnn >= packsSince && arch/10 != 12 }

// KeepsMatrix reports whether the deterministic backward pass of cuDNN keeps a matrix of all pairs
// of a call in its workspace: 2 bytes for each query, key and head.
func KeepsMatrix(arch int, cudnn Version) bool { return arch == 90 && cudnn < matrixUntil }
