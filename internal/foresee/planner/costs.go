// Package planner predicts how long attention over ranks takes, from the schedules of package ring and a
// table of costs, and chooses by it: the algorithm, the layout, the backend, and how ranks are grouped. It
// is arithmetic on numbers that all ranks have, so they agree without a word.
package planner

//go:generate go test -run TestSimulation -update .

import (
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Call is one call of an attention kernel: q of [Batch, rows, Heads, Dim] against keys of [Batch, rows,
// KVHeads, Dim] and values of DimV. Tiles are the visible pairs, in local rows of the two.
type Call struct {
	Backend string       // of package internal/model/backends
	DType   tensor.DType // of q, k and v
	// Backward says that the call is of a backward pass, Deterministic that its sums have one order.
	Backward, Deterministic          bool
	Batch, Heads, KVHeads, Dim, DimV int
	Tiles                            []partition.Tile
	First, Last                      bool // as attention.Block has them
}

// Costs returns the seconds of the parts of a pass on some machine. Its methods are pure: equal arguments have equal
// results, on every rank. +Inf or NaN means unknown; a pass then takes +Inf.
type Costs interface {
	// Call returns the seconds of one attention kernel call on the device.
	Call(c Call) float64
	// Exchange returns the seconds in which the messages of one exchange go from one rank to another, of the same host or
	// across hosts, with their start-up.
	Exchange(across bool, bytes int64, messages int) float64
	// Copy returns the seconds of a pass over device memory, by the sum of the bytes that it reads and writes.
	Copy(bytes int64) float64
	// Host returns the seconds of host work to queue that many calls.
	Host(calls int) float64
}
