package backends

// fusedDimRules is which head dims cuDNN's 16-bit kernels take: up to 128 everywhere, more
// by architecture, version and pass. A backward pass takes less than a forward pass, and
// Training asks for both. C17 also refuses wide head dims for a single query under a causal
// mask; a single query is never asked for with one, since it would hide nothing.
var fusedDimRules = []Rule{
	{ID: "fused-head-dim-multiple-8", Backend: Fused, // C13
		Speaks: func(c *Call) bool { return c.HeadDim%8 != 0 || c.HeadDimV%8 != 0 },
		Reason: "cuDNN needs head dims that are multiples of 8.",
		Fix:    "Pad the head dims to a multiple of 8."},
	{ID: "fused-head-dim-sm80-training", Backend: Fused, // C14, C17
		Speaks: func(c *Call) bool { return wide(c) && c.Arch < 90 && c.Training },
		Reason: "Before Hopper cuDNN trains with head dims up to 128.",
		Fix:    "Use flash, which takes head dims up to 256."},
	{ID: "fused-head-dim-sm80-inference-9.10.2", Backend: Fused, Until: V(9, 10, 2), // C14, C17
		Speaks: func(c *Call) bool { return wide(c) && c.Arch < 90 && !c.Training },
		Reason: "Before Hopper cuDNN before 9.10.2 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-training-9.5.0", Backend: Fused, Until: V(9, 5, 0), // C15, H02
		Speaks: func(c *Call) bool { return wide(c) && c.Arch == 90 && c.Training },
		Reason: "On Hopper the backward pass of cuDNN before 9.5.0 takes head dims up to 128, though the forward " +
			"pass takes more.",
		Fix: "Install cuDNN 9.5.0 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-training-256", Backend: Fused, // C15
		Speaks: func(c *Call) bool { return wider(c, 256) && c.Arch == 90 && c.Training },
		Reason: "On Hopper cuDNN trains with head dims up to 256.",
		Fix:    "Use a head dim of 256 or less."},
	{ID: "fused-head-dim-sm90-inference-9.1.0", Backend: Fused, Until: V(9, 1, 0), // C15
		Speaks: func(c *Call) bool { return wide(c) && c.Arch == 90 && !c.Training },
		Reason: "On Hopper cuDNN before 9.1.0 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.1.0 or newer, or use flash."},
	{ID: "fused-head-dim-sm90-inference-256-9.10.2", Backend: Fused, Until: V(9, 10, 2), // C15, C17
		Speaks: func(c *Call) bool { return wider(c, 256) && c.Arch == 90 && !c.Training },
		Reason: "On Hopper cuDNN before 9.10.2 takes head dims up to 256.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use a head dim of 256 or less."},
	{ID: "fused-head-dims-differ-sm90-9.11.0", Backend: Fused, Since: V(9, 11, 0), // C20
		Speaks: func(c *Call) bool {
			return c.Arch == 90 && c.Training && c.HeadDim >= 128 && c.HeadDimV >= 128 &&
				c.HeadDim != c.HeadDimV && !dims(c, 192, 128)
		},
		Reason: "On Hopper cuDNN from 9.11.0 has a bug in the backward pass where both head dims are 128 or more and " +
			"differ, unless they are 192 and 128.",
		Fix: "Pad the smaller head dim to the larger."},
	{ID: "fused-head-dim-sm100-inference-9.9.0", Backend: Fused, Until: V(9, 9, 0), // C16
		Speaks: func(c *Call) bool { return wide(c) && c.Arch >= 100 && !c.Training },
		Reason: "On Blackwell cuDNN before 9.9.0 takes head dims up to 128.",
		Fix:    "Install cuDNN 9.9.0 or newer, or use flash."},
	// C16, C17
	{ID: "fused-head-dim-sm100-decode-9.10.2", Backend: Fused, PerHop: true, Since: V(9, 9, 0), Until: V(9, 10, 2),
		Speaks: func(c *Call) bool { return wide(c) && c.Arch >= 100 && !c.Training && c.SeqQ == 1 },
		Reason: "On Blackwell cuDNN before 9.10.2 takes head dims over 128 for more than one query only.",
		Fix:    "Install cuDNN 9.10.2 or newer, or use flash."},
	{ID: "fused-head-dim-sm100-training", Backend: Fused, // C18, C19
		Speaks: func(c *Call) bool {
			return wide(c) && c.Arch >= 100 && c.Training && !dims(c, 192, 128) && !(dims(c, 256, 256) && c.Arch < 110)
		},
		Reason: "On Blackwell cuDNN trains with head dims up to 128, with 192 for q and k and 128 for v, and on " +
			"sm100 to sm109 with 256.",
		Fix: "Use flash, or one of these head dims."},
	{ID: "fused-head-dims-192-128-sm100-9.11.0", Backend: Fused, Until: V(9, 11, 0), // C18
		Speaks: func(c *Call) bool { return dims(c, 192, 128) && c.Arch >= 100 && c.Training },
		Reason: "On Blackwell training with head dims 192 and 128 came with cuDNN 9.11.0.",
		Fix:    "Install cuDNN 9.11.0 or newer, or use flash."},
	{ID: "fused-head-dims-differ-sm120", Backend: Fused, // U48
		Speaks: func(c *Call) bool {
			return c.HeadDim != c.HeadDimV && c.Arch == 120 && c.Training && (c.HeadDim > 128 || c.HeadDim%8 != 0)
		},
		Reason: "On sm120 cuDNN has no backward pass for head dims that differ where that of q and k is over 128 or " +
			"no multiple of 8.",
		Fix: "Use flash."},
	{ID: "fused-head-dim-256-sm100-9.23.0", Backend: Fused, Until: V(9, 23, 0), // C19
		Speaks: func(c *Call) bool { return blackwell256(c) && !c.Documents },
		Reason: "On Blackwell training with head dim 256 came with cuDNN 9.23.0.",
		Fix:    "Install cuDNN 9.23.0 or newer, or use flash."},
	{ID: "fused-head-dim-256-sm100-documents-9.25.0", Backend: Fused, Until: V(9, 25, 0), // C19
		Speaks: func(c *Call) bool { return blackwell256(c) && c.Documents },
		Reason: "On Blackwell training with head dim 256 on packed documents came with cuDNN 9.25.0.",
		Fix:    "Install cuDNN 9.25.0 or newer, or use flash."},
	{ID: "fused-head-dim-256-sm100-band", Backend: Fused, PerHop: true, // C19
		Speaks: func(c *Call) bool { return blackwell256(c) && c.Mask == BandMask },
		Reason: "On Blackwell cuDNN trains with head dim 256 only under a full or a causal mask.",
		Fix:    "Use flash.",
		Remedy: splitCall},
}

// wide reports whether a head dim of a 16-bit call is over 128, what every version and
// architecture takes.
func wide(c *Call) bool { return wider(c, 128) }

func wider(c *Call, d int) bool { return max(c.HeadDim, c.HeadDimV) > d }

func dims(c *Call, qk, v int) bool { return c.HeadDim == qk && c.HeadDimV == v }

func blackwell256(c *Call) bool {
	return dims(c, 256, 256) && c.Arch >= 100 && c.Arch < 110 && c.Training
}
