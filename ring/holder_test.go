package ring_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A holder wraps the CPU's kernel. It keeps a block's gradients in memory of its own until the fold, as FoldNext
// allows, and checks the First and Last of blocks.
type holder struct {
	attention.Kernel
	t *testing.T
}

func (h holder) Forward(o tensor.View, acc attention.Partial, q tensor.View,
	p attention.Softmax) (attention.ForwardPass, error) {
	pass, err := h.Kernel.Forward(o, acc, q, p)
	return &holderForward{ForwardPass: pass, place: place{t: h.t}}, err
}

func (h holder) Backward(dq, do, q tensor.View, s attention.Saved, p attention.Softmax) (attention.BackwardPass,
	error) {
	pass, err := h.Kernel.Backward(dq, do, q, s, p)
	return &holderBackward{BackwardPass: pass, place: place{t: h.t}}, err
}

// place checks First and Last of the blocks of a pass.
type place struct {
	t          *testing.T
	some, last bool
}

func (p *place) block(b attention.Block) {
	if len(b.Tiles) == 0 {
		return
	}
	if b.First == p.some || p.last {
		p.t.Errorf("a block is first: %t, after others: %t, after the last: %t", b.First, p.some, p.last)
	}
	p.some, p.last = true, b.Last
}

func (p *place) end() {
	if p.some && !p.last {
		p.t.Error("a pass ends, and no block was the last")
	}
}

type holderForward struct {
	attention.ForwardPass
	place
}

func (h *holderForward) Block(b attention.Block) error {
	h.block(b)
	return h.ForwardPass.Block(b)
}

func (h *holderForward) End() error {
	h.end()
	return h.ForwardPass.End()
}

type holderBackward struct {
	attention.BackwardPass
	place
	held *attention.GradBlock // the request, without tiles
	own  attention.KeyGrads   // the gradients that belong into it
}

func (h *holderBackward) Block(b attention.GradBlock) error {
	if h.held != nil {
		h.t.Error("a block, with gradients held for a fold")
	}
	h.block(b.Block)
	if !b.FoldNext {
		return h.BackwardPass.Block(b)
	}
	held, n := b, b.DK.Len(tensor.Seq)
	held.Tiles = nil
	h.held, h.own = &held, attention.KeyGrads{DK: like(b.DK, n, b.DK.Len(2), b.DK.Len(3)),
		DV: like(b.DV, n, b.DV.Len(2), b.DV.Len(3))}
	b.KeyGrads, b.Fresh = h.own, partition.Range{Hi: n}
	return h.BackwardPass.Block(b)
}

func (h *holderBackward) End() error {
	h.end()
	return h.BackwardPass.End()
}

func (h *holderBackward) Fold(f attention.Fold) error {
	if b := h.held; b != nil {
		h.held = nil
		if err := h.BackwardPass.Block(*b); err != nil { // sets fresh rows to 0
			return err
		}
		if err := h.BackwardPass.Fold(attention.Fold{Dst: b.KeyGrads, Src: h.own}); err != nil {
			return err
		}
	}
	return h.BackwardPass.Fold(f)
}

// A kernel that uses FoldNext returns the same gradients.
func TestRingTellsAKernelWhatComesNext(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	eachStrategy(t, func(m maskCase, shape partition.Shape, algorithm string) {
		p := newProblem(rng, tensor.F64, 2, shape, [2]int{2, 1}, 8, 6)
		what := fmt.Sprintf("%s, %s, %s, %d ranks", m.name, algorithm, shape.Layout.Name(), shape.Size)
		folding := func(s *tensor.HostStream) attention.Kernel { return holder{cpu.New(s), t} }
		compare(t, what, run(t, p, algorithm, folding), run(t, p, algorithm, onCPU), 1e-13)
	})
}
