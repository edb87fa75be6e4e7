//go:build cuda

package call

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// hostFlash computes attention with the flash kernels on a host, as gpu.Flash does on a GPU. It implements
// attention.Kernel.
type hostFlash struct {
	*host
	deterministic bool
	shared        int // shared memory of a block, in bytes
}

func (k *hostFlash) shapeFor(t tensor.DType, dim, dimV int, needs func(source.FlashShape) int) source.FlashShape {
	s, found := source.FlashShapeFor(t == tensor.F32, dim, dimV, k.shared, needs)
	if !found {
		k.t.Fatalf("there is no shape for %v, head dims %d and %d", t, dim, dimV)
	}
	return s
}

func (k *hostFlash) backwardNeeds(s source.FlashShape) int {
	if k.deterministic {
		return max(s.BackwardShared(), s.DQShared())
	}
	return s.BackwardShared()
}

// run runs the launches of a block.
func (k *hostFlash) run(launches []Launch) error {
	for _, l := range launches {
		if err := k.launch(l); err != nil {
			return err
		}
	}
	return nil
}

// Forward begins a forward pass.
func (k *hostFlash) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	if err := p.Plain("flash attention forward"); err != nil {
		return nil, err
	}
	each(acc.O, func(x float32, _ [4]int) float32 { return 0 })
	each(acc.LSE, func(x float32, _ [4]int) float32 { return float32(math.Inf(-1)) })
	return &hostForward{k, o, acc, q, p}, nil
}

type hostForward struct {
	k   *hostFlash
	o   View
	acc attention.Partial
	q   View
	p   attention.Softmax
}

func (f *hostForward) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	c := f.call(b)
	c.Shape = f.k.shapeFor(f.q.DType(), f.q.Len(tensor.Dim), b.V.Len(tensor.Dim), source.FlashShape.ForwardShared)
	return f.k.run(c.Forward())
}

// call returns the call of a block.
func (f *hostForward) call(b attention.Block) Flash {
	return Flash{Tensors: Tensors{Q: f.q, K: b.K, V: b.V, O: f.acc.O, LSE: f.acc.LSE}, Softmax: f.p, Tiles: b.Tiles}
}

func (f *hostForward) End() error {
	if f.o != f.acc.O {
		each(f.o, func(_ float32, at [4]int) float32 { return value(f.acc.O, at) })
	}
	return nil
}

// Backward begins a backward pass.
func (k *hostFlash) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	if err := p.Plain("flash attention backward"); err != nil {
		return nil, err
	}
	clear32(dq)
	each(s.Delta, func(_ float32, at [4]int) float32 {
		sum := float32(0)
		for at[3] = range do.Len(tensor.Dim) {
			sum += value(do, at) * value(s.O, at)
		}
		return sum
	})
	return &hostBackward{k, dq, do, q, s, p}, nil
}

type hostBackward struct {
	k         *hostFlash
	dq, do, q View
	s         attention.Saved
	p         attention.Softmax
}

func (f *hostBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	clearFresh(b)
	c := f.call(b)
	c.Shape = f.k.shapeFor(f.q.DType(), f.q.Len(tensor.Dim), b.V.Len(tensor.Dim), f.k.backwardNeeds)
	return f.k.run(c.Backward(f.k.deterministic))
}

// call returns the call of a block.
func (f *hostBackward) call(b attention.GradBlock) Flash {
	return Flash{Softmax: f.p, Tiles: b.Tiles, Tensors: Tensors{Q: f.q, K: b.K, V: b.V, DO: f.do, LSE: f.s.LSE,
		Delta: f.s.Delta, DQ: f.dq, DK: b.DK, DV: b.DV}}
}

// clearFresh sets the gradients of fresh keys to 0.
func clearFresh(b attention.GradBlock) {
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	clear32(fresh.DK)
	clear32(fresh.DV)
}

func (f *hostBackward) End() error { return nil }

func (f *hostBackward) Fold(x attention.Fold) error {
	if err := attention.CheckFold(x); err != nil {
		return err
	}
	dst := x.Dst.Rows(x.Lo, x.Lo+x.Src.DK.Len(tensor.Seq))
	each(dst.DK, func(y float32, at [4]int) float32 { return y + value(x.Src.DK, at) })
	each(dst.DV, func(y float32, at [4]int) float32 { return y + value(x.Src.DV, at) })
	return nil
}

func clear32(v View) { each(v, func(float32, [4]int) float32 { return 0 }) }

// element returns the index of an element of v in its memory.
func element(v View, at [4]int) int64 {
	i := int64(0)
	for a, n := range at {
		i += int64(n) * v.Stride(tensor.Axis(a))
	}
	return i
}

// value returns an element of v.
func value(v View, at [4]int) float32 {
	switch i := element(v, at); v.DType() {
	case tensor.F32:
		return tensor.Data[float32](v)[i]
	case tensor.BF16:
		return half.FromBF16(tensor.Data[uint16](v)[i])
	default:
		return half.FromF16(tensor.Data[uint16](v)[i])
	}
}

// each sets every element of v to f of its value and position.
func each(v View, f func(x float32, at [4]int) float32) {
	n := v.Shape()
	for b := range n[0] {
		for s := range n[1] {
			for h := range n[2] {
				for d := range n[3] {
					at := [4]int{b, s, h, d}
					y := f(value(v, at), at)
					switch i := element(v, at); v.DType() {
					case tensor.F32:
						tensor.Data[float32](v)[i] = y
					case tensor.BF16:
						tensor.Data[uint16](v)[i] = half.ToBF16(y)
					default:
						tensor.Data[uint16](v)[i] = half.ToF16(y)
					}
				}
			}
		}
	}
}

var _ attention.Kernel = (*hostFlash)(nil)
