// Package gpu computes attention and the other operations of a model on NVIDIA GPUs. Flash and Reference compute
// attention with cprun's own CUDA kernels (kernels/gpu/internal/source), Fused with cuDNN. Ops computes the other
// operations; its matrix products use cuBLASLt. A Loader compiles the kernels:
//
//	loader, err := gpu.NewLoader(device)
//	flash, err := gpu.NewFlash(stream, loader, gpu.FlashOptions{})
//
// Memory sizes, which plans need, build everywhere. The rest has the build tag cuda.
package gpu

// FusedShape is the attention of one rank, in tokens, heads and elements.
type FusedShape struct {
	Batch, SeqQ    int // local queries
	SeqK           int // keys of the largest call
	Heads, KVHeads int
	Dim, DimV      int
	Calls          int // blocks of one pass: the hops with work
	Training       bool
	Packed         bool // FusedOptions.Packed
	// Deterministic is FusedOptions.Deterministic, if backends.KeepsMatrix reports that cuDNN then keeps the matrix of
	// all pairs of a call.
	Deterministic bool
}

// packing holds the limits of packed problems, which work around faults of cuDNN.
type packing struct {
	least  int // smallest length of the longest sequence; with 1, cuDNN returns a wrong LSE
	widest int // largest head dim with packed gradients; above, they lack all keys after the 128th
	// multiple divides head dims with packed gradients. With other head dims, cudnn-frontend's workspace has loose
	// bounds: gigabytes with many documents.
	multiple int
	loose    bool // the workspace is for sequences that all have the longest length, not for the total number of rows
}

var defaultPacking = packing{least: 128, widest: 192, multiple: 16}

func (p packing) grads(dim, dimV int) bool {
	return max(dim, dimV) <= p.widest && dim%p.multiple == 0 && dimV%p.multiple == 0
}

// maxHeld is the number of partial results that Fused merges in one pass over the accumulator. A result may consist of
// several parts, one for each run of rows.
const maxHeld = 4

// FusedWorkspace returns the device memory that Fused needs for a shape, in bytes: partial results before their merge,
// and the workspace of a backward call of cuDNN. A forward call of cuDNN needs almost none.
func FusedWorkspace(s FusedShape) int64 {
	rows := int64(s.Batch) * int64(s.SeqQ) * int64(s.Heads)
	keys := int64(s.Batch) * int64(s.SeqK) * int64(s.KVHeads)
	held := int64(min(max(s.Calls, 1), maxHeld))
	forward := held * rows * int64(2*s.DimV+4)
	if !s.Training {
		return forward + fusedSlack
	}
	// The LSE and partial dQ; dK and dV.
	backward := rows*4 + held*rows*int64(2*s.Dim) + keys*int64(2*(s.Dim+s.DimV)) + backwardWorkspace(s)
	return max(forward, backward) + fusedSlack
}

// backwardWorkspace bounds cuDNN's workspace of a backward call, as internal/model/backends does. In cudnn-frontend
// 1.23.0 (node/scaled_dot_product_flash_attention.h), it holds the float32 sums of do*o and float32 dQ. For packed
// documents with grouped heads, it also holds dK and dV of every query head.
//
// A deterministic call also keeps the matrix dP, in 16 bits. cuDNN 9.19 asked for exactly this size at 8K tokens and
// head dims of 64, 128 and 256. Lengths are rounded up to 128, the longest side of a tile.
func backwardWorkspace(s FusedShape) int64 {
	rows := int64(s.Batch) * int64(s.SeqQ) * int64(s.Heads)
	n := rows*4 + rows*int64(4*s.Dim)
	if s.Deterministic {
		n += int64(s.Batch) * int64(s.Heads) * roundUp64(int64(s.SeqQ), 128) * roundUp64(int64(s.SeqK), 128) * 2
	}
	if s.Packed && s.Heads > s.KVHeads && defaultPacking.grads(s.Dim, s.DimV) {
		n += int64(bucket(s.Batch*s.SeqK)) * int64(s.Heads) * int64(4*(s.Dim+s.DimV))
	}
	return n
}

// scratchGrowth bounds the spare memory of a growing workspace. A workspace can take most of the device, so that growth
// by half would not fit.
const scratchGrowth = 256 << 20

// grownScratch returns the new size of a workspace of size bytes that must hold need bytes.
func grownScratch(size, need int64) int64 {
	return max(need, min(size*3/2, need+scratchGrowth))
}

// fusedSlack covers rounding and the counters of cuDNN's kernels.
const fusedSlack = 16 << 20

func roundUp64(n, m int64) int64 { return (n + m - 1) / m * m }

// bucket rounds n up to a power of 2, or 3 times a power of 2.
func bucket(n int) int {
	b := 1
	for ; b < n; b *= 2 {
		if 3*b/2 >= n && b > 1 {
			return 3 * b / 2
		}
	}
	return b
}

// The sizes of the device memory that NewOps allocates, in bytes. Plans of builds without CUDA also count it.
const (
	LinearWorkspace = 64 << 20 // for matrix products
	OpsWorkspace    = 32 << 20 // for partial results of the other operations
	// DeltaWorkspace bounds the workspace of a Delta. If a call needs more, it computes some chunks after others, and a
	// backward pass then computes states twice.
	DeltaWorkspace = 2 << 30
)
