package attention

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/tensor"
)

// Version is a library version as one number: 9.5.0 is 90500, 8.9.7 is 80907. 0 means that
// the library is not there.
type Version int

// V is the version major.minor.patch.
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
// Unfused is matrix products and a softmax; BackendReference is the slow definition.
const (
	Auto Backend = iota
	Flash
	Fused
	Unfused
	BackendReference
)

// Backends lists all that can be chosen.
var Backends = []Backend{Flash, Fused, Unfused, BackendReference}

func (b Backend) String() string {
	return [...]string{"auto", "flash", "fused", "unfused", "reference"}[b]
}

// ParseBackend is the backend of that name in the config.
func ParseBackend(s string) (Backend, error) {
	for b := Auto; b <= BackendReference; b++ {
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

// Format is the order of the axes of q, k and v in memory.
type Format uint8

// The formats. THD packs documents one behind another, without padding.
const (
	BSHD Format = iota
	SBHD
	THD
)

func (f Format) String() string { return [...]string{"bshd", "sbhd", "thd"}[f] }

// Packing says how q, k and v share memory.
type Packing uint8

// The packings, h query heads, g KV heads, d head dim. The names follow the axes that a
// packed tensor has behind batch and seq.
const (
	Separate  Packing = iota // three tensors: hd_hd_hd
	QKV3HD                   // [3, h, d]: 3hd
	QKVH3D                   // [h, 3, d]: h3d
	KV2HD                    // q apart, [2, g, d]: hd_2hd
	KVH2D                    // q apart, [g, 2, d]: hd_h2d
	QKVHeads                 // [h + 2g, d], q heads first, then k, then v: (h+2g)d
	QKVGroups                // [g, h/g + 2, d], each group's q heads, its k, its v: g(h/g+2)d
)

func (p Packing) String() string {
	return [...]string{"hd_hd_hd", "3hd", "h3d", "hd_2hd", "hd_h2d", "(h+2g)d", "g(h/g+2)d"}[p]
}

// Params is everything that decides on a backend: a comparable value, the key of the cache.
// What does not decide, such as FP8 scales, has no place in it. Lengths are global tokens.
type Params struct {
	// The machine. Arch is 10 times the compute capability, 90 for sm90; 0 is a CPU.
	Arch  int
	CUDNN Version
	Flash Version // of our CUDA kernels; 0: not built. On a CPU they are always there.
	// Disabled has the bit 1<<Backend of each backend that the user has switched off.
	Disabled uint8
	// Want is the backend asked for; Auto leaves the choice to Select.
	Want Backend

	DType         tensor.DType
	Format        Format
	Packing       Packing
	MixedFormats  bool // k and v have another order of axes than Format, which is q's
	Contiguous    bool // false: strided in a way that Format and Packing do not describe
	Batch         int
	SeqQ, SeqKV   int
	Heads         int
	KVHeads       int
	HeadDim       int // of q and k
	HeadDimV      int
	Causal        bool // aligned at the bottom right where SeqQ != SeqKV
	WindowLeft    int  // keys before a query's own; -1: all
	WindowRight   int  // keys behind it; -1: all, 0 under a causal mask
	Softcap       bool
	Dropout       bool
	Softmax       SoftmaxType
	Bias          Bias
	BiasGrad      bool
	Documents     bool // packed: a query sees its own document alone
	Training      bool
	Deterministic bool
	CUDAGraph     bool
	FP8           Recipe

	// Memory is the bytes of device memory; 0: not known.
	Memory int64

	ContextSize int    // ranks that share the sequence; 0 is 1
	InnerSize   int    // of them, those that exchange heads; hierarchical needs it
	Algorithm   string // ring, allgather, ulysses, hierarchical
	Layout      string // of the partition: zigzag, striped, contiguous, document
}
