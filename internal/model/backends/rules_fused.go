package backends

import (
	"github.com/cprun/cprun/tensor"
)

// fusedRunRules reject cuDNN for the run as a whole. There are none about what this project never asks of cuDNN:
// dropout, FP8, CUDA graphs, tensors that are not dense, paged keys.
var fusedRunRules = []Rule{
	{ID: "fused-gpu-only", Backend: Fused, NoGPU: true, // U05
		Speaks: func(c *Call) bool { return c.Arch == 0 },
		Reason: "cuDNN runs on NVIDIA GPUs only.",
		Fix:    "Use flash, or run on a GPU."},
	{ID: "fused-not-installed", Backend: Fused, // C39
		Speaks: func(c *Call) bool { return c.CUDNN == 0 },
		Reason: "cuDNN is not installed.",
		Fix:    "Install cuDNN 9, best 9.18.1 or newer."},
	{ID: "fused-cudnn-9.0.0", Backend: Fused, Until: OldestCUDNN, // kernels
		Speaks: always,
		Reason: "cprun works with cuDNN 9.",
		Fix:    "Install cuDNN 9.0.0 or newer."},
	{ID: "fused-not-built", Backend: Fused, // kernels
		Speaks: func(c *Call) bool { return c.Bias || c.MaxLogit || c.Sink },
		Reason: "This build asks cuDNN for no bias, sinks or largest scores.",
		Fix:    "Leave these out."},
	{ID: "fused-scale", Backend: Fused, // kernels
		Speaks: func(c *Call) bool { return c.ScaleNotAbove0 },
		Reason: "cuDNN's backward pass faults with a scale of 0, and its softmax takes the largest score before " +
			"scaling, which is wrong for a scale below 0.",
		Fix: "Use flash, or a scale above 0."},
	{ID: "fused-arch-sm80", Backend: Fused, // U05
		Speaks: func(c *Call) bool { return c.Arch < 80 },
		Reason: "Fused attention needs compute capability 8.0 or higher.",
		Fix:    "Use an Ampere GPU or newer, or run on the CPU with --device cpu."},
	{ID: "fused-arch-sm100-9.7.0", Backend: Fused, Until: V(9, 7, 0), // C10
		Speaks: func(c *Call) bool { return c.Arch >= 100 },
		Reason: "cuDNN before 9.7.0 has no fused attention for Blackwell.",
		Fix:    "Install cuDNN 9.7.0 or newer."},
	{ID: "fused-sm120-9.18.1", Backend: Fused, Until: V(9, 18, 1), // C42, U58
		Speaks: func(c *Call) bool { return c.Arch == 120 },
		Reason: "cuDNN before 9.18.1 has no usable fused attention for sm120.",
		Fix:    "Install cuDNN 9.18.1 or newer."},
	{ID: "fused-sm120-deterministic", Backend: Fused, // C42
		Speaks: func(c *Call) bool { return c.Arch == 120 && c.Deterministic && c.Training },
		Reason: "cuDNN has no deterministic backward pass for sm120.",
		Fix:    "Use flash, or set train.deterministic to false."},
	{ID: "fused-dtype", Backend: Fused, // U11
		Speaks: func(c *Call) bool { return c.DType != tensor.F16 && c.DType != tensor.BF16 },
		Reason: "cuDNN's fused attention computes in float16 and bfloat16 only.",
		Fix:    "Set precision.compute to bf16 or fp16."},
	{ID: "fused-softcap", Backend: Fused, // U34
		Speaks: func(c *Call) bool { return c.Softcap },
		Reason: "cuDNN lets a soft cap change the scores only without masks and without context parallelism.",
		Fix:    "Use flash, which has soft caps."},
	{ID: "fused-ban-9.10.0-9.10.1", Backend: Fused, Since: V(9, 10, 0), Until: V(9, 10, 2), // C35
		Speaks: always,
		Reason: "cuDNN 9.10.0 and 9.10.1 have known bugs in 16-bit attention.",
		Fix:    "Install cuDNN 9.10.2 or newer."},
	{ID: "fused-deterministic-sm80", Backend: Fused, // U98, U99
		Speaks: func(c *Call) bool { return repeats(c) && c.Arch < 90 },
		Reason: "Before Hopper, cuDNN's backward pass adds with atomics, so its bits differ from run to run.",
		Fix:    "Use flash, or set train.deterministic to false."},
	{ID: "fused-sm100-deterministic-9.18.1", Backend: Fused, Until: V(9, 18, 1), // C38
		Speaks: func(c *Call) bool { return c.Arch >= 100 && repeats(c) },
		Reason: "The deterministic backward pass for Blackwell came with cuDNN 9.18.1.",
		Fix:    "Install cuDNN 9.18.1 or newer, or use flash."},
	{ID: "fused-documents-9.1.0", Backend: Fused, Until: V(9, 1, 0), // C24, C30
		Speaks: func(c *Call) bool { return c.Documents },
		Reason: "cuDNN before 9.1.0 has no packed documents.",
		Fix:    "Install cuDNN 9.6.0 or newer (9.1.0 without grouped KV heads), or use flash."},
	{ID: "fused-documents-sm90", Backend: Fused, // C30
		Speaks: func(c *Call) bool { return c.Documents && c.Arch < 90 },
		Reason: "cuDNN takes packed documents on sm90 and newer only.",
		Fix:    "Use flash."},
	{ID: "fused-documents-gqa-9.6.0", Backend: Fused, Until: V(9, 6, 0), // C30
		Speaks: func(c *Call) bool { return c.Documents && c.KVHeads != c.Heads },
		Reason: "cuDNN before 9.6.0 needs as many KV heads as query heads for packed documents.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash."},
	{ID: "fused-documents-backward-sm90-9.18.0", Backend: Fused, Until: clearsSince, // H13
		Speaks: func(c *Call) bool {
			return c.Documents && c.Arch == 90 && c.Training && !c.ZeroedWorkspace
		},
		Reason: "On Hopper cuDNN before 9.18.0 does not initialise the workspace of the backward pass of packed " +
			"documents, which may give NaN.",
		Fix:    "Install cuDNN 9.18.0 or newer.",
		Remedy: zeroWorkspace},
	{ID: "fused-allgather-sm103-9.21", Backend: Fused, Since: V(9, 21, 0), Until: V(9, 22, 0), // H13
		Speaks: func(c *Call) bool { return c.Arch == 103 && c.ContextSize > 1 && c.Algorithm == "allgather" },
		Reason: "cuDNN 9.21 hangs under all-gather on sm103.",
		Fix:    "Install cuDNN 9.22.0 or newer, or set parallel.algorithm to ring."},
}

func always(*Call) bool { return true }

// repeats reports whether a backward pass must repeat bit for bit; the forward pass does.
func repeats(c *Call) bool { return c.Training && c.Deterministic }
