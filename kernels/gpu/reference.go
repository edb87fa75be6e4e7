//go:build cuda

package gpu

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/kernels/internal/call"
	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Reference is attention as it is defined, on a GPU: float32, bfloat16 and float16
// inputs, float64 arithmetic, a warp a row. It is what other kernels are tested against, and
// what computes attention in float32. Its results are the same bits in every run. It implements
// attention.Kernel. One goroutine calls it.
type Reference struct{ deviceAttention }

// NewReference returns a reference that computes on stream.
func NewReference(stream *cuda.Stream, loader *Loader) (*Reference, error) {
	d, err := newDeviceAttention(stream, loader)
	return &Reference{d}, err
}

// Forward begins a forward pass; see attention.Kernel.
func (r *Reference) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	if err := p.Plain("reference attention forward"); err != nil {
		return nil, err
	}
	return r.begin(r, o, acc, q, p)
}

// Backward begins a backward pass; see attention.Kernel.
func (r *Reference) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	if err := p.Plain("reference attention backward"); err != nil {
		return nil, err
	}
	return r.beginBackward(r, dq, do, q, s, p)
}

func (r *Reference) forwardBlock(x *deviceForward, b attention.Block) error {
	c := call.Tensors{Q: x.q, K: b.K, V: b.V, O: x.acc.O, LSE: x.acc.LSE}
	program, err := r.usable("reference attention forward", &c, x.acc.O, x.acc.LSE)
	if err != nil || len(b.Tiles) == 0 {
		return err
	}
	tiles := bareTiles(b.Tiles)
	r.stream.Do("attention forward", func() error {
		return r.call(&c, x.p, tiles, program, "reference_forward", c.Q)
	})
	return nil
}

func (r *Reference) backwardBlock(x *deviceBackward, b attention.GradBlock) error {
	c := call.Tensors{Q: x.q, K: b.K, V: b.V, DO: x.do, LSE: x.s.LSE, Delta: x.s.Delta, DQ: x.dq, DK: b.DK, DV: b.DV}
	program, err := r.usable("reference attention backward", &c, x.do, x.s.LSE, x.s.Delta, x.dq, b.DK, b.DV)
	if err != nil || len(b.Tiles) == 0 {
		return err
	}
	tiles := bareTiles(b.Tiles)
	r.stream.Do("attention backward", func() error {
		if err := r.call(&c, x.p, tiles, program, "reference_queries", c.Q); err != nil {
			return err
		}
		return r.call(&c, x.p, tiles, program, "reference_keys", c.K)
	})
	return nil
}

// usable is the program for the call, or what is wrong with its inputs beyond what attention
// checks.
func (r *Reference) usable(what string, c *call.Tensors, others ...View) (program string, err error) {
	if c.Q.DType() == tensor.F64 {
		return "", fmt.Errorf("%s in float64: a GPU computes in float32 and 16-bit floats; use the CPU", what)
	}
	widest := max(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	i := slices.IndexFunc(source.ReferenceSlots, func(n int) bool { return widest <= 32*n })
	if i < 0 {
		return "", fmt.Errorf("%s with a head dim of %d: up to %d are compiled", what, widest, 32*source.ReferenceSlots[len(source.ReferenceSlots)-1])
	}
	return source.Reference(source.ReferenceSlots[i]).Name, r.onDevice(what, append([]View{c.Q, c.K, c.V}, others...)...)
}

// call launches a kernel that has a warp for each row and head of rows.
func (r *Reference) call(c *call.Tensors, p attention.Softmax, tiles []source.ReferenceTile, program, name string, rows View) error {
	if rows.Size() == 0 {
		return nil
	}
	list, err := r.upload(call.Words(tiles), len(tiles))
	if err != nil {
		return err
	}
	args := source.ReferenceParams{
		Q: call.Strided(c.Q), K: call.Strided(c.K), V: call.Strided(c.V), Dout: call.Strided(c.DO), O: call.Strided(c.O), LSE: call.Strided(c.LSE),
		Delta: call.Strided(c.Delta), DQ: call.Strided(c.DQ), DK: call.Strided(c.DK), DV: call.Strided(c.DV),
		Tiles: list, TileCount: int32(len(tiles)),
		SeqQ: length(c.Q, tensor.Seq), SeqK: length(c.K, tensor.Seq),
		Heads: length(c.Q, tensor.Heads), KVHeads: length(c.K, tensor.Heads),
		Dim: length(c.Q, tensor.Dim), DimV: length(c.V, tensor.Dim),
		Scale: p.Scale, Softcap: p.Softcap,
	}
	const warps = 4
	grid := cuda.Dim{X: ceilDiv(rows.Len(tensor.Seq), warps), Y: rows.Len(tensor.Heads), Z: rows.Len(tensor.Batch)}
	return r.launch(program, name+"_"+typeNames[c.Q.DType()], cuda.Launch{Grid: grid, Block: cuda.Dim{X: 32, Y: warps}}, cuda.Struct(&cuda.Args{}, &args))
}

// bareTiles are the tiles as reference.cu has them: query range, key range, band.
func bareTiles(tiles []partition.Tile) []source.ReferenceTile {
	list := make([]source.ReferenceTile, 0, len(tiles))
	for _, t := range tiles {
		list = append(list, source.ReferenceTile{
			QLo: int32(t.Q.Lo), QHi: int32(t.Q.Hi), KLo: int32(t.K.Lo), KHi: int32(t.K.Hi), Lo: call.Bound(t.Band.Lo), Hi: call.Bound(t.Band.Hi),
		})
	}
	return list
}

var _ attention.Kernel = (*Reference)(nil)
