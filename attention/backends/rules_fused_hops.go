package backends

import (
	"math"

	"github.com/cprun/cprun/attention/qkv"
)

// fusedHopRules is what lengths and masks cuDNN takes in one call. A call has one rectangle
// with one mask: full, causal from either corner, or a window around one of these diagonals.
//
// The reference's C32 also refuses, read to the letter, masks without a window from 9.2.0 to
// 9.5: plain causal with dropout or a bias, bottom right of a rectangle, any packed document.
// That is how a condition was written, against its neighbours C24 and C25 and against what
// cuDNN documents, so only its limits on windows are taken over.
var fusedHopRules = []Rule{
	{ID: "fused-one-rectangle", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool { return c.Rects > 1 },
		Reason: "A cuDNN call computes one rectangle of the scores, and this hop has several.",
		Fix:    "Run the hop as a call for each rectangle, or use flash, which takes them all at once.",
		Source: "section 2.2", Remedy: splitCall},
	{ID: "fused-seq-multiple-64", Backend: Fused, PerHop: true, Until: V(9, 0, 0),
		Speaks: func(c *Call) bool { return c.SeqQ%64 != 0 || c.SeqKV%64 != 0 },
		Reason: "cuDNN before 9.0.0 needs sequence lengths that are multiples of 64, on every hop.",
		Fix:    "Install cuDNN 9.0.0 or newer, make data.seq_len a multiple of 128 times the ranks under layout zigzag, where each half of a rank is then one of 64, or use flash.",
		Source: "C11, H01", Remedy: padSeq64},
	{ID: "fused-mask-causal-8.9.6", Backend: Fused, PerHop: true, Until: V(8, 9, 6),
		Speaks: func(c *Call) bool { return c.Mask != CausalMask || c.Padding() },
		Reason: "cuDNN before 8.9.6 has the causal mask only, and most hops are full.",
		Fix:    "Install cuDNN 8.9.6 or newer, or use flash.",
		Source: "C22, C23"},
	{ID: "fused-bottom-right-9.3.0", Backend: Fused, PerHop: true, Until: V(9, 3, 0),
		Speaks: func(c *Call) bool { return f16(c) && c.Mask == BottomRightMask },
		Reason: "cuDNN before 9.3.0 has no causal mask aligned at the bottom right.",
		Fix:    "Install cuDNN 9.3.0 or newer, or run the call as a full and a causal one.",
		Source: "C25", Remedy: splitCall},
	{ID: "fused-bottom-right-multiple-64", Backend: Fused, PerHop: true, Since: V(9, 3, 0), Until: V(9, 7, 0),
		Speaks: func(c *Call) bool {
			return f16(c) && c.Mask == BottomRightMask && (c.SeqQ%64 != 0 || c.SeqKV%64 != 0)
		},
		Reason: "cuDNN before 9.7.0 needs multiples of 64 under a causal mask aligned at the bottom right.",
		Fix:    "Install cuDNN 9.7.0 or newer, or run the call as a full and a causal one.",
		Source: "C25", Remedy: splitCall},
	{ID: "fused-bottom-right-bias-dropout", Backend: Fused, PerHop: true, Since: V(9, 3, 0), Until: V(9, 7, 0),
		Speaks: func(c *Call) bool { return f16(c) && c.Mask == BottomRightMask && (c.Bias != NoBias || c.Dropout) },
		Reason: "cuDNN before 9.7.0 has neither bias nor dropout under a causal mask aligned at the bottom right.",
		Fix:    "Install cuDNN 9.7.0 or newer, or run the call as a full and a causal one.",
		Source: "C25", Remedy: splitCall},
	{ID: "fused-alibi-causal", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool {
			return c.Bias == ALiBi && (c.Mask == FullMask || c.Mask == BandMask || c.Padding())
		},
		Reason: "cuDNN has ALiBi under a causal mask only, without padding.",
		Fix:    "Drop ALiBi, or use a causal mask and no packed documents.",
		Source: "C21"},
	{ID: "fused-window-9.2.0", Backend: Fused, PerHop: true, Until: V(9, 2, 0),
		Speaks: (*Call).Windowed,
		Reason: "cuDNN before 9.2.0 has no sliding window.",
		Fix:    "Install cuDNN 9.2.0 or newer (9.6.0 for rings and documents), or use flash.",
		Source: "C31", Remedy: splitCall},
	{ID: "fused-window-band-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0),
		Speaks: func(c *Call) bool { return c.Mask == BandMask },
		Reason: "cuDNN before 9.6.0 has a window under a causal mask only, and this one reaches behind the diagonal.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash.",
		Source: "C32, C33, G10", Remedy: splitCall},
	{ID: "fused-window-bottom-right-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0),
		Speaks: func(c *Call) bool { return c.Windowed() && c.Mask == BottomRightMask },
		Reason: "cuDNN before 9.6.0 has a window aligned at the bottom right only for as many queries as keys.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash.",
		Source: "C32"},
	{ID: "fused-window-documents-9.6.0", Backend: Fused, PerHop: true, Since: V(9, 2, 0), Until: V(9, 6, 0),
		Speaks: func(c *Call) bool { return c.Windowed() && c.Padding() },
		Reason: "cuDNN before 9.6.0 has no window together with packed documents or padding.",
		Fix:    "Install cuDNN 9.6.0 or newer, or use flash.",
		Source: "C32, C33"},
	{ID: "fused-window-bottom-right-sm100-9.7.1", Backend: Fused, PerHop: true, Until: V(9, 7, 1),
		Speaks: func(c *Call) bool { return c.Windowed() && c.Mask == BottomRightMask && c.Arch >= 100 },
		Reason: "On Blackwell cuDNN 9.7.0 has a window aligned at the bottom right only for as many queries as keys.",
		Fix:    "Install cuDNN 9.7.1 or newer, or use flash.",
		Source: "C33", Remedy: splitCall},
	{ID: "fused-window-more-queries", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool { return c.Windowed() && c.SeqQ > c.SeqKV },
		Reason: "cuDNN has no sliding window over fewer keys than queries.",
		Fix:    "Run the call in parts, or use flash.",
		Source: "U87, C32, C33", Remedy: splitCall},
	{ID: "fused-window-dropout", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool { return c.Windowed() && c.Dropout },
		Reason: "cuDNN has no sliding window together with dropout.",
		Fix:    "Set dropout to 0.",
		Source: "U86, C32, C33"},
	{ID: "fused-window-bias", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool { return c.Windowed() && c.Bias != NoBias },
		Reason: "cuDNN has no sliding window together with a bias.",
		Fix:    "Drop the bias, or the window.",
		Source: "C32, C33"},
	{ID: "fused-window-bug-9.14.0", Backend: Fused, PerHop: true, Since: V(9, 14, 0), Until: V(9, 14, 1),
		Speaks: func(c *Call) bool {
			return f16(c) && c.Left >= 0 && c.SeqKV > 1024 && (c.Mask == BandMask || c.Padding())
		},
		Reason: "cuDNN 9.14.0 has a bug in windows over more than 1024 keys under other masks than a plain causal one.",
		Fix:    "Install cuDNN 9.14.1 or newer.",
		Source: "C40", Remedy: splitCall},
	{ID: "fused-documents-mixed-bands", Backend: Fused, PerHop: true,
		Speaks: func(c *Call) bool { return c.MixedBands },
		Reason: "A cuDNN call has one window for all its documents, and in this hop each document has a band of its own.",
		Fix:    "Use flash, which takes a tile for each document.",
		Source: "section 2.9"},
	{ID: "fused-slices", Backend: Fused,
		Speaks: func(c *Call) bool { return c.Slices },
		Reason: "A cuDNN call has one mask, and slices have one each.",
		Fix:    "Use flash, which takes a tile for each slice.",
		Source: "U82"},
	{ID: "fused-documents-offsets-9.5.0", Backend: Fused, PerHop: true, Until: V(9, 5, 0),
		Speaks: func(c *Call) bool { return c.Documents && raggedOffset(c) > math.MaxInt32 },
		Reason: "cuDNN before 9.5.0 counts the offsets of packed documents in 32 bits, too few for this length.",
		Fix:    "Install cuDNN 9.5.0 or newer, use more ranks, or use flash.",
		Source: "C34"},
	{ID: "fused-graph-multiple-128", Backend: Fused, PerHop: true, Until: V(9, 15, 1),
		Speaks: func(c *Call) bool {
			return f16(c) && c.Training && c.CUDAGraph && !c.Padding() && c.SeqKV%128 != 0
		},
		Reason: "In a CUDA graph the backward pass of cuDNN up to 9.15.0 needs multiples of 128 keys.",
		Fix:    "Install cuDNN 9.15.1 or newer, or run without CUDA graphs.",
		Source: "C41", Remedy: padSeq128},
	{ID: "fused-deterministic-workspace-9.25.0", Backend: Fused, PerHop: true, Until: matrixUntil,
		Speaks: func(c *Call) bool {
			return KeepsMatrix(c.Arch, c.CUDNN) && repeats(c) && !c.GrantedWorkspace && dpWorkspace(c) > maxDPWorkspace
		},
		Reason: "On Hopper the deterministic backward pass of cuDNN before 9.25.0 takes a workspace of the square of the length, here over 256 MiB.",
		Fix:    "Install cuDNN 9.25.0 or newer, use flash, or set train.deterministic to false.",
		Source: "H12", Remedy: grantWorkspace},
}

// raggedOffset is the largest offset, in elements, into one of q, k, v as cuDNN counts it: the
// row of the tensor that they lie in times the longest sequence.
func raggedOffset(c *Call) int64 {
	q, k, v := int64(c.Heads*c.HeadDim), int64(c.KVHeads*c.HeadDim), int64(c.KVHeads*c.HeadDimV)
	switch c.Packing {
	case qkv.QKV3HD, qkv.QKVH3D, qkv.QKVHeads, qkv.QKVGroups:
		q = q + k + v
		k, v = q, q
	case qkv.KV2HD, qkv.KVH2D:
		k, v = k+v, k+v
	}
	return max(q*int64(c.SeqQ), k*int64(c.SeqKV), v*int64(c.SeqKV))
}

// maxDPWorkspace is what cudnn-frontend takes for speed alone at most, the default of its
// CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT. Above it, sums before cuDNN 9.0.0 are atomic and do not
// repeat. From 9.0.0 on a deterministic pass is given the workspace at any size, 64 GiB for 16,384
// tokens and 128 heads: a remedy, which auto takes only where flash, which needs none, cannot run.
const maxDPWorkspace = 256 << 20

// dpWorkspace is the bytes of the dP matrix of a call, as cudnn-frontend counts them: in blocks of 64.
func dpWorkspace(c *Call) float64 { return dpBytes(c, 64) }

// dpBytes is 16 bits for every query and key of every head, in blocks.
func dpBytes(c *Call, block int) float64 {
	return 2 * float64(c.Batch) * float64(c.Heads) * float64(roundUp(c.SeqQ, block)) * float64(roundUp(c.SeqKV, block))
}
