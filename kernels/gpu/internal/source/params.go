package source

// The structs in this file are arguments of kernels, in the layout of C: the host passes their bytes. A device address
// is a uint64. Fields have the names of C: TileCount for tile_count. Unused fields fill gaps, which Go and C might pad
// differently. A test compares size, offset and type of every field with the compiler of the kernels.

// Strided is a tensor [batch, seq, heads, dim] in flash.cuh, reference.cu, attention_common.cu and attention_sink.cu.
// Strides count elements; dim has stride 1.
type Strided struct {
	At               uint64
	Batch, Seq, Head int64
}

// FlashParams holds the arguments of the flash kernels; see flash.cuh. Unused tensors are zero.
type FlashParams struct {
	Q, K, V, Dout, O, LSE, Delta, DQ, DK, DV                Strided // O: the accumulator
	Tiles                                                   uint64  // address of FlashTile; 0: the tiles are in Few
	TileCount, SeqQ, SeqK, Heads, KVHeads, Dim, DimV, Flags int32
	Unit, Inner, Outer, Inverse, Scale                      float32
	Unused                                                  int32
	Few                                                     [FlashTiles]FlashTile
}

// FlashTile is struct Tile of flash.cuh.
type FlashTile struct {
	OwnLo, OwnHi, OtherLo, OtherHi, Lo, Hi, Reach, Unused int32
}

// Bits of FlashParams.Flags; see flash.cuh.
const (
	FlashAligned      = 1
	FlashAlignedFloat = 2
	FlashScaled       = 4
	FlashCapped       = 8
)

// TensorMap is struct TensorMap of hopper.cuh, which the driver encodes. It is aligned to MapAlign bytes.
type TensorMap struct {
	Words [16]uint64
}

// MapAlign is the alignment of a kernel's argument with a TensorMap.
const MapAlign = 64

// HopperForward has the arguments of the forward pass on Hopper.
type HopperForward struct {
	Q, K, V                             TensorMap
	Out                                 Strided // 16 bits
	Next, Order                         uint64  // of uint32; of int32
	Pass, Blocks, HeadsBeside, AllHeads int32
	Needs, Gates                        uint64 // of uint32, of each block of queries; of HopperGate
	Early                               int32
	Unused                              [11]int32
	P                                   FlashParams
}

// HopperGroup has the arguments of products of rows sorted by expert, on Hopper.
type HopperGroup struct {
	A, B, C            TensorMap
	ARows, BRows       uint64 // addresses of rows of tokens
	ATokens, BTokens   uint64 // of int32; 0: rows are in the order of places
	Starts, Out, Next  uint64 // of int32; of the output; of two uint32, which are 0
	Gated              uint64 // of the output act(gate) * up, or wy
	Weights, Sums      uint64 // of float32
	AFactors, BFactors uint64 // of float32
	Experts, Depth     int32
	Rows, Columns      int32 // Rows: of an expert's gradient
	AColumns, BColumns int32
	Accumulate, Turned int32 // bools
	Places             int32
	Unused             [15]int32
}

// HopperBackward has the arguments of the backward pass on Hopper.
type HopperBackward struct {
	Q, K, V, Dout, DQ TensorMap
	Progress, Order   uint64 // of uint32; of int32

	Start, Blocks, Banded, Fold, Beside, Together, FreshLo, FreshHi int32
	// of uint32, of each block of keys; of HopperGate; of uint32; of HopperFault
	Needs, Gates, Next, Fault uint64
	Polls                     uint32
	Unused                    [11]int32

	P FlashParams // common parameters of the flash kernels
}

// HopperGate is struct Gate of hopper_gates.cuh: the address of a word and the count that opens the gate, each as two
// halves, lower first.
type HopperGate struct {
	At, Count     [2]uint32
	Asked, Unused uint32
}

// HopperFault is the report of a block of the ordered backward pass that timed out: 1 + its block of keys, or 0 if
// there is none, the KV head, the batch element, and the block of keys for which it waited.
type HopperFault struct {
	Keys1, KVHead, Batch, Before int32 // all 0 until a block reports
}

// HopperGates is the largest number of gates of a kernel.
const HopperGates = 32

// Bits of HopperForward.Pass; see hopper_forward.cu.
const (
	HopperFirst = 1
	HopperLast  = 2
)

// ReferenceParams is struct Params of reference.cu, the arguments of the reference kernels.
type ReferenceParams struct {
	Q, K, V, Dout, O, LSE, Delta, DQ, DK, DV                                      Strided // O: the accumulator
	Bias, Dbias, Largest                                                          Strided // zero: none
	Tiles                                                                         uint64  // of ReferenceTile
	Rows, Columns, Slopes                                                         uint64
	TileCount, SeqQ, SeqK, Heads, KVHeads, Dim, DimV, Batch, BiasBatch, BiasHeads int32
	Scale, Softcap                                                                float64
}

// ReferenceTile is struct Tile of reference.cu.
type ReferenceTile struct {
	QLo, QHi, KLo, KHi, Lo, Hi int32
}

// Rows is the shape for the kernels of attention_common.cu: Rows is batch times seqs times heads.
type Rows struct {
	Rows, Seqs, Heads, Dim, Width, Unused int32
}

// SinkParams are the arguments of the kernels of attention_sink.cu.
type SinkParams struct {
	O, Dout, LSE            Strided
	Sink, Dsink             uint64
	Batch, Seqs, Heads, Dim int32
}

// Words holds the words that attention_store of attention_common.cu writes to memory.
type Words struct {
	X [224]uint32
}

// FusedStrides is struct Strides of fused.cu, for [batch, seq, heads] in elements.
type FusedStrides struct {
	Batch, Seq, Head int64
}

// FusedMaxParts is the largest number of partial results in a call of fused.cu.
const FusedMaxParts = 8

// FusedPart is struct Part of fused.cu, a partial result for rows [Lo, Hi).
type FusedPart struct {
	X, LSE uint64
	L      FusedStrides // of the LSE
	Lo, Hi int32
}

// FusedMerge is struct Merge of fused.cu, the arguments of fused_merge.
type FusedMerge struct {
	Parts                                                           [FusedMaxParts]FusedPart
	State                                                           uint64
	StateAt                                                         FusedStrides
	LSE                                                             uint64
	LSEAt                                                           FusedStrides
	Out                                                             uint64
	OutAt                                                           FusedStrides
	Count, Fresh, All, Seq, Heads, Dim, RowsPerBlock, HeadsPerBlock int32
}

// FusedSum is struct Sum of fused.cu, one tensor of gradients.
type FusedSum struct {
	Parts                                                         [FusedMaxParts]FusedPart
	Dst                                                           uint64
	At                                                            FusedStrides
	Src                                                           uint64
	SrcAt                                                         FusedStrides
	Count, Lo, Hi, Fresh0, Fresh1, Src0, Src1, Heads, Dim, Unused int32
}

// FusedSums is struct Sums of fused.cu, the arguments of fused_sum.
type FusedSums struct {
	Of [2]FusedSum
}

// FusedLSE is struct Lse of fused.cu, the arguments of fused_lse.
type FusedLSE struct {
	Src                       uint64
	SrcAt                     FusedStrides
	Dst                       uint64
	DstAt                     FusedStrides
	Rows, Heads, Open, Unused int32
}

// Matrix is struct Matrix of gemm_simple.cu: its address, and its strides in elements.
type Matrix struct {
	At          uint64
	Row, Column int64
}

// Layout is struct Layout of ops_copy.cu, the shape of two views and their strides in elements.
type Layout struct {
	Shape    [4]int32
	Dst, Src [4]int64
}

// ConvRows is struct ConvRows of ops_conv.cu, a tensor [batch, seq, n]; see Strided.
type ConvRows struct {
	At          uint64
	Sample      int64
	Row, Unused int32
}

// ConvSegments is SEGMENTS in ops_conv.cu: the most segments of a kernel.
const ConvSegments = 64

// ConvSegment is struct ConvSegment of ops_conv.cu: a range of rows, and the tiles of a sample before it.
type ConvSegment struct {
	Lo, Hi, First int32
}

// Conv is struct Conv of ops_conv.cu.
type Conv struct {
	X, Before, Y, DX, Dbefore             ConvRows
	W, Partial                            uint64
	N, Width, Batch, Count, Tiles, Unused int32
	Segments                              [ConvSegments]ConvSegment
}

// Keys is struct Keys of ops_embed.cu: the split of 32 bits into ids and positions.
type Keys struct {
	Count, Bits, Vocab int32
}

// AdamStep is struct Step of ops_optim.cu, the parameters of a step of AdamW.
type AdamStep struct {
	MaxNorm                                          float64
	Keep, Rate, Root, New1, Old2, New2, Eps, Unscale float32
}

// Strips is struct Strips of ops_draw.cu, the tables of the ziggurat: of strip i, the part of its width that lies below
// the curve, its width, each in units of 2^-31, and the density at its edge.
type Strips struct {
	K    [128]uint32
	W, F [128]float32
}

// Normals is struct Normals of ops_draw.cu: a sequence of numbers, and the first element to draw, and their number.
type Normals struct {
	Seed, Stream, Step, Lo, N int64
	Std                       float64
}

// Rope is struct Rope of ops_rope.cu: the pairs of a head, those that rotate, and the lanes of a head.
type Rope struct {
	Tokens, Heads, Half, Turned, Lanes int32
}

// Pairs is struct Pairs of pairs.cuh: the addresses of kernels.Pairs, and the numbers of pairs, of experts for a token,
// and of experts.
type Pairs struct {
	Tokens, Places, Starts         uint64
	Count, Chosen, Experts, Unused int32
}

// Router is struct Router of ops_experts.cu; see kernels.Router.
type Router struct {
	Scale                            float64
	Sigmoid, Normalize, Groups, Kept int32
}

// Quantize is struct Quantize of ops_scaled.cu: a matrix, and its codes and factors, addresses of 0 if not wanted.
type Quantize struct {
	X, ByRow, ByColumn, RowFactors, ColumnFactors uint64
	Largest                                       uint64 // of uint32 for each row, then for each column
	By, Least                                     uint64 // of float32 for each column; for each row; or 0
	Rows, Columns, Stride, Unused                 int32
}

// DeltaParams has the arguments of the kernels of the gated delta rule; see delta.cu.
type DeltaParams struct {
	Q, K, V, G, Beta, Dout, O, DQ, DK, DV, DG, Dbeta, From, To Strided
	T, P, E, X, S, DS, Factors                                 uint64 // workspace
	Batch, Heads, KeyHeads, Dim, DimV, WideV, Count, Flags     int32
	Scale                                                      float32
	Stages                                                     int32
	Segments                                                   [DeltaSegments]DeltaSegment
}

// DeltaSegment is struct Segment of delta.cuh: rows of every sample, the number of its first chunk, and the place of
// its state in From, or -1.
type DeltaSegment struct {
	Lo, Hi, Chunk, From int32
}

// DeltaSegments is the largest number of segments of a launch.
const DeltaSegments = 96

// Bits of DeltaParams.Flags; see delta.cu. The first bits are in the order of q, k, v, do, and do, o, dq,
// dk, dv, the last in that of o, dq, dk, dv.
const (
	DeltaAligned = 1
	DeltaWide    = 16
	DeltaMapped  = 512
	DeltaKeep    = 1024
	DeltaPieces  = 2048
)

// DeltaFactors is the size of struct Factors of delta.cu, in bytes.
const DeltaFactors = 5 * 64 * 4

// DeltaMaps has the arguments of delta_compose: columns of Earlier, since Begin with a summand in Later.
type DeltaMaps struct {
	To, Later, Earlier          Strided // Seq: rows of a map
	Dim, Columns, Begin, Unused int32
}
