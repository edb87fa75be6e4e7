// Package planner predicts how long attention over ranks takes, from the schedules of package ring and a table of
// costs, and chooses a strategy by it: the algorithm, the layout, the backend, and the groups of ranks. It computes
// only with numbers that all ranks have, so that all make the same choice:
//
//	ranked, err := planner.Choose(workload, planner.Strategies(workload, requested, backends), costs)
//	fastest := ranked[0].Strategy
package planner

//go:generate go test -run TestSimulation -update .

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A LayerGroup describes the layers of a model with one mixer.
type LayerGroup struct {
	hf.Mixer
	Count int // of layers
}

// A Workload is the attention of all layers of a model over the ranks of a context group.
type Workload struct {
	DType  tensor.DType // of q, k and v
	Batch  int          // samples in one pass
	Tokens int          // of a sequence, over all ranks
	Docs   []int        // the lengths of its documents; none: one sequence
	Layers []LayerGroup // each mixer once
	Ranks  int          // of the context group
	Topology
	// Recompute says that the backward pass runs the forward pass again.
	Recompute bool
}

// Timed is a strategy and its predicted seconds of attention, forward and backward, in all layers of a Workload.
type Timed struct {
	ring.Strategy
	Seconds float64 `json:"seconds"`
}

// Margin is the share by which a strategy must be faster than an earlier one in the list. Predictions are not accurate
// enough for smaller differences.
const Margin = 0.02

// SharedMargin is the Margin if ranks share cores: other processes change their times.
const SharedMargin = 0.04

// documentMargin replaces Margin for packed documents. Tables have calls of one mask, and predictions for documents
// were 8 % too low to 9 % too high (docs/benchmarks/h200/regret.json).
const documentMargin = 0.04

// Margin returns the margin for ranks at p.
func (p Topology) Margin() float64 {
	if p.Shared {
		return SharedMargin
	}
	return Margin
}

// margin returns the margin for strategies of the workload.
func (c *Workload) margin() float64 {
	if len(c.Docs) > 0 {
		return documentMargin // also on shared cores
	}
	return c.Topology.Margin()
}

// Choose ranks strategies by the seconds of all layers: first the first of the list that is within the margin of the
// fastest, then the others by their times. It omits strategies without known costs. It is a pure function, so that
// ranks with the same costs agree.
func Choose(c Workload, list []ring.Strategy, costs Costs) ([]Timed, error) {
	ranked := make([]Timed, len(list))
	for i, s := range list {
		ranked[i].Strategy = s
	}
	common, order := newCommon(costs), groupBackends(list)
	for _, layers := range c.Layers {
		sim := newSimulator(c, layers, common)
		for _, i := range order {
			t, err := sim.time(ranked[i].Strategy)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", ranked[i].Strategy, err)
			}
			ranked[i].Seconds += float64(layers.Count) * t
		}
	}
	ranked = slices.DeleteFunc(ranked, func(t Timed) bool { return math.IsInf(t.Seconds, 1) })
	First(ranked, c.margin(), func(t Timed) float64 { return t.Seconds })
	return ranked, nil
}

// groupBackends lists the indexes of strategies so that strategies that differ only in the backend are adjacent: they
// share recordings.
func groupBackends(list []ring.Strategy) (order []int) {
	for i, first := range list {
		if slices.Contains(order, i) {
			continue
		}
		for j, s := range list[i:] {
			if s.Backend = first.Backend; s == first {
				order = append(order, i+j)
			}
		}
	}
	return order
}

// First moves the first element within the margin of the least to the front, and sorts the others.
func First[T any](list []T, margin float64, seconds func(T) float64) {
	if len(list) == 0 {
		return
	}
	order := func(a, b T) int { return cmp.Compare(seconds(a), seconds(b)) }
	least := seconds(slices.MinFunc(list, order))
	i := slices.IndexFunc(list, func(x T) bool { return seconds(x)*(1-margin) <= least })
	first := list[i]
	copy(list[1:], list[:i])
	list[0] = first
	slices.SortStableFunc(list[1:], order)
}

// Call is one call of an attention kernel: q of [Batch, rows, Heads, Dim] against keys of [Batch, rows,
// KVHeads, Dim] and values of DimV. Tiles are the visible pairs, in local rows of the two.
type Call struct {
	Backend                          string       // of package internal/model/backends
	DType                            tensor.DType // of q, k and v
	Backward                         bool
	Batch, Heads, KVHeads, Dim, DimV int
	Tiles                            []partition.Tile
	First, Last                      bool // as attention.Block has them
}

// Costs returns the seconds of the parts of a pass on some machine. Its methods are pure: equal arguments have equal
// results, on every rank. +Inf or NaN means unknown; a pass then takes +Inf.
type Costs interface {
	// Call returns the seconds of one attention kernel call on the device.
	Call(c Call) float64
	// Exchange returns the seconds in which the messages of one exchange go from one rank to another, of the same host
	// or across hosts, with their start-up.
	Exchange(across bool, bytes int64, messages int) float64
	// Copy returns the seconds of a pass over device memory, by the sum of the bytes that it reads and writes.
	Copy(bytes int64) float64
	// Host returns the seconds of host work to queue that many calls.
	Host(calls int) float64
}
