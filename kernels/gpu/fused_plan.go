// Package gpu computes attention and the operations of a model on NVIDIA GPUs: by our own CUDA
// kernels, whose source is in kernels/gpu/internal/source, by cuDNN and by cuBLASLt. What a plan needs to know
// builds everywhere; the rest is under the build tag cuda.
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
	// Deterministic is FusedOptions.Deterministic where cuDNN keeps the matrix of all pairs of a
	// call for it, as backends.KeepsMatrix says.
	Deterministic bool
}

// A packing is how packed problems are made.
type packing struct {
	least  int // least length of the longest sequence: with 1, cuDNN gives a wrong LSE
	widest int // head dim up to which gradients are packed; beyond, they lack all keys after the 128th
	// multiple divides head dims if gradients are packed. With others cudnn-frontend takes them as loose bounds:
	// gigabytes with many documents.
	multiple int
	loose    bool // workspace for as many sequences of the longest length, not for all rows together
}

var defaultPacking = packing{least: 128, widest: 192, multiple: 16}

func (p packing) grads(dim, dimV int) bool {
	return max(dim, dimV) <= p.widest && dim%p.multiple == 0 && dimV%p.multiple == 0
}

// maxHeld is how many partial results Fused keeps for one pass over the accumulator. One may count as several
// parts, of the rows that it has.
const maxHeld = 4

// FusedWorkspace returns the device memory that Fused takes for a shape, in bytes: partial results
// that wait to be merged, and what a backward call of cuDNN needs. A forward call of cuDNN needs
// next to nothing.
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

// backwardWorkspace bounds what a backward call asks cuDNN for, as internal/model/backends does: in
// cudnn-frontend 1.23.0 (node/scaled_dot_product_flash_attention.h) the float32 sums of do*o and float32
// dQ, and for packed documents with grouped heads dK and dV of every query head.
//
// A deterministic call has the matrix dP beside them, in 16 bits: cuDNN 9.19 asked for these to the byte at 8K tokens
// and head dims of 64, 128 and 256. Its blocks count as 128 long, the longest side of a tile.
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

// scratchGrowth bounds the extra memory of a growing workspace, which can be most of the memory, so that half as much
// again does not fit.
const scratchGrowth = 256 << 20

// grownScratch returns how large scratch memory of size bytes is made for need bytes.
func grownScratch(size, need int64) int64 {
	return max(need, min(size*3/2, need+scratchGrowth))
}

// fusedSlack covers rounding, and the counters of cuDNN's kernels.
const fusedSlack = 16 << 20

func roundUp64(n, m int64) int64 { return (n + m - 1) / m * m }

// bucket returns the next number from n on that is a power of 2, or 3 times one.
func bucket(n int) int {
	b := 1
	for ; b < n; b *= 2 {
		if 3*b/2 >= n && b > 1 {
			return 3 * b / 2
		}
	}
	return b
}

// The device memory that Ops holds, in bytes, each in one allocation made with it. Plans of
// builds without CUDA count it too.
const (
	LinearWorkspace = 64 << 20 // for matrix products
	OpsWorkspace    = 32 << 20 // for partial results of the other operations
)
