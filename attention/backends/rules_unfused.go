package backends

import "github.com/cprun/cprun/tensor"

// unfusedNotBuilt is the rule that no call passes in this build.
const unfusedNotBuilt = "unfused-not-built"

// unfusedRules is what matrix products around a softmax cannot run: they take any mask, bias and
// head dim, but need a score matrix in memory.
var unfusedRules = []Rule{
	{ID: "unfused-gpu-only", Backend: Unfused, NoGPU: true,
		Speaks: func(c *Call) bool { return !gpu(c) },
		Reason: "There is no unfused path on a CPU, where the tiled kernels need no library.",
		Fix:    "Use flash.",
		Source: "kernels"},
	{ID: unfusedNotBuilt, Backend: Unfused,
		Speaks: func(c *Call) bool { return !c.Unbuilt },
		Reason: "The unfused path is not in this build, on any device.",
		Fix:    "Use flash, fused or reference, or let auto choose.",
		Source: "kernels"},
	{ID: "unfused-context", Backend: Unfused,
		Speaks: func(c *Call) bool { return c.ContextSize > 1 },
		Reason: "The unfused path returns no LSE to merge hops with.",
		Fix:    "Use flash or fused, or set parallel.context to 1.",
		Source: "U66"},
	{ID: "unfused-dtype", Backend: Unfused,
		Speaks: func(c *Call) bool { return !isFloat(c.DType) },
		Reason: "Attention needs floating point numbers.",
		Fix:    "Set precision.compute to bf16, fp16 or fp32.",
		Source: "D01"},
	{ID: "unfused-fp8", Backend: Unfused,
		Speaks: fp8,
		Reason: "The unfused path does not compute in FP8.",
		Fix:    "Use fused, or set precision.fp8 to off.",
		Source: "U15, U63"},
	{ID: "unfused-memory", Backend: Unfused, PerHop: true,
		Speaks: func(c *Call) bool { return c.Memory > 0 && scoreBytes(c) > float64(c.Memory) },
		Reason: "The score matrix, of every query and key of every head, is larger than the memory of the device.",
		Fix:    "Use flash or fused, which keep no score matrix.",
		Source: "section 3.0"},
}

// referenceRules is what the definition in this package does not compute.
var referenceRules = []Rule{
	{ID: "reference-dtype", Backend: Reference,
		Speaks: func(c *Call) bool { return !isFloat(c.DType) },
		Reason: "Attention needs floating point numbers.",
		Fix:    "Set precision.compute to bf16, fp16 or fp32.",
		Source: "D01"},
	{ID: "reference-dropout", Backend: Reference,
		Speaks: func(c *Call) bool { return c.Dropout },
		Reason: "The reference has no dropout.",
		Fix:    "Set dropout to 0.",
		Source: "attention.Softmax"},
	{ID: "reference-fp8", Backend: Reference,
		Speaks: fp8,
		Reason: "The reference does not compute in FP8.",
		Fix:    "Set precision.fp8 to off.",
		Source: "attention.Reference"},
}

func isFloat(t tensor.DType) bool {
	return t == tensor.F64 || t == tensor.F32 || t == tensor.F16 || t == tensor.BF16
}

// scoreBytes is the score matrix of a call, in the element type of q.
func scoreBytes(c *Call) float64 {
	return float64(c.DType.Size()) * float64(c.Batch) * float64(c.Heads) * float64(c.SeqQ) * float64(c.SeqKV)
}
