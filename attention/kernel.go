// Package attention defines attention independently of devices: a Kernel computes it in passes over blocks of keys, and
// Reference is the slow kernel whose results every fast one must match. It is pure: no goroutines, no I/O, no clock, no
// cgo.
//
//	pass, err := kernel.Forward(o, acc, q, attention.Softmax{Scale: scale})
//	err = pass.Block(attention.Block{K: k, V: v, Tiles: tiles, First: true, Last: true})
//	err = pass.End()
package attention

import (
	"math"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Softmax turns a dot product into a score: s = Scale * q.k, and with a soft cap
// c > 0, s = c * tanh(Scale * q.k / c) (Gemma 2, arXiv:2408.00118). Probabilities are
// exp(s - LSE). Scale must be set: +0 is an error, and a scale of zero is math.Copysign(0, -1).
type Softmax struct {
	Scale   float64
	Softcap float64 // 0 turns it off
	Scores  *Scores // nil: nothing is added to scores, and nothing kept of them
}

func (p Softmax) unset() bool { return math.Float64bits(p.Scale) == 0 }

// Partial is the state of a forward pass over some of the keys. O: [batch, seqQ, heads,
// dimV], normalised over the keys seen so far. LSE: [batch, seqQ, heads, 1], the natural log
// of the sum of exp(score). Before any key O is 0 and LSE is -Inf. Both are float32, whatever
// q, k and v are (float64 where those are float64).
type Partial struct{ O, LSE View }

// Saved holds the results of the forward pass over all keys for a backward pass. O: [batch, seqQ, heads,
// dimV], of the type of q or of Partial. LSE: Partial's. Delta: [batch, seqQ, heads, 1], of the
// type of LSE, is room for rowsum(do * o), the D of FlashAttention-2 (arXiv:2307.08691),
// algorithm 2. The pass sets it; a kernel may leave it unset.
type Saved struct{ O, LSE, Delta View }

// Grads are the gradients of q, k and v, of the type of Partial. DQ: like q, DK: like k, DV:
// like v.
type Grads struct{ DQ, DK, DV View }

// KeyGrads are rows of the gradients of k and v, of the type of Partial. DK: [batch, rows, kvHeads,
// dim]. DV: [batch, rows, kvHeads, dimV].
type KeyGrads struct{ DK, DV View }

// Kernel computes attention of local queries on one device, in passes over blocks of keys. q, do: [batch, seqQ, heads,
// dim]; k: [batch, seqK, kvHeads, dim]; v: [batch, seqK, kvHeads, dimV]; heads is a multiple of kvHeads, and query head
// h reads KV head h / (heads/kvHeads). Views may have any strides, except that the last axis has stride 1.
//
// NaN and infinities propagate, so that a broken input never looks like a good one: if the definition makes an output
// element NaN or infinite, so does the kernel, not always the same of the two. The definition skips hidden pairs. In a
// tile with a visible pair of a broken row of q, k, v or do, a kernel may also break rows that are hidden from it. Rows
// that see one key each may share a tile, also across documents. A kernel must not break rows of other tiles, except
// that kernels of GPUs, which multiply blocks of up to 192 queries or keys across tiles, may break further rows of the
// same block.
//
// A kernel has one pass at a time: a new pass abandons the one before, such as after an error. All calls queue work in
// order on the kernel's stream and do not wait for the device. One goroutine makes them.
type Kernel interface {
	// Forward begins a pass that sets o, of the type of q or of acc, to the attention of q over all blocks to come, and
	// acc.LSE to its LSE. acc is the pass's working memory; acc.O may be o, and is undefined in the end otherwise. A
	// row that sees no key gets O = 0 and LSE = -Inf, never NaN. Without a bias no other row has an LSE of -Inf: if all
	// scores of a row's keys in a block are -Inf, O and LSE may become NaN, and they must if all scores of the pass
	// are.
	Forward(o View, acc Partial, q View, p Softmax) (ForwardPass, error)
	// Backward begins a pass that sets dq, and the gradients of each block, given do, the
	// gradient of s.O. Rows with LSE = -Inf contribute nothing.
	Backward(dq, do, q View, s Saved, p Softmax) (BackwardPass, error)
}

// Block holds keys and values that a pass goes over, and its place in the pass.
//
// Tiles say which (query, key) pairs are visible, in local indices; no pair is in two tiles
// of one block. All tiles of a hop come in one block, so that a GPU needs one launch. They may be
// reused when the call returns.
type Block struct {
	K, V  View
	Tiles []partition.Tile
	// Columns is the position in the whole sequence of each key; nil where nothing is added to scores.
	Columns []int
	// Gates list rows of K and V that may still be in transfer when the call is queued: the kernel reads them after
	// their gates open. Only a Waiter gets any. All other rows have arrived.
	Gates []Gate
	// First means that no earlier block of the pass had tiles, so that every row has its initial state; Last, that no
	// later one has.
	First, Last bool
}

// Gate is rows of keys and values that are there once it is open.
type Gate struct {
	Rows partition.Range
	tensor.Gate
}

// Waiter is a Kernel that waits for the Gates of blocks, so that it can begin with the rows that are there.
type Waiter interface {
	Kernel
	// WaitsForKeys reports whether it does so within a call, and not before all of it.
	WaitsForKeys() bool
}

// ForwardPass folds blocks of keys into one result.
type ForwardPass interface {
	// Block folds a block in, as if its keys had been there from the start. A kernel may hold
	// results back to fold several at once.
	Block(b Block) error
	// End completes o and LSE. The pass is over.
	End() error
}

// GradBlock is a Block of a backward pass, with where its gradients go.
type GradBlock struct {
	Block
	// KeyGrads get the block's gradients added. They may have more rows than K and V.
	KeyGrads
	// Fresh is rows of KeyGrads that hold nothing yet: they are set rather than added to, and
	// rows that no tile reaches become 0.
	Fresh partition.Range
	// FoldNext says that the next call of the pass, except End, is a Fold into these KeyGrads,
	// and that nothing reads them before it, so they need not be complete in between.
	FoldNext bool
}

// Fold adds Src to rows Lo, Lo+1, ... of Dst, which begins at the row that its block's KeyGrads
// began at.
type Fold struct {
	Dst KeyGrads
	Lo  int
	Src KeyGrads
}

// BackwardPass adds up gradients over blocks of keys.
type BackwardPass interface {
	// Block adds the gradients of a block. Its KeyGrads are complete when the call is done,
	// unless a fold follows.
	Block(b GradBlock) error
	// End completes dq. No block comes after it; folds may.
	End() error
	// Fold adds gradients of keys that came from elsewhere.
	Fold(f Fold) error
}

// Idle is a Kernel that computes nothing, for loops that only count resources.
type Idle struct{}

// Forward begins a pass that does nothing.
func (Idle) Forward(_ View, _ Partial, _ View, _ Softmax) (ForwardPass, error) {
	return idleForward{}, nil
}

// Backward begins a pass that does nothing.
func (Idle) Backward(_, _, _ View, _ Saved, _ Softmax) (BackwardPass, error) {
	return idleBackward{}, nil
}

type idleForward struct{}

func (idleForward) Block(Block) error { return nil }
func (idleForward) End() error        { return nil }

type idleBackward struct{}

func (idleBackward) Block(GradBlock) error { return nil }
func (idleBackward) End() error            { return nil }
func (idleBackward) Fold(Fold) error       { return nil }

// Planner is a Kernel that can prepare its slow first calls while the host waits for something
// else.
type Planner interface {
	Kernel
	// Planning returns a Kernel that prepares its calls and computes nothing: its views need no memory. One goroutine
	// uses it, while the Planner itself is not in use.
	Planning() Kernel
}
