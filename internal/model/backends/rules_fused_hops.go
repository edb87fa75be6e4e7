package backends

import "math"

// fusedHopRules reject lengths and masks of one cuDNN call. A call has one rectangle with one mask: full, causal from
// either corner, or a window around one of these diagonals.
//
// Literally, C32 also refuses masks without a window from 9.2.0 to 9.5: bottom right of a rectangle and packed
// documents. That contradicts C24, C25 and cuDNN's documentation, so only its limits on windows are here.
var fusedHopRules = []Rule{
	{ID: "fused-one-rectangle", Backend: Fused, PerHop: true, // section 2.2
		When:   func(c *Call) bool { return c.Rects > 1 },
		Reason: "A cuDNN call computes one rectangle of the scores, and this hop has several.",
		Fix:    "Run the hop as a call for each rectangle, or use flash, which takes them all at once.",
		Remedy: splitCall},
	{ID: "fused-seq-multiple-64", Backend: Fused, PerHop: true, Until: V(9, 0, 0), // C11, H01
		When:   func(c *Call) bool { return c.SeqQ%64 != 0 || c.SeqKV%64 != 0 },
		Reason: "cuDNN before 9.0.0 needs sequence lengths that are multiples of 64, on every hop.",
		Fix:    "Install cuDNN 9.0.0 or newer, or use flash."},
	{ID: "fused-bottom-right-9.3.0", Backend: Fused, PerHop: true, Until: V(9, 3, 0), // C25
		When:   func(c *Call) bool { return c.Mask == BottomRightMask },
		Reason: "cuDNN before 9.3.0 has no causal mask aligned at the bottom right.",
		Fix:    "Install cuDNN 9.3.0 or newer, or use flash."},
	{ID: "fused-bottom-right-multiple-64", Backend: Fused, PerHop: true, Since: V(9, 3, 0), Until: V(9, 7, 0), // C25
		When: func(c *Call) bool {
			return c.Mask == BottomRightMask && (c.SeqQ%64 != 0 || c.SeqKV%64 != 0)
		},
		Reason: "cuDNN before 9.7.0 needs multiples of 64 under a causal mask aligned at the bottom right.",
		Fix:    "Install cuDNN 9.7.0 or newer, or use flash."},
	{ID: "fused-window-9.2.0", Backend: Fused, PerHop: true, Until: V(9, 2, 0), // C31
		When:   (*Call).Windowed,
		Reason: "cuDNN before 9.2.0 has no sliding window.",
		Fix:    "Install cuDNN 9.2.0 or newer (9.6.0 for rings and documents), or use flash.",
		Remedy: splitCall},
	{ID: "fused-window-band-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0), // C32, C33, G10
		When:   func(c *Call) bool { return c.Mask == BandMask },
		Reason: "cuDNN before 9.6.0 has a window under a causal mask only, and this one reaches behind the diagonal.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash.",
		Remedy: splitCall},
	{ID: "fused-window-bottom-right-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0), // C32
		When:   func(c *Call) bool { return c.Windowed() && c.Mask == BottomRightMask },
		Reason: "cuDNN before 9.6.0 has a window aligned at the bottom right only for as many queries as keys.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash."},
	{ID: "fused-window-documents-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0), // C32, C33
		When:   func(c *Call) bool { return c.Windowed() && c.Documents },
		Reason: "cuDNN before 9.6.0 has no window together with packed documents or padding.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash."},
	{ID: "fused-window-bottom-right-sm100-9.7.1", Backend: Fused, PerHop: true, Until: V(9, 7, 1), // C33
		When:   func(c *Call) bool { return c.Windowed() && c.Mask == BottomRightMask && c.Arch >= 100 },
		Reason: "On Blackwell cuDNN 9.7.0 has a window aligned at the bottom right only for as many queries as keys.",
		Fix:    "Install cuDNN 9.7.1 or newer, or use flash."},
	{ID: "fused-window-more-queries", Backend: Fused, PerHop: true, // U87, C32, C33
		When:   func(c *Call) bool { return c.Windowed() && c.SeqQ > c.SeqKV },
		Reason: "cuDNN has no sliding window over fewer keys than queries.",
		Fix:    "Run the call in parts, or use flash.",
		Remedy: splitCall},
	{ID: "fused-window-bug-9.14.0", Backend: Fused, PerHop: true, Since: V(9, 14, 0), Until: V(9, 14, 1), // C40
		When: func(c *Call) bool {
			return c.Left >= 0 && c.SeqKV > 1024 && (c.Mask == BandMask || c.Documents)
		},
		Reason: "cuDNN 9.14.0 has a bug in windows over more than 1024 keys under other masks than a plain causal one.",
		Fix:    "Install cuDNN 9.14.1 or newer.",
		Remedy: splitCall},
	{ID: "fused-documents-mixed-bands", Backend: Fused, PerHop: true, // section 2.9
		When: func(c *Call) bool { return c.MixedBands },
		Reason: "A cuDNN call has one window for all its documents, and in this hop each document has a band of its " +
			"own.",
		Fix: "Use flash, which takes a tile for each document."},
	{ID: "fused-slices", Backend: Fused, // U82
		When:   func(c *Call) bool { return c.Slices },
		Reason: "A cuDNN call has one mask, and slices have one each.",
		Fix:    "Use flash, which takes a tile for each slice."},
	{ID: "fused-documents-offsets-9.5.0", Backend: Fused, PerHop: true, Until: V(9, 5, 0), // C34
		When:   func(c *Call) bool { return c.Documents && raggedOffset(c) > math.MaxInt32 },
		Reason: "cuDNN before 9.5.0 counts the offsets of packed documents in 32 bits, too few for this length.",
		Fix:    "Install cuDNN 9.5.0 or newer, use more ranks, or use flash."},
	{ID: "fused-deterministic-workspace-9.25.0", Backend: Fused, PerHop: true, Until: matrixUntil, // H12
		When: func(c *Call) bool {
			return KeepsMatrix(c.Arch, c.CUDNN) && deterministicBackward(c) && !c.GrantedWorkspace &&
				dpWorkspace(c) > maxDPWorkspace
		},
		Reason: "On Hopper the deterministic backward pass of cuDNN before 9.25.0 takes a workspace of the square of " +
			"the length, here over 256 MiB.",
		Fix:    "Install cuDNN 9.25.0 or newer, use flash, or set train.deterministic to false.",
		Remedy: grantWorkspace},
}

// raggedOffset returns cuDNN's largest offset into q, k and v in elements: the length of a row times the longest
// sequence.
func raggedOffset(c *Call) int64 {
	keys := int64(c.KVHeads) * int64(max(c.HeadDim, c.HeadDimV)) * int64(c.SeqKV)
	return max(int64(c.Heads)*int64(c.HeadDim)*int64(c.SeqQ), keys)
}

// maxDPWorkspace is the workspace that cudnn-frontend takes for speed, the default of its
// CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT. A deterministic pass may need any size, 64 GiB for 16,384 tokens and 128
// heads. That is a remedy, which auto uses only if flash cannot run, since flash needs none.
const maxDPWorkspace = 256 << 20

// dpWorkspace returns the bytes of the dP matrix of a call in cudnn-frontend's count: in blocks of 64.
func dpWorkspace(c *Call) float64 { return dpBytes(c, 64) }

// dpBytes returns 16 bits for every query and key of every head, in blocks.
func dpBytes(c *Call, block int) float64 {
	return 2 * float64(c.Batch) * float64(c.Heads) * float64(roundUp(c.SeqQ, block)) * float64(roundUp(c.SeqKV, block))
}

func roundUp(n, m int) int { return (n + m - 1) / m * m }
