//go:build cuda

package kernels

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/partition"
)

// DeviceReference is attention as it is defined, on a GPU: float32, bfloat16 and float16
// inputs, float64 arithmetic, a warp a row. It is what other kernels are tested against, and
// what computes attention in float32. Its results are the same bits in every run. It implements
// attention.Kernel. One goroutine calls it.
type DeviceReference struct{ deviceAttention }

// NewDeviceReference computes on stream.
func NewDeviceReference(stream *cuda.Stream, loader *Loader) (*DeviceReference, error) {
	d, err := newDeviceAttention(stream, loader)
	return &DeviceReference{d}, err
}

// Forward folds the attention of q over one block of keys into acc; see attention.Kernel.
func (r *DeviceReference) Forward(acc attention.Partial, q, k, v View, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckForward(acc, q, k, v, tiles, p); err != nil {
		return err
	}
	c := flashCall{q: q, k: k, v: v, o: acc.O, lse: acc.LSE, p: p}
	program, err := r.usable("reference attention forward", &c, acc.O, acc.LSE)
	if err != nil || len(tiles) == 0 {
		return err
	}
	words := bareTiles(tiles)
	r.stream.Do("attention forward", func() error {
		return r.call(&c, words, program, "reference_forward", q)
	})
	return nil
}

// Backward adds the gradients of one block of keys to acc; see attention.Kernel.
func (r *DeviceReference) Backward(acc attention.Grads, do, q, k, v View, s attention.Saved, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckBackward(acc, do, q, k, v, s, tiles, p); err != nil {
		return err
	}
	if do.DType() != q.DType() {
		return fmt.Errorf("reference attention backward: do is %v, q %v; they must be of one type", do.DType(), q.DType())
	}
	c := flashCall{q: q, k: k, v: v, do: do, lse: s.LSE, delta: s.Delta, dq: acc.DQ, dk: acc.DK, dv: acc.DV, p: p}
	program, err := r.usable("reference attention backward", &c, do, s.LSE, s.Delta, acc.DQ, acc.DK, acc.DV)
	if err != nil || len(tiles) == 0 {
		return err
	}
	words := bareTiles(tiles)
	r.stream.Do("attention backward", func() error {
		if err := r.call(&c, words, program, "reference_queries", q); err != nil {
			return err
		}
		return r.call(&c, words, program, "reference_keys", k)
	})
	return nil
}

// usable is the program for the call, or what is wrong with its inputs beyond what attention
// checks.
func (r *DeviceReference) usable(what string, c *flashCall, others ...View) (program string, err error) {
	if c.q.DType() == tensor.F64 {
		return "", fmt.Errorf("%s in float64: a GPU computes in float32 and 16-bit floats; use the CPU", what)
	}
	widest := max(c.q.Len(tensor.Dim), c.v.Len(tensor.Dim))
	i := slices.IndexFunc(source.ReferenceSlots, func(n int) bool { return widest <= 32*n })
	if i < 0 {
		return "", fmt.Errorf("%s with a head dim of %d: up to %d are compiled", what, widest, 32*source.ReferenceSlots[len(source.ReferenceSlots)-1])
	}
	return source.Reference(source.ReferenceSlots[i]).Name, r.onDevice(what, append([]View{c.q, c.k, c.v}, others...)...)
}

// call launches a kernel that has a warp for each row and head of rows.
func (r *DeviceReference) call(c *flashCall, tiles []int32, program, name string, rows View) error {
	if rows.Size() == 0 {
		return nil
	}
	list, err := r.upload(tiles, bareTileWords)
	if err != nil {
		return err
	}
	a := &cuda.Args{}
	for _, v := range []View{c.q, c.k, c.v, c.do, c.o, c.lse, c.delta, c.dq, c.dk, c.dv} {
		address(a, cuda.Addr(v), stridesOf(v))
	}
	a.Addr(list).Int(len(tiles) / bareTileWords).Int(c.q.Len(tensor.Seq)).Int(c.k.Len(tensor.Seq)).Int(c.q.Len(tensor.Heads)).Int(c.k.Len(tensor.Heads))
	a.Int(c.q.Len(tensor.Dim)).Int(c.v.Len(tensor.Dim)).Int(0).Double(c.p.Scale).Double(c.p.Softcap)
	const warps = 4
	grid := cuda.Dim{X: ceilDiv(rows.Len(tensor.Seq), warps), Y: rows.Len(tensor.Heads), Z: rows.Len(tensor.Batch)}
	return r.launch(program, name+"_"+typeNames[c.q.DType()], cuda.Launch{Grid: grid, Block: cuda.Dim{X: 32, Y: warps}}, a)
}

const bareTileWords = 6

// bareTiles are the tiles as reference.cu has them: query range, key range, band.
func bareTiles(tiles []partition.Tile) []int32 {
	words := make([]int32, 0, bareTileWords*len(tiles))
	for _, t := range tiles {
		words = append(words, int32(t.Q.Lo), int32(t.Q.Hi), int32(t.K.Lo), int32(t.K.Hi), bound(t.Band.Lo), bound(t.Band.Hi))
	}
	return words
}

var _ attention.Kernel = (*DeviceReference)(nil)
