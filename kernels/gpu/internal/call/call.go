// Package call turns views and tiles into what the attention kernels of kernels/gpu/internal/source take as
// arguments. It launches nothing, so that the same call can go to a GPU or to a test without one.
package call

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/cprun/cprun/internal/base/heap"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// Tensors are the tensors of a block of a pass; unused ones are the zero View.
type Tensors struct {
	Q, K, V, DO, O, LSE, Delta, DQ, DK, DV View // as in package attention; O: the accumulator
}

// address returns the address of a view; NULL for the zero View.
func address(v View) uint64 {
	if v.IsZero() {
		return 0
	}
	return uint64(uintptr(v.Memory().Ptr())) + uint64(v.Offset()*int64(v.DType().Size()))
}

// Strided returns a view as kernels have it; of the zero View, NULL.
func Strided(v View) source.Strided {
	return source.Strided{At: address(v), Batch: v.Stride(tensor.Batch), Seq: v.Stride(tensor.Seq),
		Head: v.Stride(tensor.Heads)}
}

// Length returns the extent of v along an axis as kernels have it.
func Length(v View, axis tensor.Axis) int32 { return int32(v.Len(axis)) }

// InPieces reports whether the rows of all views are made of pieces of n elements which begin at
// multiples of a piece. Views that are zero do not count.
func InPieces(n int, views ...View) bool {
	for _, v := range views {
		if v.IsZero() {
			continue
		}
		ok := v.Len(tensor.Dim)%n == 0 && address(v)%uint64(n*v.DType().Size()) == 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			ok = ok && (v.Len(a) == 1 || v.Stride(a)%int64(n) == 0)
		}
		if !ok {
			return false
		}
	}
	return true
}

// Words returns the words of the structs xs, which have nothing but those.
func Words[T any](xs []T) []uint32 {
	if len(xs) == 0 {
		return nil
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(xs))), len(xs)*int(unsafe.Sizeof(xs[0])/4))
}

// Bound returns a bound of a band as the device has it: sums with indices do not overflow.
func Bound(x int) int32 { return int32(min(max(x, -1<<29), 1<<29)) }

// SinkProgram is the program of the kernels of sinks.
const SinkProgram = "attention_sink"

// SinkLaunch is a kernel of that program and its arguments.
type SinkLaunch struct {
	Kernel string
	Grid   [3]int
	// Threads and Shared are those of a block, Shared in bytes.
	Threads, Shared int
	Params          source.SinkParams
}

// FoldSink returns the launch of attention.Sinks.FoldSink, whose arguments have been checked.
func FoldSink(o, lse, sink View) (SinkLaunch, error) {
	const warps = 8 // rows of a block
	name, rows, err := sinkRows(o)
	return SinkLaunch{
		Kernel: "attention_sink_" + name, Grid: [3]int{(rows*o.Len(tensor.Heads) + warps - 1) / warps, 1, 1},
		Threads: 32 * warps,
		Params:  sinkParams(o, View{}, lse, sink, View{}),
	}, err
}

// SinkGrad returns the launch of attention.Sinks.SinkGrad, whose arguments have been checked.
func SinkGrad(dsink, do, o, lse, sink View) (SinkLaunch, error) {
	const warps = 32 // rows of a block at a time
	name, _, err := sinkRows(o)
	to := flashTypes[do.DType()]
	if err == nil && to == "" {
		err = fmt.Errorf("attention sink gradient with a do of %v: a GPU computes in float32 and 16-bit floats",
			do.DType())
	}
	return SinkLaunch{
		Kernel: "attention_sink_grad_" + name + "_" + to, Grid: [3]int{o.Len(tensor.Heads), 1, 1}, Threads: 32 * warps,
		Shared: 8 * warps,
		Params: sinkParams(o, do, lse, sink, dsink),
	}, err
}

// sinkRows returns the name of the type of o, and how many rows of all heads it has.
func sinkRows(o View) (name string, rows int, err error) {
	rows = o.Rows()
	switch name = flashTypes[o.DType()]; {
	case name == "":
		err = fmt.Errorf("attention sink with an O of %v: a GPU computes in float32 and 16-bit floats", o.DType())
	case rows > math.MaxInt32/max(o.Len(tensor.Heads), 1):
		err = fmt.Errorf("attention sink: %v has %d rows of %d heads; a GPU counts to 2^31", o, rows,
			o.Len(tensor.Heads))
	}
	return name, rows, err
}

func sinkParams(o, do, lse, sink, dsink View) source.SinkParams {
	return source.SinkParams{
		O: Strided(o), Dout: Strided(do), LSE: Strided(lse), Sink: address(sink), Dsink: address(dsink),
		Batch: Length(o, tensor.Batch), Seqs: Length(o, tensor.Seq), Heads: Length(o, tensor.Heads),
		Dim: Length(o, tensor.Dim),
	}
}

// Staging is host memory from which a stream copies lists to the device. It reuses memory after its copy is done, and
// takes more if the host is far ahead of the device. So the host never waits.
type Staging struct {
	heap   *heap.Heap
	copies []stagedCopy // in the order of the stream
}

// A stagedCopy is memory that a copy reads until done.
type stagedCopy struct {
	from View
	done tensor.Event
}

// stagingBlock sizes one allocation of host memory: lists of 1,000 documents for 30 calls.
const stagingBlock = 1 << 20

// NewStaging returns staging that takes its memory from alloc. The device can copy from it.
func NewStaging(alloc func(bytes int64) (tensor.Memory, error)) *Staging {
	return &Staging{heap: heap.New(stagingBlock, alloc)}
}

// Copy calls queue with a copy of words, which queue copies to the device, and then record for an event of the stream.
func (s *Staging) Copy(words []uint32, queue func(from View), record func() tensor.Event) error {
	for len(s.copies) > 0 && s.copies[0].done.Done() {
		s.heap.Free(s.copies[0].from)
		s.copies = s.copies[1:]
	}
	from, err := s.heap.Alloc(tensor.I32, len(words))
	if err != nil {
		return err
	}
	to := tensor.Data[int32](from)
	for i, w := range words {
		to[i] = int32(w)
	}
	queue(from)
	s.copies = append(s.copies, stagedCopy{from, record()})
	return nil
}
