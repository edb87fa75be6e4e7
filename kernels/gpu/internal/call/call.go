// Package call computes the launches of cprun's attention kernels (kernels/gpu/internal/source): the grid, the shared
// memory and the arguments. It launches nothing itself. Package gpu launches on a GPU, and tests run the kernels on a
// host:
//
//	f := call.Flash{Tensors: tensors, Shape: shape, Softmax: softmax, Tiles: tiles}
//	for _, l := range f.Forward() { … }
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

// Tensors holds the tensors of a block of a pass. Unused ones are the zero View.
type Tensors struct {
	Q, K, V, DO, O, LSE, Delta, DQ, DK, DV View // as in package attention; O: the accumulator
}

// Strided returns the kernels' form of a view: NULL for the zero View.
func Strided(v View) source.Strided {
	return source.Strided{At: v.Addr(), Batch: v.Stride(tensor.Batch), Seq: v.Stride(tensor.Seq),
		Head: v.Stride(tensor.Heads)}
}

// Length returns the length of v along an axis, in the kernels' type.
func Length(v View, axis tensor.Axis) int32 { return int32(v.Len(axis)) }

// InPieces reports whether the rows of all views consist of aligned pieces of n elements. It ignores zero Views.
func InPieces(n int, views ...View) bool {
	for _, v := range views {
		if v.IsZero() {
			continue
		}
		ok := v.Len(tensor.Dim)%n == 0 && v.Addr()%uint64(n*v.DType().Size()) == 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			ok = ok && (v.Len(a) == 1 || v.Stride(a)%int64(n) == 0)
		}
		if !ok {
			return false
		}
	}
	return true
}

// Words returns the memory of the structs xs as 32-bit words.
func Words[T any](xs []T) []uint32 {
	if len(xs) == 0 {
		return nil
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(xs))), len(xs)*int(unsafe.Sizeof(xs[0])/4))
}

// Bound limits a bound of a band, so that its sums with indices do not overflow on the device.
func Bound(x int) int32 { return int32(min(max(x, -1<<29), 1<<29)) }

// SinkProgram is the program of the kernels of sinks.
const SinkProgram = "attention_sink"

// SinkLaunch is the launch of a kernel of sinks.
type SinkLaunch struct {
	Kernel          string
	Grid            [3]int
	Threads, Shared int // of a block; Shared in bytes
	Params          source.SinkParams
}

// FoldSink returns the launch of attention.Sinks.FoldSink, whose arguments the caller has checked.
func FoldSink(o, lse, sink View) (SinkLaunch, error) {
	const warps = 8 // rows of a block
	name, rows, err := sinkRows(o)
	return SinkLaunch{
		Kernel: "attention_sink_" + name, Grid: [3]int{(rows*o.Len(tensor.Heads) + warps - 1) / warps, 1, 1},
		Threads: 32 * warps,
		Params:  sinkParams(o, View{}, lse, sink, View{}),
	}, err
}

// SinkGrad returns the launch of attention.Sinks.SinkGrad, whose arguments the caller has checked.
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

// sinkRows returns the name of o's type, and the number of its rows.
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
		O: Strided(o), Dout: Strided(do), LSE: Strided(lse), Sink: sink.Addr(), Dsink: dsink.Addr(),
		Batch: Length(o, tensor.Batch), Seqs: Length(o, tensor.Seq), Heads: Length(o, tensor.Heads),
		Dim: Length(o, tensor.Dim),
	}
}

// Staging is host memory from which a stream copies lists to the device. It reuses memory after the copy, and allocates
// more if the host is far ahead of the device. So the host never waits.
type Staging struct {
	heap   *heap.Heap
	copies []stagedCopy // in the order of the stream
}

// A stagedCopy holds the memory of a copy until done.
type stagedCopy struct {
	from View
	done tensor.Event
}

// stagingBlock is the size of one allocation of host memory, enough for the lists of 1,000 documents for 30 calls.
const stagingBlock = 1 << 20

// NewStaging returns staging with memory from alloc, which the device must be able to copy from.
func NewStaging(alloc func(bytes int64) (tensor.Memory, error)) *Staging {
	return &Staging{heap: heap.New(stagingBlock, alloc)}
}

// Copy copies words to host memory and calls queue, which queues the copy to the device. Then it calls record for an
// event of the stream.
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
