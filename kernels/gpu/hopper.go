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

// hopperArch, the compute capability times 10, selects the kernels for Hopper.
const hopperArch = 90

// newWorkCounter returns the memory of the number by which blocks of a grid take work. Every launch leaves
// it 0.
func newWorkCounter(stream *cuda.Stream, dev *cuda.Device) (*cuda.Memory, error) {
	m, err := dev.Alloc(4)
	if err != nil {
		return nil, fmt.Errorf("the counter of work: %w", err)
	}
	stream.Memset(workCounter(m), 0, 4)
	return m, nil
}

func workCounter(m *cuda.Memory) uint64 {
	return cuda.Addr(tensor.Dense(m, tensor.I32, 0, [4]int{1, 1, 1, 1}))
}

// zeros returns the address of words that are 0 for the next kernel. The next call uses the memory again.
func (f *Flash) zeros(words int64) (uint64, error) {
	if bytes := 4 * words; f.progress == nil || bytes > f.progress.Bytes() {
		grown, err := f.loader.Device().Alloc(2 * bytes)
		if err != nil {
			return 0, fmt.Errorf("how far blocks are, of %d bytes: %w", bytes, err)
		}
		f.progress = grown
	}
	at := cuda.Addr(tensor.Dense(f.progress, tensor.U8, 0, [4]int{1, 1, 1, 1}))
	f.stream.Memset(at, 0, 4*words)
	return at, nil
}

// reportFaults makes errors of the device name a block that gave up its turn to add to dQ.
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

// sms returns the processors of the device, and how many this kernel takes.
func (f *Flash) sms() call.SMs {
	all := f.loader.Device().SMs
	return call.SMs{All: all, Taken: max(1, all-f.margin)}
}

// hopperShape returns the shape for a call, if it can go to the kernels for Hopper.
func (f *Flash) hopperShape(c *call.Flash, more ...View) (source.HopperShape, bool) {
	s, ok := source.HopperShapeFor(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	if f.change != nil {
		f.change(&s)
	}
	return s, ok && f.hopper != nil && c.TakesHopper(more...)
}

// onHopper queues a block of a forward pass for the kernels for Hopper, and reports whether it did.
func (f *Flash) onHopper(x *deviceForward, c *call.Flash, b attention.Block) bool {
	rounds := x.o != x.acc.O && x.o.DType() == c.Q.DType() // into o
	var more []View
	if rounds {
		more = []View{x.o}
	}
	shape, ok := f.hopperShape(c, more...)
	if !ok {
		return false
	}
	last := b.Last && rounds
	l, ok := c.HopperForward(shape, x.o, x.fresh, last)
	if !ok {
		return true // no query sees a key of the block
	}
	x.fresh, x.done = false, last
	f.stream.Do("attention forward", func() error { return f.launchForward(&l) })
	return true
}

// launchForward launches a block of a forward pass.
func (f *Flash) launchForward(l *call.HopperForward) error {
	p := &l.Params
	if err := f.uploadLists(l.Lists, &p.P.Tiles, &p.Order, &p.Needs, &p.Gates); err != nil {
		return err
	}
	p.Next = workCounter(f.hopper)
	if err := f.encodeAll(l.Maps[:], &p.Q, &p.K, &p.V); err != nil {
		return err
	}
	grid := cuda.Dim{X: min(l.Blocks, f.sms().Taken)}
	return f.launch(l.Program, l.Kernel, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
		cuda.StructAligned(&cuda.Args{}, p, source.MapAlign))
}

// uploadLists puts lists, if there are any, on the device for the next kernel, and sets their addresses.
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

// backwardOnHopper returns the launch of a block of a backward pass, and whether it goes to the kernels for Hopper.
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

// launchBackward launches a block of a backward pass, if some query sees a key of it.
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
		if err := f.encode(to[i], m); err != nil {
			return err
		}
	}
	return nil
}

// encode makes a map as the copy engine reads it.
func (f *Flash) encode(to *source.TensorMap, m call.Map) error {
	v := m.View
	t := cuda.Tiled{Type: v.DType(), Addr: cuda.Addr(v), Swizzle: 128, Box: []int{m.Columns, m.Rows, 1, 1}}
	for _, a := range []tensor.Axis{tensor.Dim, tensor.Seq, tensor.Heads, tensor.Batch} {
		t.Shape = append(t.Shape, v.Len(a))
		if a != tensor.Dim {
			t.Strides = append(t.Strides, stepBytes(v, a))
		}
	}
	encoded, err := f.loader.Device().TensorMap(t)
	for i := range to.Words {
		to.Words[i] = binary.NativeEndian.Uint64(encoded[8*i:])
	}
	return err
}

// stepBytes returns the bytes from one to the next along an axis; the driver allows any multiple of 16 for an axis of
// one.
func stepBytes(v View, a tensor.Axis) int64 {
	if v.Len(a) == 1 {
		return 16
	}
	return v.Stride(a) * int64(v.DType().Size())
}
