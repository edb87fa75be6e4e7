// Package attention holds what attention is, apart from where it runs: the parameters of
// a call, the interface that every kernel implements, and the slow reference that defines
// what every fast one must compute. It is pure: no goroutines, no I/O, no clock, no cgo.
package attention

import (
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// View is a strided window onto device memory; see internal/tensor.
type View = tensor.View

// Softmax is what turns a dot product into a score: s = Scale * q.k, and with a soft cap
// c > 0, s = c * tanh(Scale * q.k / c) (Gemma 2, arXiv:2408.00118). Probabilities are
// exp(s - LSE).
type Softmax struct {
	Scale   float64
	Softcap float64 // 0 turns it off
}

// Partial is the state of a forward pass over some of the keys. O: [batch, seqQ, heads,
// dimV], normalised over the keys seen so far. LSE: [batch, seqQ, heads, 1], the natural log
// of the sum of exp(score). Before any key O is 0 and LSE is -Inf. Both are float32, whatever
// q, k and v are (float64 where those are float64).
type Partial struct{ O, LSE View }

// Saved is what a backward pass needs of the whole forward pass. O: [batch, seqQ, heads, dimV],
// of the type of q or of Partial. LSE: Partial's. Delta: [batch, seqQ, heads, 1], of the
// type of LSE; see Kernel.Delta.
type Saved struct{ O, LSE, Delta View }

// Grads are the accumulators of a backward pass, of the type of Partial. DQ: like q, DK:
// like k, DV: like v.
type Grads struct{ DQ, DK, DV View }

// Kernel computes attention of local queries against one block of keys, on one device. q,
// do: [batch, seqQ, heads, dim]; k: [batch, seqK, kvHeads, dim]; v: [batch, seqK, kvHeads,
// dimV]; heads is a multiple of kvHeads, and query head h reads KV head h / (heads/kvHeads).
// Views may be strided in any way whose last axis has stride 1.
//
// Tiles say which (query, key) pairs are visible, in local indices; no pair is in two tiles
// of one call, and rows in no tile are left alone. All tiles of a hop come in one call, so
// that a GPU needs one launch. Calls are queued in order on the kernel's stream and do not
// wait for the device; the tiles may be reused when the call returns.
type Kernel interface {
	// Forward folds the block into acc, as if its keys had been there from the start. A
	// row with no visible key leaves acc unchanged: LSE = -Inf and O = 0 in the end, never
	// NaN.
	Forward(acc Partial, q, k, v View, tiles []partition.Tile, p Softmax) error
	// Finish ends the forward pass into acc: o, of the type of q or of acc, is set to O and
	// acc.LSE is complete. Before it, a kernel may hold results of calls back, to fold several
	// at once; after it acc.O is undefined, unless o is acc.O.
	Finish(o View, acc Partial) error
	// Delta sets delta [batch, seqQ, heads, 1] to rowsum(do * o), the D of FlashAttention-2
	// (arXiv:2307.08691), algorithm 2. A kernel whose Backward does not read it may leave it.
	Delta(delta, do, o View) error
	// Backward adds the gradients of the block to acc. Rows with LSE = -Inf contribute nothing.
	// DK and DV are complete when the call is done; DQ after FinishGrads.
	Backward(acc Grads, do, q, k, v View, s Saved, tiles []partition.Tile, p Softmax) error
	// FinishGrads ends the backward pass into acc: DQ is complete.
	FinishGrads(acc Grads) error
	// Reset prepares an accumulator for the first Forward: O = 0, LSE = -Inf.
	Reset(acc Partial) error
	// ResetGrads prepares accumulators for the first Backward: 0. A zero View among them is
	// left out.
	ResetGrads(acc Grads) error
	// Add adds src to dst, element by element, both float accumulators of one shape.
	Add(dst, src View) error
}

// Folder is a Kernel that can save passes over memory when it knows what comes next. What it is
// told here changes no result.
type Folder interface {
	Kernel
	// Into says that Finish will write to o what was just reset, and that nobody else reads or
	// writes o until then.
	Into(o View)
	// Hold says that AddGrads to rows of acc.DK and acc.DV is the next call behind the next Backward,
	// and that nobody reads or writes them before, so that they need not be complete in between.
	Hold(acc Grads)
	// AddGrads is Add for DK and DV at once, and completes what was held of them.
	AddGrads(dst, src Grads) error
}
