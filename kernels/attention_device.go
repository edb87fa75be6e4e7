//go:build cuda

package kernels

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// deviceAttention is what the attention kernels of our own share: all of attention.Kernel but
// Forward and Backward. Accumulators are complete after every call, so that there is little
// to finish.
type deviceAttention struct {
	stream    *cuda.Stream
	loader    *Loader
	functions map[string]*cuda.Function
	tiles     *cuda.Memory
}

const commonProgram = "attention_common"

// tileBytes is the device memory for lists of tiles to begin with: some 2000 tiles.
const tileBytes = 64 << 10

func newDeviceAttention(stream *cuda.Stream, loader *Loader) (deviceAttention, error) {
	tiles, err := loader.Device().Alloc(tileBytes)
	if err != nil {
		return deviceAttention{}, fmt.Errorf("lists of tiles: %w", err)
	}
	_, err = loader.Load(commonProgram)
	return deviceAttention{stream: stream, loader: loader, functions: map[string]*cuda.Function{}, tiles: tiles}, err
}

// launch queues a kernel of a program, which is loaded the first time.
func (d *deviceAttention) launch(program, name string, l cuda.Launch, a *cuda.Args) error {
	key := program + "." + name
	f := d.functions[key]
	if f == nil {
		m, err := d.loader.Load(program)
		if err != nil {
			return err
		}
		if f, err = m.Function(name, l.Shared); err != nil {
			return err
		}
		d.functions[key] = f
	}
	d.stream.Launch(f, l, a)
	return nil
}

// Reset prepares an accumulator for the first Forward: O = 0, LSE = -Inf.
func (d *deviceAttention) Reset(acc attention.Partial) error {
	if err := d.floats("attention reset", acc.O, acc.LSE); err != nil {
		return err
	}
	d.stream.Do("attention reset", func() error {
		if err := d.fill(acc.O, 0); err != nil {
			return err
		}
		return d.fill(acc.LSE, math.Inf(-1))
	})
	return nil
}

// ResetGrads sets accumulators to 0; a zero View among them is left out.
func (d *deviceAttention) ResetGrads(g attention.Grads) error {
	for _, v := range []View{g.DQ, g.DK, g.DV} {
		if v.IsZero() {
			continue
		}
		if err := d.floats("attention reset", v); err != nil {
			return err
		}
		d.stream.Do("attention reset", func() error { return d.fill(v, 0) })
	}
	return nil
}

// Finish sets o to acc.O, rounded to its type; acc is complete already.
func (d *deviceAttention) Finish(o View, acc attention.Partial) error {
	if o == acc.O {
		return nil
	}
	if err := attention.CheckFinish(o, acc); err != nil {
		return err
	}
	if err := d.onDevice("attention finish", o, acc.O); err != nil {
		return err
	}
	d.stream.Do("attention finish", func() error { return d.rows("attention_cast_"+typeNames[o.DType()], o, acc.O) })
	return nil
}

// FinishGrads has nothing to do: gradients are added at once.
func (d *deviceAttention) FinishGrads(attention.Grads) error { return nil }

// Delta sets delta to rowsum(do * o); see attention.Kernel.
func (d *deviceAttention) Delta(delta, do, o View) error {
	if err := attention.CheckDelta(delta, do, o); err != nil {
		return err
	}
	if err := d.onDevice("attention delta", delta, do, o); err != nil {
		return err
	}
	if do.DType() == tensor.F64 || o.DType() == tensor.F64 {
		return fmt.Errorf("attention delta of %v and %v: a GPU computes in float32 and 16-bit floats", do, o)
	}
	name := "attention_delta_" + typeNames[do.DType()] + "_" + typeNames[o.DType()]
	d.stream.Do("attention delta", func() error { return d.rows(name, do, o, delta) })
	return nil
}

// Add adds src to dst, element by element: float32, of one shape.
func (d *deviceAttention) Add(dst, src View) error {
	if dst.Shape() != src.Shape() {
		return fmt.Errorf("add %v to %v: shapes must be equal", src, dst)
	}
	if err := d.floats("add", dst, src); err != nil {
		return err
	}
	d.stream.Do("add", func() error { return d.rows("attention_add", dst, src) })
	return nil
}

func (d *deviceAttention) fill(v View, x float64) error {
	if x == 0 && v.IsDense() {
		d.stream.Memset(cuda.Addr(v), 0, int64(v.Size())*int64(v.DType().Size()))
		return nil
	}
	return d.rowsWith("attention_fill", func(a *cuda.Args) { a.Float(x) }, v)
}

// rows queues a kernel over the rows of views of one shape, but for a third, of one element a
// row, which comes first among the arguments.
func (d *deviceAttention) rows(name string, views ...View) error {
	return d.rowsWith(name, func(*cuda.Args) {}, views...)
}

// rowsWith is rows with more arguments at the end.
func (d *deviceAttention) rowsWith(name string, more func(*cuda.Args), views ...View) error {
	v := views[0]
	if v.Size() == 0 {
		return nil
	}
	rows, dim, piece := v.Rows()*v.Len(tensor.Heads), v.Len(tensor.Dim), 1
	if rows > math.MaxInt32 {
		return fmt.Errorf("%s: %v has %d rows; a GPU counts to 2^31", name, v, rows)
	}
	if inPieces(4, views[:min(len(views), 2)]...) {
		piece = 4
	}
	width := 1
	for width < 32 && width*piece < dim {
		width *= 2
	}
	a := (&cuda.Args{}).Int(rows).Int(v.Len(tensor.Seq)).Int(v.Len(tensor.Heads)).Int(dim).Int(width).Int(0)
	if len(views) == 3 {
		views = []View{views[2], views[0], views[1]}
	}
	for _, v := range views {
		address(a, cuda.Addr(v), stridesOf(v))
	}
	more(a)
	const threads = 256
	grid := cuda.Dim{X: ceilDiv(rows, threads/width)}
	return d.launch(commonProgram, fmt.Sprintf("%s_%d", name, piece), cuda.Launch{Grid: grid, Block: cuda.Dim{X: threads}}, a)
}

// inPieces says that rows of all views are made of pieces of n elements which begin at multiples
// of a piece.
func inPieces(n int, views ...View) bool {
	for _, v := range views {
		ok := v.Len(tensor.Dim)%n == 0 && cuda.Addr(v)%uint64(n*v.DType().Size()) == 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			ok = ok && (v.Len(a) == 1 || v.Stride(a)%int64(n) == 0)
		}
		if !ok {
			return false
		}
	}
	return true
}

// upload puts words on the device for the next kernel, size of them to an item, and is their
// address. The memory is used again by the next call: the stream keeps them apart. They travel
// as arguments, a few hundred at a time, so that no host memory has to outlive the call.
func (d *deviceAttention) upload(words []int32, size int) (uint64, error) {
	const most = 224 // words of an argument of attention_store
	if bytes := int64(len(words)) * 4; bytes > d.tiles.Bytes() {
		grown, err := d.loader.Device().Alloc(2 * bytes)
		if err != nil {
			return 0, fmt.Errorf("a list of %d tiles: %w", len(words)/size, err)
		}
		d.tiles = grown
	}
	to := cuda.Addr(tensor.Dense(d.tiles, tensor.U8, 0, [4]int{1, 1, 1, 1}))
	at := to
	for part := range slices.Chunk(words, most) {
		a := (&cuda.Args{}).Addr(at).Int(len(part))
		for i := range most {
			w := int32(0)
			if i < len(part) {
				w = part[i]
			}
			a.Int(int(w))
		}
		if err := d.launch(commonProgram, "attention_store", cuda.Launch{Grid: cuda.Dim{X: 1}, Block: cuda.Dim{X: most}}, a); err != nil {
			return 0, err
		}
		at += uint64(4 * len(part))
	}
	return to, nil
}

// floats is an error unless all views are float32 on the device.
func (d *deviceAttention) floats(what string, vs ...View) error {
	for _, v := range vs {
		if !v.IsZero() && v.DType() != tensor.F32 {
			return fmt.Errorf("%s: %v: accumulators are float32", what, v)
		}
	}
	return d.onDevice(what, vs...)
}

// onDevice is an error that names the first view that does not lie on the kernel's device.
func (d *deviceAttention) onDevice(what string, vs ...View) error {
	place := d.loader.Device().Place()
	for _, v := range vs {
		if v.IsZero() {
			return fmt.Errorf("%s: a view without memory", what)
		}
		if v.Memory().Device() != place {
			return fmt.Errorf("%s: %v is not on %v", what, v, place)
		}
	}
	return nil
}
