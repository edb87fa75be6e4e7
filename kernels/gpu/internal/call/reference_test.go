//go:build cuda

package call

import (
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// hostReference computes attention with the reference kernels on a host, as gpu.Reference does on a GPU. It implements
// attention.Kernel. hostFlash implements all except the kernels.
type hostReference struct{ flash hostFlash }

func (k *hostReference) run(launches []ReferenceLaunch) error {
	h := k.flash.host
	for i := range launches {
		l := &launches[i]
		lists, err := h.words(l.Lists)
		if err != nil {
			return err
		}
		p := &l.Params
		h.move(&p.Q.At, &p.K.At, &p.V.At, &p.Dout.At, &p.O.At, &p.LSE.At, &p.Delta.At, &p.DQ.At, &p.DK.At, &p.DV.At,
			&p.Bias.At, &p.Dbias.At, &p.Largest.At, &p.Slopes)
		l.At(lists)
		if err := h.start(l.Program, l.Kernel, l.Grid, l.Block, 0, argumentsOf(p)); err != nil {
			return err
		}
	}
	return nil
}

// plain returns p without Scores, which hostFlash rejects.
func plain(p attention.Softmax) attention.Softmax {
	p.Scores = nil
	return p
}

// Forward begins a forward pass.
func (k *hostReference) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass,
	error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	pass, err := k.flash.Forward(o, acc, q, plain(p))
	if err != nil {
		return nil, err
	}
	if p.Scores != nil && !p.Scores.Max.IsZero() {
		each(p.Scores.Max, func(float32, [4]int) float32 { return float32(math.Inf(-1)) })
	}
	return &referenceForward{pass.(*hostForward), k, p}, nil
}

type referenceForward struct {
	*hostForward
	k *hostReference
	p attention.Softmax
}

func (f *referenceForward) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	c := Reference{Tensors: f.call(b).Tensors, Softmax: f.p, Tiles: b.Tiles, Columns: b.Columns}
	program, err := c.Program("forward")
	if err != nil {
		return err
	}
	return f.k.run(c.Forward(program))
}

// Backward begins a backward pass.
func (k *hostReference) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass,
	error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	pass, err := k.flash.Backward(dq, do, q, s, plain(p))
	if err != nil {
		return nil, err
	}
	if p.Scores != nil && !p.Scores.DBias.IsZero() {
		clear32(p.Scores.DBias)
	}
	return &referenceBackward{pass.(*hostBackward), k, p}, nil
}

type referenceBackward struct {
	*hostBackward
	k *hostReference
	p attention.Softmax
}

func (f *referenceBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	clearFresh(b)
	c := Reference{Tensors: f.call(b).Tensors, Softmax: f.p, Tiles: b.Tiles, Columns: b.Columns}
	program, err := c.Program("backward")
	if err != nil {
		return err
	}
	return f.k.run(c.Backward(program))
}

var _ attention.Kernel = (*hostReference)(nil)

// TestReferenceOnHost runs the small cases of the suite on the reference kernels, and the cases with Scores at lengths
// that the emulation can run.
func TestReferenceOnHost(t *testing.T) {
	h := newHost(t)
	k := &hostReference{hostFlash{h, false, large}}
	rig := k.flash.rig()
	rig.Kernel = k
	for _, c := range attentiontest.Cases() {
		switch {
		case c.Scores != nil:
			c.SeqQ, c.SeqK = 9, 14
			if len(c.Tiles) > 0 {
				c.Tiles = tiles{tile(2, 9, 1, 14, partition.Band{Lo: -partition.Unbounded, Hi: 3})}
			}
		case c.SeqQ*c.SeqK > 35:
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			h.t = t
			for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
				attentiontest.Check(t, rig, c, dtype)
			}
		})
	}
}
