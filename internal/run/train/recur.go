package train

import (
	"fmt"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
)

// A recur implements model.Recurrence over a context group: it exchanges the states and rows of the present batch.
type recur struct {
	scan   *scan.Scan
	before int // rows before a segment that its convolution reads

	own    []partition.Range // segments of this rank
	states *scan.States
	halo   *scan.Halo
}

// newRecur returns the exchanges of a model's recurrent layers; nil if it has none.
func newRecur(r *ring.Ring, k delta.Kernel, ops model.Ops, cfg *hf.Config) *recur {
	if !cfg.Recurs() {
		return nil
	}
	return &recur{before: cfg.LinearConvKernelDim - 1,
		scan: &scan.Scan{Kernel: k, Comm: r.Comm, Mover: ops, Stream: r.Stream, Arena: r.Arena}}
}

// begin sets the segments of a batch.
func (r *recur) begin(s partition.Shape, rank int) error {
	x, err := partition.NewSegments(s)
	if err != nil {
		return fmt.Errorf("a model with linear attention: %w", err)
	}
	r.own = make([]partition.Range, 0, len(x.Own[rank]))
	for _, i := range x.Own[rank] {
		r.own = append(r.own, x.All[i].Rows)
	}
	r.states, r.halo = scan.NewStates(x, rank), scan.NewHalo(x, rank, r.before)
	return nil
}

// Segments lists the segments of this rank's rows.
func (r *recur) Segments() []partition.Range { return r.own }

// States counts the segments that follow another one of their document.
func (r *recur) States() int { return len(r.states.Forward.States) }

// Halo sets before to the rows before each segment.
func (r *recur) Halo(_ int, before, x View) error { return r.scan.Halo(before, x, r.halo) }

// HaloBackward adds the gradients of the rows before each segment to dx.
func (r *recur) HaloBackward(_ int, dx, dbefore View) error {
	return r.scan.HaloBackward(dx, dbefore, r.halo)
}

// Recur exchanges states, and sets a.O.
func (r *recur) Recur(_ int, a delta.Args, beside func()) error {
	return r.scan.Forward(a, r.states, beside)
}

// RecurBackward exchanges the gradients of states, and sets those of the inputs.
func (r *recur) RecurBackward(_ int, a delta.Args, beside func()) error {
	return r.scan.Backward(a, r.states, beside)
}

var _ model.Recurrence = (*attend)(nil)
