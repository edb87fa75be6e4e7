package backends

import (
	"math"

	"github.com/cprun/cprun/tensor"
)

// fusedRunRules reject cuDNN for the run as a whole. They omit features that cprun never uses: dropout, FP8, CUDA
// graphs, tensors that are not dense, paged keys.
var fusedRunRules = []Rule{
	{ID: "fused-gpu-only", Backend: Fused, NoGPU: true, // U05
		When:   func(c *Call) bool { return c.Arch == 0 },
		Reason: "cuDNN runs on NVIDIA GPUs only.",
		Fix:    "Use flash, or run on a GPU."},
	{ID: "fused-not-installed", Backend: Fused, // C39
		When:   func(c *Call) bool { return c.CUDNN == 0 },
		Reason: "cuDNN is not installed.",
		Fix:    "Install cuDNN 9, best 9.18.1 or newer."},
	{ID: "fused-cudnn-9.0.0", Backend: Fused, Until: OldestCUDNN, // kernels
		When:   always,
		Reason: "cprun works with cuDNN 9.",
		Fix:    "Install cuDNN 9.0.0 or newer."},
	{ID: "fused-not-built", Backend: Fused, // kernels
		When:   func(c *Call) bool { return c.Bias || c.MaxLogit || c.Sink },
		Reason: "This build asks cuDNN for no bias, sinks or largest scores.",
		Fix:    "Leave these out."},
	{ID: "fused-scale", Backend: Fused, // kernels
		When: func(c *Call) bool { return c.ScaleNotAbove0 },
		Reason: "cuDNN's backward pass faults with a scale of 0, and its softmax takes the largest score before " +
			"scaling, which is wrong for a scale below 0.",
		Fix: "Use flash, or a scale above 0."},
	{ID: "fused-arch-sm80", Backend: Fused, // U05
		When:   func(c *Call) bool { return c.Arch < 80 },
		Reason: "Fused attention needs compute capability 8.0 or higher.",
		Fix:    "Use an Ampere GPU or newer, or run on the CPU with --device cpu."},
	{ID: "fused-arch-sm100-9.7.0", Backend: Fused, Until: V(9, 7, 0), // C10
		When:   func(c *Call) bool { return c.Arch >= 100 },
		Reason: "cuDNN before 9.7.0 has no fused attention for Blackwell.",
		Fix:    "Install cuDNN 9.7.0 or newer."},
	{ID: "fused-sm120-9.18.1", Backend: Fused, Until: V(9, 18, 1), // C42, U58
		When:   func(c *Call) bool { return c.Arch == 120 },
		Reason: "cuDNN before 9.18.1 has no usable fused attention for sm120.",
		Fix:    "Install cuDNN 9.18.1 or newer."},
	{ID: "fused-sm120-deterministic", Backend: Fused, // C42
		When:   func(c *Call) bool { return c.Arch == 120 && c.Deterministic && c.Training },
		Reason: "cuDNN has no deterministic backward pass for sm120.",
		Fix:    "Use flash, or set train.deterministic to false."},
	{ID: "fused-dtype", Backend: Fused, // U11
		When:   func(c *Call) bool { return c.DType != tensor.F16 && c.DType != tensor.BF16 },
		Reason: "cuDNN's fused attention computes in float16 and bfloat16 only.",
		Fix:    "Set precision.compute to bf16 or fp16."},
	{ID: "fused-softcap", Backend: Fused, // U34
		When:   func(c *Call) bool { return c.Softcap },
		Reason: "cuDNN lets a soft cap change the scores only without masks and without context parallelism.",
		Fix:    "Use flash, which has soft caps."},
	{ID: "fused-ban-9.10.0-9.10.1", Backend: Fused, Since: V(9, 10, 0), Until: V(9, 10, 2), // C35
		When:   always,
		Reason: "cuDNN 9.10.0 and 9.10.1 have known bugs in 16-bit attention.",
		Fix:    "Install cuDNN 9.10.2 or newer."},
	{ID: "fused-training-offsets", Backend: Fused, // kernels: TestBeyondInt32 with cuDNN 9.19
		When: func(c *Call) bool { return c.Training && queryElements(c) > math.MaxInt32 },
		Reason: "cuDNN's backward pass computes wrong gradients of q and k (measured with 9.19) if the queries of a " +
			"rank have 2^31 elements or more: batch x queries x heads x head dim.",
		Fix: "Set attention.backend to flash, or use more ranks."},
	{ID: "fused-deterministic-sm80", Backend: Fused, // U98, U99
		When:   func(c *Call) bool { return deterministicBackward(c) && c.Arch < 90 },
		Reason: "Before Hopper, cuDNN's backward pass adds with atomics, so its bits differ from run to run.",
		Fix:    "Use flash, or set train.deterministic to false."},
	{ID: "fused-sm100-deterministic-9.18.1", Backend: Fused, Until: V(9, 18, 1), // C38
		When:   func(c *Call) bool { return c.Arch >= 100 && deterministicBackward(c) },
		Reason: "The deterministic backward pass for Blackwell came with cuDNN 9.18.1.",
		Fix:    "Install cuDNN 9.18.1 or newer, or use flash."},
	{ID: "fused-documents-9.1.0", Backend: Fused, Until: V(9, 1, 0), // C24, C30
		When:   func(c *Call) bool { return c.Documents },
		Reason: "cuDNN before 9.1.0 has no packed documents.",
		Fix:    "Install cuDNN 9.6.0 or newer (9.1.0 without grouped KV heads), or use flash."},
	{ID: "fused-documents-sm90", Backend: Fused, // C30
		When:   func(c *Call) bool { return c.Documents && c.Arch < 90 },
		Reason: "cuDNN takes packed documents on sm90 and newer only.",
		Fix:    "Use flash."},
	{ID: "fused-documents-gqa-9.6.0", Backend: Fused, Until: V(9, 6, 0), // C30
		When:   func(c *Call) bool { return c.Documents && c.KVHeads != c.Heads },
		Reason: "cuDNN before 9.6.0 needs as many KV heads as query heads for packed documents.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash."},
	{ID: "fused-documents-backward-sm90-9.18.0", Backend: Fused, Until: clearsSince, // H13
		When: func(c *Call) bool {
			return c.Documents && LeavesWorkspace(c.Arch, c.CUDNN) && c.Training && !c.ZeroedWorkspace
		},
		Reason: "On Hopper cuDNN before 9.18.0 does not initialise the workspace of the backward pass of packed " +
			"documents, which may give NaN.",
		Fix:    "Install cuDNN 9.18.0 or newer.",
		Remedy: zeroWorkspace},
	{ID: "fused-allgather-sm103-9.21", Backend: Fused, Since: V(9, 21, 0), Until: V(9, 22, 0), // H13
		When:   func(c *Call) bool { return c.Arch == 103 && c.ContextSize > 1 && c.Algorithm == "allgather" },
		Reason: "cuDNN 9.21 hangs under all-gather on sm103.",
		Fix:    "Install cuDNN 9.22.0 or newer, or set parallel.algorithm to ring."},
}

func always(*Call) bool { return true }

// deterministicBackward reports whether a backward pass must repeat bit for bit; the forward pass always does.
func deterministicBackward(c *Call) bool { return c.Training && c.Deterministic }

// queryElements returns the number of elements of a rank's q or of its output, whichever is larger.
func queryElements(c *Call) float64 {
	return float64(c.Batch) * float64(c.RankQueries) * float64(c.Heads) * float64(max(c.HeadDim, c.HeadDimV))
}

// fusedDimRules list the head dims of cuDNN's 16-bit kernels: up to 128 everywhere, more by architecture, version and
// pass. A backward pass supports less than a forward pass, and Training needs both. C17 also refuses wide head dims for
// a single query under a causal mask; cprun never asks for such a mask, which would hide nothing.
var fusedDimRules = []Rule{
	{ID: "fused-head-dim-multiple-8", Backend: Fused, // C13
		When:   func(c *Call) bool { return c.HeadDim%8 != 0 || c.HeadDimV%8 != 0 },
		Reason: "cuDNN needs head dims that are multiples of 8.",
		Fix:    "Pad the head dims to a multiple of 8."},
	{ID: "fused-head-dim-sm80-training", Backend: Fused, // C14, C17
		When:   func(c *Call) bool { return wide(c) && c.Arch < 90 && c.Training },
		Reason: "Before Hopper cuDNN trains with head dims up to 128.",
		Fix:    "Use flash, which takes head dims up to 512."},
	{ID: "fused-head-dim-sm80-inference-9.10.2", Backend: Fused, Until: V(9, 10, 2), // C14, C17
		When:   func(c *Call) bool { return wide(c) && c.Arch < 90 && !c.Training },
		Reason: "Before Hopper cuDNN before 9.10.2 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-training-9.5.0", Backend: Fused, Until: V(9, 5, 0), // C15, H02
		When: func(c *Call) bool { return wide(c) && c.Arch == 90 && c.Training },
		Reason: "On Hopper the backward pass of cuDNN before 9.5.0 takes head dims up to 128, though the forward " +
			"pass takes more.",
		Fix: "Install cuDNN 9.5.0 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-training-256", Backend: Fused, // C15
		When:   func(c *Call) bool { return wider(c, 256) && c.Arch == 90 && c.Training },
		Reason: "On Hopper cuDNN trains with head dims up to 256.",
		Fix:    "Use flash, which takes head dims up to 512."},
	{ID: "fused-head-dim-sm90-inference-9.1.0", Backend: Fused, Until: V(9, 1, 0), // C15
		When:   func(c *Call) bool { return wide(c) && c.Arch == 90 && !c.Training },
		Reason: "On Hopper cuDNN before 9.1.0 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.1.0 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-inference-256-9.10.2", Backend: Fused, Until: V(9, 10, 2), // C15, C17
		When:   func(c *Call) bool { return wider(c, 256) && c.Arch == 90 && !c.Training },
		Reason: "On Hopper cuDNN before 9.10.2 takes head dims up to 256.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use flash."},
	{ID: "fused-head-dims-differ-sm90-9.11.0", Backend: Fused, Since: V(9, 11, 0), // C20
		When: func(c *Call) bool {
			return c.Arch == 90 && c.Training && c.HeadDim >= 128 && c.HeadDimV >= 128 &&
				c.HeadDim != c.HeadDimV && !dims(c, 192, 128)
		},
		Reason: "On Hopper cuDNN from 9.11.0 has a bug in the backward pass where both head dims are 128 or more and " +
			"differ, unless they are 192 and 128.",
		Fix: "Pad the smaller head dim to the larger."},
	{ID: "fused-head-dim-sm100-inference-9.9.0", Backend: Fused, Until: V(9, 9, 0), // C16
		When:   func(c *Call) bool { return wide(c) && c.Arch >= 100 && !c.Training },
		Reason: "On Blackwell cuDNN before 9.9.0 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.9.0 or newer, or use flash."},
	// C16, C17
	{ID: "fused-head-dim-sm100-decode-9.10.2", Backend: Fused, PerHop: true, Since: V(9, 9, 0), Until: V(9, 10, 2),
		When:   func(c *Call) bool { return wide(c) && c.Arch >= 100 && !c.Training && c.SeqQ == 1 },
		Reason: "On Blackwell cuDNN before 9.10.2 takes head dims over 128 for more than one query only.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use flash."},
	{ID: "fused-head-dim-sm100-training", Backend: Fused, // C18, C19
		When: func(c *Call) bool {
			return wide(c) && c.Arch >= 100 && c.Training && !dims(c, 192, 128) && !(dims(c, 256, 256) && c.Arch < 110)
		},
		Reason: "On Blackwell cuDNN trains with head dims up to 128, with 192 for q and k and 128 for v, and on " +
			"sm100 to sm109 with 256.",
		Fix: "Use flash, or one of these head dims."},
	{ID: "fused-head-dims-192-128-sm100-9.11.0", Backend: Fused, Until: V(9, 11, 0), // C18
		When:   func(c *Call) bool { return dims(c, 192, 128) && c.Arch >= 100 && c.Training },
		Reason: "On Blackwell training with head dims 192 and 128 came with cuDNN 9.11.0.",
		Fix:    "Install cuDNN 9.11.0 or newer, or use flash."},
	{ID: "fused-head-dims-differ-sm120", Backend: Fused, // U48
		When: func(c *Call) bool {
			return c.HeadDim != c.HeadDimV && c.Arch == 120 && c.Training && (c.HeadDim > 128 || c.HeadDim%8 != 0)
		},
		Reason: "On sm120 cuDNN has no backward pass for head dims that differ where that of q and k is over 128 or " +
			"no multiple of 8.",
		Fix: "Use flash."},
	{ID: "fused-head-dim-256-sm100-9.23.0", Backend: Fused, Until: V(9, 23, 0), // C19
		When:   func(c *Call) bool { return blackwell256(c) && !c.Documents },
		Reason: "On Blackwell training with head dim 256 came with cuDNN 9.23.0.",
		Fix:    "Install cuDNN 9.23.0 or newer, or use flash."},
	{ID: "fused-head-dim-256-sm100-documents-9.25.0", Backend: Fused, Until: V(9, 25, 0), // C19
		When:   func(c *Call) bool { return blackwell256(c) && c.Documents },
		Reason: "On Blackwell training with head dim 256 on packed documents came with cuDNN 9.25.0.",
		Fix:    "Install cuDNN 9.25.0 or newer, or use flash."},
	{ID: "fused-head-dim-256-sm100-band", Backend: Fused, PerHop: true, // C19
		When:   func(c *Call) bool { return blackwell256(c) && c.Mask == BandMask },
		Reason: "On Blackwell cuDNN trains with head dim 256 only under a full or a causal mask.",
		Fix:    "Use flash.",
		Remedy: splitCall},
}

// wide reports whether a head dim exceeds 128, the limit of every version and architecture.
func wide(c *Call) bool { return wider(c, 128) }

func wider(c *Call, d int) bool { return max(c.HeadDim, c.HeadDimV) > d }

func dims(c *Call, qk, v int) bool { return c.HeadDim == qk && c.HeadDimV == v }

func blackwell256(c *Call) bool {
	return dims(c, 256, 256) && c.Arch >= 100 && c.Arch < 110 && c.Training
}
