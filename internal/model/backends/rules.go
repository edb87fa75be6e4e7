package backends

import "slices"

// Rule is one reason why a backend cannot run a kernel call. All facts about backends and their versions are rules. The
// comment beside an ID names the source: a letter and a number are TransformerEngine 2.20.0.dev0 of 2026-08-22 (U:
// selector in Python, C: probe of cuDNN, G: graphs for cuDNN, D: checks before the selection, P: context-parallel code,
// H: history of fixes); a section is one of notes on it; kernels are our own.
type Rule struct {
	ID      string
	Backend Backend
	// Since and Until bound the versions of cuDNN: [Since, Until), 0 is open. A bounded rule needs an installed
	// library; another rule rejects a missing one.
	Since, Until Version
	// PerHop rules depend on the lengths or mask of a call and are reported for each hop, the others once for the run.
	PerHop bool
	NoGPU  bool // for Fused: also applies without a GPU, unlike the others
	Warns  bool // does not reject: the chosen backend has a warning
	When   func(*Call) bool
	Reason string // one sentence
	Fix    string // one sentence
	Remedy *Remedy
}

// Rules returns a copy of the whole table.
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

// disabledRules reject the backends that the user can switch off by environment variables.
var disabledRules = []Rule{disabled(Flash), disabled(Fused)}

func disabled(b Backend) Rule {
	return Rule{ID: b.String() + "-disabled", Backend: b, NoGPU: true, // U01, U03, U04
		When:   func(c *Call) bool { return c.Disabled&(1<<b) != 0 },
		Reason: "It was switched off by the user.",
		Fix:    "Unset the environment variable that switches it off; cprun doctor lists those it read."}
}

// These versions of cuDNN matter to more than one rule. Plans and kernels call the functions of this file, so that each
// version is written once.
var (
	// OldestCUDNN is the oldest supported version.
	OldestCUDNN = V(9, 0, 0)
	// packsSince supports 64-bit offsets of documents and a packed LSE.
	packsSince = V(9, 6, 0)
	// clearsSince clears the workspace of the backward pass of packed documents itself.
	clearsSince = V(9, 18, 0)
	// matrixUntil is the first version without the matrix dP in the deterministic backward pass on Hopper.
	matrixUntil = V(9, 25, 0)
)

// PossibleCUDNN reports whether v may be a version of cuDNN. Other values are typing errors.
func PossibleCUDNN(v Version) bool { return v >= V(5, 0, 0) && v < V(20, 0, 0) }

// Packs reports whether cuDNN takes many packed documents in one call. sm120 and sm121 lack it in the backward pass
// (cudnn-frontend 1.23.0). Otherwise documents run one by one, each length with its own plan.
func Packs(arch int, cudnn Version) bool { return cudnn >= packsSince && arch/10 != 12 }

// LeavesWorkspace reports whether cuDNN does not initialise the workspace of the backward pass of packed documents, so
// that the kernel must clear it.
func LeavesWorkspace(arch int, cudnn Version) bool { return arch == 90 && cudnn < clearsSince }

// KeepsMatrix reports whether the deterministic backward pass of cuDNN keeps a matrix of all pairs of a call in its
// workspace: 2 bytes for each query, key and head.
func KeepsMatrix(arch int, cudnn Version) bool { return arch == 90 && cudnn < matrixUntil }
