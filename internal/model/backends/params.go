// Package backends chooses the implementation of a run's attention. Params describe the attention and the machine. The
// rules, a table, reject backends for kernel calls of a rank; a remedy makes a backend run a rejected call. Select
// returns the fastest remaining backend with the reasons. The package is pure: no device, file or clock.
//
// choice, err := backends.Select(backends.Params{Arch: 90, ...})
package backends

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Version is a library version as one number: 9.5.0 is 90500, 8.9.7 is 80907. 0: not installed.
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

// Flash is our own kernels, tiled loops on the CPU and CUDA on a GPU; Fused is cuDNN; Reference is the slow definition.
const (
	Auto Backend = iota
	Flash
	Fused
	Reference
)

// Backends lists all backends.
var Backends = []Backend{Flash, Fused, Reference}

func (b Backend) String() string {
	return [...]string{"auto", "flash", "fused", "reference"}[b]
}

// ParseBackend returns the backend with this name in the config.
func ParseBackend(s string) (Backend, error) {
	for b := Auto; b <= Reference; b++ {
		if b.String() == s {
			return b, nil
		}
	}
	return Auto, fmt.Errorf("backend %q: want flash, fused, reference or auto", s)
}

// Params are the whole input of the choice, comparable as the key of the cache. q, k and v are three dense tensors
// [batch, seq, heads, head dim]; lengths are global tokens.
type Params struct {
	// Arch and the next fields are the machine. Arch is 10 times the compute capability, 90 for sm90; 0 is a CPU.
	Arch   int
	CUDNN  Version
	Flash  Version // of our CUDA kernels; 0: not built. A CPU always has its own.
	Memory int64   // bytes of device memory; 0: unknown

	Disabled uint8   // the bit 1<<Backend of each backend switched off by the user
	Want     Backend // the backend asked for; Auto: Select decides

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
	ScaleNotAbove0 bool // the scale of the scores is 0 or negative
	Sink           bool // the softmax's denominator has a sink
	Bias           bool // a bias or ALiBi is added to the scores
	MaxLogit       bool // the largest score of each head is a result
	Documents      bool // packed: a query sees only its own document
	DocumentKeys   bool // documents have separate lengths in keys, and a diagonal each
	Slices         bool // rectangles of the sequence, each with a mask, replace all other masks
	Training       bool
	Deterministic  bool

	ContextSize int    // ranks that share the sequence; 0 is 1
	InnerSize   int    // ranks that exchange heads, for hierarchical
	Algorithm   string // ring, allgather, ulysses, hierarchical
	Gather      string // when the rows of one hop travel: beside, before, auto; "" is beside
	Layout      partition.LayoutName
}

// maxLength bounds lengths, so that products of a few of them do not overflow.
const maxLength = 1 << 40

// checked returns p with its defaults, or an error for impossible ranks, heads or lengths. Other values are checked
// where they enter the program.
func (p Params) checked() (Params, error) {
	p.ContextSize, p.Gather = cmp.Or(p.ContextSize, 1), cmp.Or(p.Gather, "beside")
	p.Algorithm, p.Layout = cmp.Or(p.Algorithm, "ring"), cmp.Or(p.Layout, "zigzag")
	if p.InnerSize == 0 && (p.Algorithm != "hierarchical" || p.ContextSize == 1) {
		p.InnerSize = 1
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
	if !slices.Contains(ring.Algorithms, p.Algorithm) {
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

// Dropped lists the NaN and infinities that versions of cuDNN drop. A row has the form "k NaN: lse dv": a NaN in k does
// not reach LSE and dv, though by definition it should. TestFusedNonFinite of package kernels/gpu measures the rows and
// compares this table. Other versions are not measured.
var Dropped = map[Version][]string{
	V(9, 19, 0): {},
}

// fusedWarnings warn about cuDNN without rejecting it.
var fusedWarnings = []Rule{
	{ID: "fused-drops-nan", Backend: Fused, Warns: true, // kernels
		When:   func(c *Call) bool { return len(Dropped[c.CUDNN]) > 0 },
		Reason: "This version of cuDNN drops some NaN and infinities of q, k, v or dO, so a broken run may look sound.",
		Fix:    "Set attention.backend to flash, which keeps them."},
}

// Warnings returns the warnings about the chosen backend.
func (c *Choice) Warnings() (list []Rejection) {
	for _, r := range rules {
		if r.Warns && r.Backend == c.Backend && r.When(&c.Hops[0]) {
			list = append(list, Rejection{Backend: r.Backend, Rule: r.ID, Reason: r.Reason, Fix: r.Fix})
		}
	}
	return list
}
