package dnn

import (
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// Tensor names a tensor of a problem.
type Tensor int

// The tensors. Q, DQ: [batch, heads, SeqQ, Dim]; K, DK: [batch, KVHeads, SeqK, Dim]; V, DV: the
// same with DimV; O, DO: [batch, heads, SeqQ, DimV]; Stats: [batch, heads, SeqQ], the natural
// log of the sum of exp(score), float32. A forward pass reads Q, K, V and writes O and Stats; a
// backward pass reads those and DO and writes DQ, DK, DV.
const (
	Q Tensor = iota
	K
	V
	O
	Stats
	DO
	DQ
	DK
	DV
	Tensors // how many there are
)

// Pointers are the device addresses of an execution: first those of the tensors. A ragged
// problem also has the offsets of each tensor, [batch + 1] int64, the element that a sequence
// begins at, and two vectors of lengths, [batch] int32.
type Pointers [2*Tensors + 2]uint64

// Offsets returns where the address of the offsets of t stands.
func Offsets(t Tensor) Tensor { return Tensors + t }

// Where the addresses of the lengths stand.
const (
	LensQ = 2*Tensors + iota
	LensK
)

// Mask is what a query sees: key j where -Left < j-i-shift <= Right; shift is 0, or with
// BottomRight the keys of the sequence less its queries. A negative bound is none. Left is above 0
// where it is a bound.
type Mask struct {
	Left, Right int
	BottomRight bool
}

// Desc is a problem. Descs are compared to find the plan of one.
type Desc struct {
	Backward, Deterministic bool
	DType                   tensor.DType // bfloat16 or float16
	Batch, Heads, KVHeads   int
	SeqQ, SeqK              int // the longest, where ragged
	Dim, DimV               int
	Strides                 [Tensors][3]int64 // of batch, seq and heads, in elements
	Mask                    Mask
	Scale                   float64
	// TotalQ and TotalK are the rows that ragged sequences lie in; 0: every sequence of the
	// batch has SeqQ queries and SeqK keys.
	TotalQ, TotalK int
	// Loose has the workspace hold Batch sequences of SeqQ and SeqK rows, not TotalQ and TotalK.
	Loose bool
	// Unified asks for the one node that newer versions have for a forward pass.
	Unified bool
}

func (d Desc) String() string {
	pass := "forward"
	if d.Backward {
		pass = "backward"
	}
	if d.Deterministic {
		pass = "deterministic " + pass
	}
	mask := "full"
	if d.Mask.Left >= 0 || d.Mask.Right >= 0 {
		corner := "top left"
		if d.Mask.BottomRight {
			corner = "bottom right"
		}
		mask = fmt.Sprintf("%s band (%d, %d)", corner, d.Mask.Left, d.Mask.Right)
	}
	if d.TotalQ > 0 {
		mask += fmt.Sprintf(", packed in %d and %d rows", d.TotalQ, d.TotalK)
	}
	return fmt.Sprintf("%s, %v, batch %d, heads %d:%d, %d queries by %d keys, head dims %d and %d, %s",
		pass, d.DType, d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.DimV, mask)
}
