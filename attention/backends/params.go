// Package backends chooses how the attention of a run is computed. Params describe the attention
// and the machine. Rules, which are data, say which calls of which rank a backend cannot run.
// Remedies say what makes it run them. Select picks the fastest backend that is left and says why.
// It is pure: it touches no device, file or clock.
package backends

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/attention/qkv"
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

// Backend is one of the ways in which attention of a hop can be computed.
type Backend uint8

// The backends. Flash is our own kernels, tiled on the CPU and CUDA on a GPU; Fused is cuDNN;
// Unfused is matrix products and a softmax, which no device of this build has; Reference is the
// slow definition.
const (
	Auto Backend = iota
	Flash
	Fused
	Unfused
	Reference
)

// Backends lists all that can be chosen.
var Backends = []Backend{Flash, Fused, Unfused, Reference}

func (b Backend) String() string {
	return [...]string{"auto", "flash", "fused", "unfused", "reference"}[b]
}

// ParseBackend returns the backend of that name in the config.
func ParseBackend(s string) (Backend, error) {
	for b := Auto; b <= Reference; b++ {
		if b.String() == s {
			return b, nil
		}
	}
	return Auto, fmt.Errorf("backend %q: want flash, fused, unfused, reference or auto", s)
}

// SoftmaxType is what the scores are divided by.
type SoftmaxType uint8

// The softmax types.
const (
	Vanilla   SoftmaxType = iota // sum of exp(score)
	OffByOne                     // 1 + sum of exp(score)
	Learnable                    // exp(sink of the head) + sum of exp(score)
)

func (s SoftmaxType) String() string { return [...]string{"vanilla", "off-by-one", "learnable"}[s] }

// Bias is what is added to the scores.
type Bias uint8

// The biases.
const (
	NoBias Bias = iota
	PostScaleBias
	ALiBi
)

func (b Bias) String() string { return [...]string{"none", "post_scale", "alibi"}[b] }

// Recipe is an FP8 scaling recipe. Of everything FP8, it alone decides.
type Recipe uint8

// The recipes.
const (
	NoFP8 Recipe = iota
	DelayedScaling
	CurrentScaling
	MXFP8
	BlockScaling
	NVFP4
)

func (r Recipe) String() string {
	return [...]string{"off", "delayed", "current", "mxfp8", "block", "nvfp4"}[r]
}

// Params is everything that decides on a backend: a comparable value, the key of the cache.
// What does not decide, such as FP8 scales, is not in it. Lengths are global tokens.
type Params struct {
	// The machine. Arch is 10 times the compute capability, 90 for sm90; 0 is a CPU.
	Arch  int
	CUDNN Version
	Flash Version // of our CUDA kernels; 0: not built. On a CPU they are always there.
	// Unbuilt also takes backends and remedies that rules describe and this build does not have: a
	// plan says what they would do.
	Unbuilt bool
	// Disabled has the bit 1<<Backend of each backend that the user has switched off.
	Disabled uint8
	// Want is the backend asked for; Auto leaves the choice to Select.
	Want Backend

	DType          tensor.DType
	Format         qkv.Format
	Packing        qkv.Packing
	MixedFormats   bool // k and v have another order of axes than Format, which is q's
	Contiguous     bool // false: strided in a way that Format and Packing do not describe
	Batch          int
	SeqQ, SeqKV    int
	Heads          int
	KVHeads        int
	HeadDim        int // of q and k
	HeadDimV       int
	Causal         bool // aligned at the bottom right where SeqQ != SeqKV, or as TopLeft says
	TopLeft        bool // masks and windows are aligned at the top left
	WindowLeft     int  // keys before a query's own; -1: all
	WindowRight    int  // keys behind it; -1: all, 0 under a causal mask
	Softcap        bool
	ScaleNotAbove0 bool // the factor of the scores is 0 or negative
	Dropout        bool
	Softmax        SoftmaxType
	Bias           Bias
	BiasGrad       bool
	MaxLogit       bool // the largest score of each head is a result
	Documents      bool // packed: a query sees its own document alone
	DocumentKeys   bool // documents have lengths in keys of their own, and a diagonal each
	Slices         bool // rectangles of the sequence with a mask each, in place of all other masks
	Training       bool
	Deterministic  bool
	CUDAGraph      bool
	FP8            Recipe

	// Memory is the bytes of device memory; 0: not known.
	Memory int64

	ContextSize int    // ranks that share the sequence; 0 is 1
	InnerSize   int    // of them, those that exchange heads; hierarchical needs it
	Algorithm   string // ring, allgather, ulysses, hierarchical
	Gather      string // when rows travel that are fetched in one hop: beside, before, auto; "" is beside
	Layout      string // of partition.Names
}
