package backends

import "github.com/cprun/cprun/tensor"

// flashRules list the limits of our own kernels: CUDA on a GPU, tiled loops on a CPU. Both support any band, any number
// of documents and rectangles in a call, any grouping of heads, soft caps and deterministic gradients. U49 refuses head
// dims over 192 on every GPU outside its list, including sm103. Ours refuses them on GPUs with little shared memory,
// where some shapes have never run.
var flashRules = []Rule{
	{ID: "flash-not-built", Backend: Flash, // U102
		When:   func(c *Call) bool { return gpu(c) && c.Flash == 0 },
		Reason: "This binary has no CUDA kernels.",
		Fix:    "Build with the tag cuda."},
	{ID: "flash-arch-sm80", Backend: Flash, // U05
		When:   func(c *Call) bool { return gpu(c) && c.Arch < 80 },
		Reason: "The CUDA kernels need compute capability 8.0 or higher.",
		Fix:    "Use an Ampere GPU or newer, or run on the CPU with --device cpu."},
	{ID: "flash-dtype-gpu", Backend: Flash, // U09, kernels
		When: func(c *Call) bool {
			return gpu(c) && c.DType != tensor.F16 && c.DType != tensor.BF16 && c.DType != tensor.F32
		},
		Reason: "The CUDA kernels compute in float32, float16 and bfloat16 only.",
		Fix:    "Set precision.compute to bf16, fp16 or fp32."},
	{ID: "flash-head-dim-multiple-8", Backend: Flash, // U49
		When:   func(c *Call) bool { return gpu(c) && (c.HeadDim%8 != 0 || c.HeadDimV%8 != 0) },
		Reason: "The CUDA kernels read 16 bytes at once and need head dims that are multiples of 8.",
		Fix:    "Pad the head dims to a multiple of 8."},
	{ID: "flash-head-dims-differ", Backend: Flash, // U49, H09
		When:   func(c *Call) bool { return gpu(c) && c.HeadDim != c.HeadDimV },
		Reason: "The CUDA kernels are compiled for one head dim of q, k and v.",
		Fix:    "Pad the smaller head dim to the larger and slice the result."},
	{ID: "flash-head-dim-512", Backend: Flash, // kernels
		When:   func(c *Call) bool { return gpu(c) && wider(c, 512) },
		Reason: "The CUDA kernels take head dims up to 512.",
		Fix:    "Use a head dim of 512 or less."},
	{ID: "flash-head-dim-192-sm86", Backend: Flash, // U49
		When: func(c *Call) bool {
			return gpu(c) && c.Arch > 80 && c.Arch < 90 && wider(c, 192)
		},
		Reason: "Head dims over 192 have not run on sm86 and sm89, whose shared memory is small, and FlashAttention " +
			"2 takes none there.",
		Fix: "Use a head dim of 192 or less, or set attention.backend to reference."},
	{ID: "flash-rows", Backend: Flash, PerHop: true, // kernels
		When: func(c *Call) bool { return gpu(c) && max(c.RankQueries, c.SeqKV) > maxFlashRows(c) },
		Reason: "The CUDA kernels take up to 4,194,240 queries of a rank, and as many keys in a hop; half of that " +
			"with head dims over 256.",
		Fix: "Set parallel.algorithm to ring, with more ranks, or data.seq_len to less."},
	{ID: "flash-bias", Backend: Flash, // U89, U90
		When:   func(c *Call) bool { return gpu(c) && c.Bias },
		Reason: "The CUDA kernels add no bias and no ALiBi to the scores.",
		Fix:    "Set attention.backend to reference, or run on the CPU with --device cpu."},
	{ID: "flash-max-logit", Backend: Flash, // kernels
		When:   func(c *Call) bool { return gpu(c) && c.MaxLogit },
		Reason: "The CUDA kernels return no largest score.",
		Fix:    "Set attention.backend to reference, or run on the CPU with --device cpu."},
}

// maxFlashRows returns the number of blocks in a grid, times the rows of the smallest block in 16 bits.
func maxFlashRows(c *Call) int {
	if wider(c, 256) {
		return 65535 * 32
	}
	return 65535 * 64
}

func gpu(c *Call) bool { return c.Arch > 0 }
