//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
)

// Planning has cuDNN build plans; see attention.Planner.
func (f *Fused) Planning() attention.Kernel { return fusedPlanning{f: f} }

// fusedPlanning builds the plans of what it is asked for.
type fusedPlanning struct{ f *Fused }

// Forward begins a pass that builds the plans of one of Fused.
func (p fusedPlanning) Forward(_ View, _ attention.Partial, q View,
	s attention.Softmax) (attention.ForwardPass, error) {
	return planForward{p.f, fusedCall{q: q, scale: s.Scale}}, nil
}

// Backward begins a pass that builds the plans of one of Fused.
func (p fusedPlanning) Backward(_, do, q View, s attention.Saved, x attention.Softmax) (attention.BackwardPass, error) {
	return planBackward{p.f, fusedCall{q: q, do: do, saved: s, scale: x.Scale, backward: true}}, nil
}

type planForward struct {
	f *Fused
	c fusedCall
}

func (p planForward) Block(b attention.Block) error {
	p.c.k, p.c.v = b.K, b.V
	return p.f.planAll(&p.c, b.Tiles)
}

func (planForward) End() error { return nil }

type planBackward struct {
	f *Fused
	c fusedCall
}

func (p planBackward) Block(b attention.GradBlock) error {
	p.c.k, p.c.v, p.c.dk, p.c.dv = b.K, b.V, b.DK, b.DV
	return p.f.planAll(&p.c, b.Tiles)
}

func (planBackward) End() error                { return nil }
func (planBackward) Fold(attention.Fold) error { return nil }

func (f *Fused) planAll(c *fusedCall, tiles []partition.Tile) error {
	for _, g := range f.grouped(c, tiles) {
		if err := f.plans(c, g); err != nil {
			return err
		}
	}
	return nil
}

var _ attention.Planner = (*Fused)(nil)
