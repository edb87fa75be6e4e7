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
// KVHeads, Dim] and values of DimV, of which Tiles, in local rows of the two, are visible.
type Call struct {
	Backend string       // of package attention/backends
	DType   tensor.DType // of q, k and v
	// Backward says that the call is of a backward pass, Deterministic that its sums have one order.
	Backward, Deterministic          bool
	Batch, Heads, KVHeads, Dim, DimV int
	Tiles                            []partition.Tile
	First, Last                      bool // as attention.Block has them
}

// Costs says what the parts of a pass take on some machine, in seconds. Answers are pure: equal questions
// get equal answers, on every rank. +Inf or NaN says that nothing is known; a pass then takes +Inf.
type Costs interface {
	// Call returns the seconds of one attention kernel call on the device.
	Call(c Call) float64
	// Exchange returns the seconds in which so many bytes, in so many messages of one exchange, go over
	// the link from rank to rank (global ranks of the job), with its start-up. It is the same for all pairs of ranks of
	// one host, and for all of two.
	Exchange(from, to int, bytes int64, messages int) float64
	// Copy returns the seconds of a pass over device memory that reads and writes so many bytes together.
	Copy(bytes int64) float64
	// Host returns the seconds of host work to queue that many calls.
	Host(calls int) float64
}
