//go:build cuda

package gpu

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Flash computes attention with cprun's own kernels, for sm_80 and later GPUs: float32, bfloat16 and float16 inputs,
// float32 accumulators, any head dim up to 512, any tiles, strides and soft cap. A call is one launch. Flash implements
// attention.Kernel. Only one goroutine may call it.
//
// On Hopper, 16-bit calls use separate kernels if the tensors are valid for TMA. Other calls use the kernels of other
// GPUs. A pass may mix both.
//
// The first use of a pair of head dims loads its programs. Preload does it earlier.
type Flash struct {
	deviceAttention
	deterministic bool
	margin        int          // SMs that kernels for Hopper leave to other kernels
	shared        int          // bytes of shared memory of a block
	hopper        *cuda.Memory // the work counter of its kernels; nil on other GPUs
	progress      *cuda.Memory // of blocks that add in order; nil before the first
	fault         *cuda.Pinned // a source.HopperFault of those; nil unless deterministic, on Hopper
	section       int          // keys of a launch of a forward pass on Hopper, in tests; 0: as many as the L2 holds
	// change turns a shape for Hopper into one of a program for tests, if not nil.
	change func(*source.HopperShape)
}

// FlashOptions configure a Flash.
type FlashOptions struct {
	// Deterministic makes gradients repeatable bit for bit. On Hopper, blocks add to dQ in a fixed order. Elsewhere, a
	// backward pass computes seven products instead of five.
	Deterministic bool
	// SMMargin is the number of SMs that the kernels for Hopper leave to concurrent kernels, such as NCCL's. The blocks
	// of other GPUs' kernels end soon.
	SMMargin int
}

// NewFlash returns a Flash that computes on stream.
func NewFlash(stream *cuda.Stream, loader *Loader, o FlashOptions) (*Flash, error) {
	d, err := newDeviceAttention(stream, loader)
	if err != nil {
		return nil, err
	}
	f := &Flash{deviceAttention: d, deterministic: o.Deterministic, margin: o.SMMargin,
		shared: loader.Device().SharedPerBlock}
	if loader.Device().Arch == hopperArch {
		f.hopper, err = newWorkCounter(stream, loader.Device())
	}
	if err == nil && f.hopper != nil && f.deterministic {
		err = f.reportFaults()
	}
	return f, err
}

// Preload loads the programs for inputs of type t, head dim dim of q and k, and dimV of v. It compiles them if they are
// not on disk.
func (f *Flash) Preload(t tensor.DType, dim, dimV int) error {
	names, err := f.programs(t, dim, dimV)
	if err != nil {
		return err
	}
	return f.loader.Preload(append(names, commonProgram)...)
}

// programs returns the names of the programs of both passes.
func (f *Flash) programs(t tensor.DType, dim, dimV int) ([]string, error) {
	forward, err := f.shapeFor("flash attention forward", t, dim, dimV, source.FlashShape.ForwardShared)
	if err != nil {
		return nil, err
	}
	backward, err := f.shapeFor("flash attention backward", t, dim, dimV, f.backwardShared)
	if err != nil {
		return nil, err
	}
	// Tensors that TMA cannot copy are rare, so their first use loads their programs.
	if s, ok := source.HopperShapeFor(dim, dimV); ok && f.hopper != nil && t != tensor.F32 {
		return []string{s.Backward(false, f.deterministic).Name, s.Forward(false).Name}, nil
	}
	names := []string{backward.Backward().Name, forward.Forward().Name}
	if f.deterministic {
		names = append(names, backward.DQ().Name)
	}
	return names, nil
}

// shapeFor returns the shape for a pass. needs returns the shared memory of a block.
func (f *Flash) shapeFor(what string, t tensor.DType, dim, dimV int,
	needs func(source.FlashShape) int) (source.FlashShape, error) {
	s, ok := source.FlashShapeFor(t == tensor.F32, dim, dimV, f.shared, needs)
	switch {
	case ok:
		return s, nil
	case max(dim, dimV) > source.FlashMaxDim:
		return s, fmt.Errorf("%s with head dims %d and %d: up to %d are compiled; use the reference backend", what, dim,
			dimV, source.FlashMaxDim)
	}
	return s, fmt.Errorf("%s with head dims %d and %d needs more than the %d bytes of shared memory of a block on %v; "+
		"use the reference backend", what, dim, dimV, f.shared, f.loader.Device())
}

// backwardShared returns the shared memory that the kernels of a backward pass need.
func (f *Flash) backwardShared(s source.FlashShape) int {
	if f.deterministic {
		return max(s.BackwardShared(), s.DQShared())
	}
	return s.BackwardShared()
}

// Forward begins a forward pass; see attention.Kernel.
func (f *Flash) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	if err := p.Plain("flash attention forward"); err != nil {
		return nil, err
	}
	return f.begin(f, o, acc, q, p)
}

// Backward begins a backward pass; see attention.Kernel.
func (f *Flash) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	if err := p.Plain("flash attention backward"); err != nil {
		return nil, err
	}
	return f.beginBackward(f, dq, do, q, s, p)
}

func (f *Flash) forwardBlock(x *deviceForward, b attention.Block) error {
	within, before := call.HopperWaits(b.Gates)
	c := call.Flash{Tensors: call.Tensors{Q: x.q, K: b.K, V: b.V, O: x.acc.O, LSE: x.acc.LSE}, Softmax: x.p,
		Tiles: b.Tiles, Gates: within}
	if err := f.usable("flash attention forward", &c, source.FlashShape.ForwardShared, x.acc.O, x.acc.LSE); err != nil {
		return err
	}
	f.await(before)
	if f.onHopper(x, &c, b) {
		return nil
	}
	f.await(within)
	x.reset()
	f.run("attention forward", c.Forward())
	return nil
}

func (f *Flash) backwardBlock(x *deviceBackward, b attention.GradBlock) error {
	within, before := call.HopperWaits(b.Gates)
	c := call.Flash{
		Tensors: call.Tensors{Q: x.q, K: b.K, V: b.V, DO: x.do, LSE: x.s.LSE, Delta: x.s.Delta, DQ: x.dq, DK: b.DK,
			DV: b.DV},
		Softmax: x.p, Tiles: b.Tiles, Gates: within,
	}
	if err := f.usable("flash attention backward", &c, f.backwardShared, x.do, x.s.LSE, x.s.Delta, x.dq, b.DK,
		b.DV); err != nil {
		return err
	}
	l, onHopper := f.backwardOnHopper(&c, b.Fresh)
	if !l.SetsFresh {
		if err := f.zeroFresh(b); err != nil {
			return err
		}
	}
	f.await(before)
	if onHopper {
		f.stream.Do("attention backward", func() error { return f.launchBackward(&l) })
		return nil
	}
	f.await(within)
	f.run("attention backward", c.Backward(f.deterministic))
	return nil
}

// WaitsForKeys reports whether kernels wait for rows of keys; see attention.Waiter. Calls of other kernels than
// Hopper's wait before the launch.
func (f *Flash) WaitsForKeys() bool { return f.hopper != nil }

// await makes the stream wait for gates.
func (f *Flash) await(gates []attention.Gate) {
	for _, g := range gates {
		f.stream.WaitValue(g.Word, g.Count)
	}
}

// usable sets the call's shape and checks its inputs beyond the checks of package attention. needs returns the shared
// memory of a block.
func (f *Flash) usable(what string, c *call.Flash, needs func(source.FlashShape) int, others ...View) error {
	if t := c.Q.DType(); !call.TakesFlash(t) {
		return fmt.Errorf("%s in %v: it computes in float32, bfloat16 and float16; use the CPU", what, t)
	}
	var err error
	if c.Shape, err = f.shapeFor(what, c.Q.DType(), c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim), needs); err != nil {
		return err
	}
	if n, most := max(c.Q.Len(tensor.Seq), c.K.Len(tensor.Seq)), call.MaxFlashRows(c.Shape); n > most {
		return fmt.Errorf("%s of %d positions: up to %d a rank; use more ranks", what, n, most)
	}
	return f.loader.onDevice(what, append([]View{c.Q, c.K, c.V}, others...)...)
}

// run queues the launches as one piece of work of the stream.
func (f *Flash) run(what string, launches []call.Launch) {
	if len(launches) == 0 {
		return
	}
	f.stream.Do(what, func() error {
		for i := range launches {
			if err := f.call(&launches[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// call launches a kernel.
func (f *Flash) call(l *call.Launch) error {
	if l.Tiles != nil {
		var err error
		if l.Params.Tiles, err = f.upload(call.Words(l.Tiles)); err != nil {
			return err
		}
	}
	grid := cuda.Dim{X: l.Grid[0], Y: l.Grid[1], Z: l.Grid[2]}
	return f.launch(l.Program, l.Kernel, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
		cuda.Struct(&cuda.Args{}, &l.Params))
}

var _ attention.Waiter = (*Flash)(nil)

// hopperArch, the compute capability times 10, selects the kernels for Hopper.
const hopperArch = 90

// newWorkCounter allocates the counter from which the blocks of a grid take work. Every launch leaves it 0.
func newWorkCounter(stream *cuda.Stream, dev *cuda.Device) (*cuda.Memory, error) {
	m, err := dev.Alloc(4)
	if err != nil {
		return nil, fmt.Errorf("the counter of work: %w", err)
	}
	stream.Memset(m.Addr(), 0, 4)
	return m, nil
}

// zeros returns the address of words that are 0 for the next kernel. The next call reuses the memory.
func (f *Flash) zeros(words int64) (uint64, error) {
	if bytes := 4 * words; f.progress == nil || bytes > f.progress.Bytes() {
		grown, err := f.loader.Device().Alloc(2 * bytes)
		if err != nil {
			return 0, fmt.Errorf("progress counters of %d bytes: %w", bytes, err)
		}
		f.progress = grown
	}
	at := f.progress.Addr()
	f.stream.Memset(at, 0, 4*words)
	return at, nil
}

// reportFaults makes errors of the device name a block that timed out before its turn to add to dQ.
func (f *Flash) reportFaults() (err error) {
	dev := f.loader.Device()
	if f.fault, err = dev.AllocHost(int64(unsafe.Sizeof(source.HopperFault{}))); err != nil {
		return fmt.Errorf("the report of attention backward: %w", err)
	}
	x := (*source.HopperFault)(f.fault.Host().Ptr())
	dev.OnError(func() string {
		if x.Keys1 == 0 {
			return ""
		}
		return fmt.Sprintf("hopper_backward, deterministic: block of keys %d of KV head %d, batch %d, waited too "+
			"long for block %d to add to dq; "+
			"please report it, and set train.deterministic: false meanwhile", x.Keys1-1, x.KVHead, x.Batch, x.Before)
	})
	return nil
}

// sms returns the number of SMs of the device, and of those that kernels take.
func (f *Flash) sms() call.SMs {
	all := f.loader.Device().SMs
	return call.SMs{All: all, Taken: max(1, all-f.margin)}
}

// hopperShape returns the shape for a call, and whether the kernels for Hopper can compute it.
func (f *Flash) hopperShape(c *call.Flash, more ...View) (source.HopperShape, bool) {
	s, ok := source.HopperShapeFor(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	if f.change != nil {
		f.change(&s)
	}
	return s, ok && f.hopper != nil && c.TakesHopper(more...)
}

// onHopper queues a block of a forward pass on the kernels for Hopper, and reports whether it did.
func (f *Flash) onHopper(x *deviceForward, c *call.Flash, b attention.Block) bool {
	rounds := x.o != x.acc.O && x.o.DType() == c.Q.DType() // the kernel also rounds into o
	var more []View
	if rounds {
		more = []View{x.o}
	}
	shape, ok := f.hopperShape(c, more...)
	if !ok {
		return false
	}
	keys := f.section
	if keys == 0 {
		keys = c.SectionKeys()
	}
	sections := c.Sections(keys)
	for i := range sections {
		c.Tiles = sections[i]
		last := b.Last && rounds && i == len(sections)-1
		l, ok := c.HopperForward(shape, x.o, x.fresh, last)
		if !ok {
			break // no query sees a key of the block
		}
		x.fresh, x.done = false, last
		f.stream.Do("attention forward", func() error { return f.launchForward(&l) })
	}
	return true
}

// launchForward launches a block of a forward pass.
func (f *Flash) launchForward(l *call.HopperForward) error {
	p := &l.Params
	if err := f.uploadLists(l.Lists, &p.P.Tiles, &p.Order, &p.Needs, &p.Gates); err != nil {
		return err
	}
	p.Next = f.hopper.Addr()
	if err := f.encodeAll(l.Maps[:], &p.Q, &p.K, &p.V); err != nil {
		return err
	}
	grid := cuda.Dim{X: min(l.Blocks, f.sms().Taken)}
	return f.launch(l.Program, l.Kernel, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
		cuda.StructAligned(&cuda.Args{}, p, source.MapAlign))
}

// uploadLists copies the lists to the device for the next kernel and sets their addresses.
func (f *Flash) uploadLists(l call.HopperLists, tiles, order, needs, gates *uint64) error {
	lists := [][]uint32{call.Words(l.Tiles), call.Words(l.Order), l.Needs, call.Words(l.Gates)}
	words := slices.Concat(lists...)
	if len(words) == 0 {
		return nil
	}
	at, err := f.upload(words)
	for i, to := range []*uint64{tiles, order, needs, gates} {
		if len(lists[i]) > 0 {
			*to = at
		}
		at += uint64(4 * len(lists[i]))
	}
	return err
}

// backwardOnHopper returns the launch of a block of a backward pass, and whether the kernels for Hopper can compute it.
func (f *Flash) backwardOnHopper(c *call.Flash, fresh partition.Range) (l call.HopperBackward, ok bool) {
	shape, ok := f.hopperShape(c)
	if !ok || f.deterministic && !c.HasOrder(shape) {
		return l, false
	}
	launch := c.HopperBackward
	if f.deterministic {
		launch = c.HopperOrdered
	}
	return launch(shape, f.sms(), fresh), true
}

// launchBackward launches a block of a backward pass, unless no query sees a key of it.
func (f *Flash) launchBackward(l *call.HopperBackward) error {
	if l.Grid[0] == 0 {
		return nil
	}
	p := &l.Params
	if err := f.uploadLists(l.Lists, &p.P.Tiles, &p.Order, &p.Needs, &p.Gates); err != nil {
		return err
	}
	if err := f.encodeAll(l.Maps[:], &p.Q, &p.K, &p.V, &p.Dout, &p.DQ); err != nil {
		return err
	}
	if n := l.Progress + l.Next; n > 0 {
		at, err := f.zeros(int64(n))
		if err != nil {
			return err
		}
		if p.Progress = at; l.Next > 0 {
			p.Next = at + uint64(4*l.Progress)
		}
		if f.fault != nil {
			p.Fault = uint64(uintptr(f.fault.Host().Ptr()))
		}
	}
	grid := cuda.Dim{X: l.Grid[0], Y: l.Grid[1], Z: l.Grid[2]}
	return f.launch(l.Program, l.Kernel, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
		cuda.StructAligned(&cuda.Args{}, p, source.MapAlign))
}

func (f *Flash) encodeAll(maps []call.Map, to ...*source.TensorMap) error {
	for i, m := range maps {
		if err := encodeMap(f.loader.Device(), to[i], m); err != nil {
			return err
		}
	}
	return nil
}

// encodeMap makes the tensor map of m. Its pieces of 16 bytes are permuted over the columns of a box.
func encodeMap(dev *cuda.Device, to *source.TensorMap, m call.Map) error {
	v := m.View
	t := cuda.Tiled{Type: v.DType(), Addr: v.Addr(), Swizzle: m.Columns * v.DType().Size(),
		Box: []int{m.Columns, m.Rows, 1, 1}}
	for _, a := range []tensor.Axis{tensor.Dim, tensor.Seq, tensor.Heads, tensor.Batch} {
		t.Shape = append(t.Shape, v.Len(a))
		if a != tensor.Dim {
			t.Strides = append(t.Strides, stepBytes(v, a))
		}
	}
	encoded, err := dev.TensorMap(t)
	for i := range to.Words {
		to.Words[i] = binary.NativeEndian.Uint64(encoded[8*i:])
	}
	return err
}

// stepBytes returns the stride of an axis in bytes. For an axis of length 1, the driver accepts any multiple of 16.
func stepBytes(v View, a tensor.Axis) int64 {
	if v.Len(a) == 1 {
		return 16
	}
	return v.Stride(a) * int64(v.DType().Size())
}
