//go:build cuda

package gpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// deviceAttention implements the passes of cprun's own attention kernels, except for the blocks. Accumulators are
// complete after every block.
type deviceAttention struct {
	attention.Launches
	stream *cuda.Stream
	loader *Loader
	tiles  *cuda.Memory
	lists  *call.Staging // for lists of tiles

	forward  deviceForward // the current pass
	backward deviceBackward
}

// blockKernel computes one block of a pass. It sets the gradients of fresh keys.
type blockKernel interface {
	forwardBlock(f *deviceForward, b attention.Block) error
	backwardBlock(f *deviceBackward, b attention.GradBlock) error
}

const commonProgram = "attention_common"

// tileBytes is the initial size of the device memory for lists of tiles, about 2000 tiles.
const tileBytes = 64 << 10

func newDeviceAttention(stream *cuda.Stream, loader *Loader) (deviceAttention, error) {
	tiles, err := loader.Device().Alloc(tileBytes)
	if err != nil {
		return deviceAttention{}, fmt.Errorf("lists of tiles: %w", err)
	}
	_, err = loader.Load(commonProgram)
	pinned := func(n int64) (tensor.Memory, error) {
		p, err := loader.Device().AllocHost(n)
		if err != nil {
			return nil, err
		}
		return p.Host(), nil
	}
	return deviceAttention{stream: stream, loader: loader, tiles: tiles, lists: call.NewStaging(pinned)}, err
}

// launch queues a kernel of a program. The first launch loads the program.
func (d *deviceAttention) launch(program, name string, l cuda.Launch, a *cuda.Args) error {
	f, err := d.loader.Function(program, name, l.Shared)
	if err != nil {
		return err
	}
	d.stream.Launch(f, l, a)
	if program != commonProgram {
		d.Launch(program)
	}
	return nil
}

// A deviceForward is a forward pass of cprun's own kernels.
type deviceForward struct {
	d   *deviceAttention
	k   blockKernel
	o   View
	acc attention.Partial
	q   View
	p   attention.Softmax
	// fresh: the accumulators are not initialised. done: o is set.
	fresh, done bool
}

// begin begins a forward pass; k computes its blocks.
func (d *deviceAttention) begin(k blockKernel, o View, acc attention.Partial, q View,
	p attention.Softmax) (attention.ForwardPass, error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	if err := d.floats("attention reset", acc.O, acc.LSE); err != nil {
		return nil, err
	}
	if err := d.loader.onDevice("attention finish", o); err != nil {
		return nil, err
	}
	d.forward = deviceForward{d: d, k: k, o: o, acc: acc, q: q, p: p, fresh: true}
	return &d.forward, nil
}

// reset initialises the accumulators, unless they are already.
func (f *deviceForward) reset() {
	if !f.fresh {
		return
	}
	f.fresh = false
	f.d.stream.Do("attention reset", func() error {
		if err := f.d.fill(f.acc.O, 0); err != nil {
			return err
		}
		return f.d.fill(f.acc.LSE, math.Inf(-1))
	})
}

// Block folds a block in.
func (f *deviceForward) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	return f.k.forwardBlock(f, b)
}

// End sets o to the accumulator, rounded to its type.
func (f *deviceForward) End() error {
	f.reset()
	if f.done || f.o == f.acc.O {
		return nil
	}
	f.d.stream.Do("attention finish", func() error {
		return f.d.rows("attention_cast_"+typeNames[f.o.DType()], f.o, f.acc.O)
	})
	return nil
}

// A deviceBackward is a backward pass of cprun's own kernels.
type deviceBackward struct {
	d         *deviceAttention
	k         blockKernel
	dq, do, q View
	s         attention.Saved
	p         attention.Softmax
}

// beginBackward begins a backward pass; k computes its blocks.
func (d *deviceAttention) beginBackward(k blockKernel, dq, do, q View, s attention.Saved,
	p attention.Softmax) (attention.BackwardPass, error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	if do.DType() != q.DType() {
		return nil, fmt.Errorf("attention backward: do is %v, q %v; they must be of one type", do.DType(), q.DType())
	}
	if do.DType() == tensor.F64 || s.O.DType() == tensor.F64 {
		return nil, fmt.Errorf("attention delta of %v and %v: a GPU computes in float32 and 16-bit floats", do, s.O)
	}
	if err := d.floats("attention reset", dq); err != nil {
		return nil, err
	}
	if err := d.loader.onDevice("attention delta", s.Delta, do, s.O); err != nil {
		return nil, err
	}
	var cleared source.Strided // the kernel of delta also clears dq, which takes less time than two kernels
	columns := 0
	if call.InPieces(4, dq) {
		cleared, columns = call.Strided(dq), dq.Len(tensor.Dim)
	} else if err := d.zero(dq); err != nil {
		return nil, err
	}
	name := "attention_delta_" + typeNames[do.DType()] + "_" + typeNames[s.O.DType()]
	d.stream.Do("attention delta", func() error {
		return d.rowsWith(name, func(a *cuda.Args) { cuda.Struct(a, &cleared).Int(columns) }, do, s.O, s.Delta)
	})
	d.backward = deviceBackward{d, k, dq, do, q, s, p}
	return &d.backward, nil
}

// Block adds the gradients of a block.
func (f *deviceBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	return f.k.backwardBlock(f, b)
}

func (d *deviceAttention) zeroFresh(b attention.GradBlock) error {
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	return d.zero(fresh.DK, fresh.DV)
}

// End does nothing, since Block adds gradients at once.
func (f *deviceBackward) End() error { return nil }

// Fold adds gradients of keys from elsewhere.
func (f *deviceBackward) Fold(x attention.Fold) error {
	if err := attention.CheckFold(x); err != nil {
		return err
	}
	dst := x.Dst.Rows(x.Lo, x.Lo+x.Src.DK.Len(tensor.Seq))
	if err := f.d.add(dst.DK, x.Src.DK); err != nil {
		return err
	}
	return f.d.add(dst.DV, x.Src.DV)
}

// zero sets accumulators to 0.
func (d *deviceAttention) zero(vs ...View) error {
	for _, v := range vs {
		if err := d.floats("attention reset", v); err != nil {
			return err
		}
		d.stream.Do("attention reset", func() error { return d.fill(v, 0) })
	}
	return nil
}

// add adds src to dst, float32 views of the same shape.
func (d *deviceAttention) add(dst, src View) error {
	if err := d.floats("add", dst, src); err != nil {
		return err
	}
	d.stream.Do("add", func() error { return d.rows("attention_add", dst, src) })
	return nil
}

func (d *deviceAttention) fill(v View, x float64) error {
	if x == 0 && v.IsDense() {
		d.stream.Memset(v.Addr(), 0, int64(v.Size())*int64(v.DType().Size()))
		return nil
	}
	return d.rowsWith("attention_fill", func(a *cuda.Args) { a.Float(x) }, v)
}

// rows queues a kernel over the rows of views of the same shape. A third view, with one element per row, becomes the
// first argument.
func (d *deviceAttention) rows(name string, views ...View) error {
	return d.rowsWith(name, func(*cuda.Args) {}, views...)
}

// rowsWith does the same and appends arguments.
func (d *deviceAttention) rowsWith(name string, more func(*cuda.Args), views ...View) error {
	v := views[0]
	if v.Size() == 0 {
		return nil
	}
	rows, dim := v.Rows()*v.Len(tensor.Heads), v.Len(tensor.Dim)
	if rows > math.MaxInt32 {
		return fmt.Errorf("%s: %v has %d rows; a GPU counts to 2^31", name, v, rows)
	}
	width, piece := 1, pieceOf(views[:min(len(views), 2)])
	for width < 32 && width*piece < dim {
		width *= 2
	}
	a := cuda.Struct(&cuda.Args{}, &source.Rows{
		Rows: int32(rows), Seqs: length(v, tensor.Seq), Heads: length(v, tensor.Heads), Dim: int32(dim),
		Width: int32(width),
	})
	if len(views) == 3 {
		views = []View{views[2], views[0], views[1]}
	}
	for _, v := range views {
		s := call.Strided(v)
		cuda.Struct(a, &s)
	}
	more(a)
	const threads = 256
	grid := cuda.Dim{X: ceilDiv(rows, threads/width)}
	return d.launch(commonProgram, fmt.Sprintf("%s_%d", name, piece),
		cuda.Launch{Grid: grid, Block: cuda.Dim{X: threads}}, a)
}

// pieceOf returns the number of neighbouring elements that a thread processes at once. They take up to 16 bytes, must
// divide the rows, and have compiled kernels.
func pieceOf(views []View) int {
	for _, piece := range []int{8, 4} {
		wide := slices.ContainsFunc(views, func(v View) bool { return piece*v.DType().Size() > 16 })
		if !wide && call.InPieces(piece, views...) {
			return piece
		}
	}
	return 1
}

// upload copies the words of tiles and positions to the device for the next kernel and returns their address. The next
// call reuses the memory, in stream order. A few hundred words travel as a kernel's arguments, which is faster than a
// copy.
func (d *deviceAttention) upload(words []uint32) (uint64, error) {
	const most = len(source.Words{}.X)
	if bytes := int64(len(words)) * 4; bytes > d.tiles.Bytes() {
		grown, err := d.loader.Device().Alloc(2 * bytes)
		if err != nil {
			return 0, fmt.Errorf("lists of tiles of %d bytes: %w", bytes, err)
		}
		d.tiles = grown
	}
	to := d.tiles.Addr()
	if len(words) > most {
		return to, d.lists.Copy(words, func(from View) { d.stream.Copy(to, from.Addr(), int64(4*len(words))) },
			d.stream.Record)
	}
	var x source.Words
	copy(x.X[:], words)
	a := cuda.Struct((&cuda.Args{}).Addr(to).Int(len(words)), &x)
	return to, d.launch(commonProgram, "attention_store", cuda.Launch{Grid: cuda.Dim{X: 1}, Block: cuda.Dim{X: most}},
		a)
}

// floats returns an error unless all views are float32 on the device.
func (d *deviceAttention) floats(what string, vs ...View) error {
	for _, v := range vs {
		if !v.IsZero() && v.DType() != tensor.F32 {
			return fmt.Errorf("%s: %v: accumulators are float32", what, v)
		}
	}
	return d.loader.onDevice(what, vs...)
}

// onDevice returns an error for the first view outside of the loader's device.
func (l *Loader) onDevice(what string, vs ...View) error {
	place := l.Device().Place()
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
