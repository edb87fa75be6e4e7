// Package backends chooses the implementation of a run's attention. Params describe the attention and the machine.
// Rules, which are data, reject backends for kernel calls of a rank; a remedy makes a backend run a call that a rule
// rejects. Select picks the fastest remaining backend and gives the reasons. The package is pure: it touches no device,
// file or clock.
package backends

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Version is a library version as one number: 9.5.0 is 90500, 8.9.7 is 80907. 0 means that
// the library is not there.
type Version int

// V returns the version major.minor.patch.
func V(major, minor, patch int) Version { return Version(major*10000 + minor*100 + patch) }

// ParseVersion reads "9.5.0", "9.5" or "none".
func ParseVersion(s string) (Version, error) {
	if s == "none" {
		return 0, nil
	}
	parts := strings.Split(s, ".")
	var n [3]int
	if len(parts) < 2 || len(parts) > 3 {
		return 0, fmt.Errorf("version %q: want major.minor.patch or none", s)
	}
	for i, p := range parts {
		v, err := strconv.ParseUint(p, 10, 8)
		if err != nil || v > 99 {
			return 0, fmt.Errorf("version %q: want major.minor.patch or none", s)
		}
		n[i] = int(v)
	}
	return V(n[0], n[1], n[2]), nil
}

func (v Version) String() string {
	if v == 0 {
		return "none"
	}
	return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100)
}

// Backend is an implementation of attention.
type Backend uint8

// The backends. Flash is our own kernels, tiled on the CPU and CUDA on a GPU; Fused is cuDNN; Reference is the slow
// definition.
const (
	Auto Backend = iota
	Flash
	Fused
	Reference
)

// Backends lists all that can be chosen.
var Backends = []Backend{Flash, Fused, Reference}

func (b Backend) String() string {
	return [...]string{"auto", "flash", "fused", "reference"}[b]
}

// ParseBackend returns the backend of that name in the config.
func ParseBackend(s string) (Backend, error) {
	for b := Auto; b <= Reference; b++ {
		if b.String() == s {
			return b, nil
		}
	}
	return Auto, fmt.Errorf("backend %q: want flash, fused, reference or auto", s)
}

// Params is everything that decides on a backend: a comparable value, the key of the cache. q, k and v are three dense
// tensors [batch, seq, heads, head dim]; lengths are global tokens.
type Params struct {
	// The machine. Arch is 10 times the compute capability, 90 for sm90; 0 is a CPU.
	Arch   int
	CUDNN  Version
	Flash  Version // of our CUDA kernels; 0: not built. A CPU always has its own.
	Memory int64   // bytes of device memory; 0: not known

	Disabled uint8   // the bit 1<<Backend of each backend that the user has switched off
	Want     Backend // the backend asked for; Auto leaves the choice to Select

	DType          tensor.DType
	Batch          int
	SeqQ, SeqKV    int
	Heads          int
	KVHeads        int
	HeadDim        int // of q and k
	HeadDimV       int
	Causal         bool // aligned at the bottom right where SeqQ != SeqKV, unless TopLeft is set
	TopLeft        bool // aligns masks and windows at the top left
	WindowLeft     int  // keys before a query's own; -1: all
	WindowRight    int  // keys after it; -1: all, 0 under a causal mask
	Softcap        bool
	ScaleNotAbove0 bool // the factor of the scores is 0 or negative
	Sink           bool // the softmax's denominator has a sink
	Bias           bool // a bias or ALiBi is added to the scores
	MaxLogit       bool // the largest score of each head is a result
	Documents      bool // packed: a query sees its own document alone
	DocumentKeys   bool // documents have lengths in keys of their own, and a diagonal each
	Slices         bool // rectangles of the sequence with a mask each replace all other masks
	Training       bool
	Deterministic  bool

	ContextSize int    // ranks that share the sequence; 0 is 1
	InnerSize   int    // ranks that exchange heads, for hierarchical
	Algorithm   string // ring, allgather, ulysses, hierarchical
	Gather      string // when rows travel that are fetched in one hop: beside, before, auto; "" is beside
	Layout      partition.LayoutName
}

// maxLength bounds lengths, so that products of a few of them do not overflow.
const maxLength = 1 << 40

// checked returns p with its defaults filled in, or an error for ranks, heads or lengths that no run can have. Other
// values are checked where they enter the program.
func (p Params) checked() (Params, error) {
	if p.ContextSize == 0 {
		p.ContextSize = 1
	}
	if p.InnerSize == 0 && (p.Algorithm != "hierarchical" || p.ContextSize == 1) {
		p.InnerSize = 1
	}
	if p.Algorithm == "" {
		p.Algorithm = "ring"
	}
	if p.Layout == "" {
		p.Layout = "zigzag"
	}
	if p.Gather == "" {
		p.Gather = "beside"
	}
	if p.Causal {
		p.WindowRight = 0
	}
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("attention parameters: "+format, args...))
	}
	if n := min(p.Batch, p.SeqQ, p.SeqKV, p.HeadDim, p.HeadDimV); n < 1 || max(p.Batch, p.SeqQ, p.SeqKV) > maxLength {
		fault("batch %d, %d queries, %d keys, head dims %d and %d: want 1 to %d", p.Batch, p.SeqQ, p.SeqKV, p.HeadDim,
			p.HeadDimV, maxLength)
	}
	if p.KVHeads < 1 || p.Heads < 1 || p.Heads%p.KVHeads != 0 {
		fault("%d query heads are not a multiple of %d KV heads", p.Heads, p.KVHeads)
	}
	if !slices.Contains([]string{"ring", "allgather", "ulysses", "hierarchical"}, p.Algorithm) {
		fault("algorithm %q is not known", p.Algorithm)
	}
	if err := p.Layout.Check(); err != nil {
		fault("%w", err)
	}
	if p.ContextSize < 1 || p.InnerSize < 1 || p.ContextSize%p.InnerSize != 0 {
		fault("%d ranks are not a multiple of the %d that exchange heads", p.ContextSize, p.InnerSize)
	}
	return p, errors.Join(faults...)
}

// Dropped records the NaN and infinities that versions of cuDNN drop. A row has the form "k NaN: lse dv": a NaN in k
// does not reach LSE and dv, which the definition makes NaN or infinite. TestFusedNonFinite of package kernels/gpu
// measures the rows and holds them to this table. Other versions have not been measured.
var Dropped = map[Version][]string{
	V(9, 19, 0): {},
}

// fusedWarnings are rules that warn of cuDNN and do not reject it.
var fusedWarnings = []Rule{
	{ID: "fused-drops-nan", Backend: Fused, Warns: true, // kernels
		When:   func(c *Call) bool { return len(Dropped[c.CUDNN]) > 0 },
		Reason: "This version of cuDNN drops some NaN and infinities of q, k, v or dO, so a broken run may look sound.",
		Fix:    "Set attention.backend to flash, which keeps them."},
}

// Warnings returns the rules that warn of the chosen backend.
func (c *Choice) Warnings() (list []Rejection) {
	for _, r := range rules {
		if r.Warns && r.Backend == c.Backend && r.When(&c.Hops[0]) {
			list = append(list, Rejection{Backend: r.Backend, Rule: r.ID, Reason: r.Reason, Fix: r.Fix})
		}
	}
	return list
}
