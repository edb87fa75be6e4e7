// Package planner decides how attention is spread over ranks, by what that costs.
package planner

import (
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Costs tells what the parts of a pass take on the machine that is planned for, in seconds.
type Costs interface {
	// Call returns the time of one kernel call of attention.
	Call(c Call) float64
	// Exchange returns the time of so many messages, of so many bytes together, on the link from one rank of the
	// job to another, with its start-up.
	Exchange(from, to int, bytes int64, messages int) float64
	// Copy returns the time of a pass over so many bytes of device memory.
	Copy(bytes int64) float64
	// Host returns the host's time to queue so many calls.
	Host(calls int) float64
}

// Call is one kernel call of attention, Backward or not, Deterministic or not, of a Backend in elements of DType: the
// Tiles of one block of keys, for Batch samples of Heads and KVHeads of Dim and DimV elements. First and Last are of its
// pass.
type Call struct {
	Backend                 string
	DType                   tensor.DType
	Backward, Deterministic bool

	Batch, Heads, KVHeads, Dim, DimV int

	Tiles       []partition.Tile
	First, Last bool // of its pass
}
