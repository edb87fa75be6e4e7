package call

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

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
