package call

import (
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Conv is a convolution; see model.Ops. Y is its result, or the gradient of that.
type Conv struct {
	X, Before, Y, DX, Dbefore, W View // without gradients, DX and Dbefore are zero Views
	Segments                     []partition.Range
}

// A ConvLaunch is the launch of a kernel of a convolution.
type ConvLaunch struct {
	Grid   [2]int // of blocks of 32 by ConvWarps threads
	Params source.Conv
}

// The constants of ops_conv.cu.
const (
	convRows   = 32   // of a tile
	convLanes  = 4    // columns of a thread
	ConvWarps  = 8    // of a block
	ConvShared = 2048 // bytes of shared memory of a block
)

// Launches returns the launches: of the kernels for vectors, or otherwise of the kernels _any.
func (c Conv) Launches() (list []ConvLaunch, vectors bool) {
	n, width, batch, columns := c.X.Len(tensor.Dim), c.W.Len(tensor.Dim), c.X.Len(tensor.Batch), 32
	if vectors = width == 4 && InPieces(convLanes, c.X, c.Before, c.Y, c.DX, c.Dbefore, c.W); vectors {
		columns *= convLanes
	}
	for lo := 0; lo < len(c.Segments); lo += source.ConvSegments {
		segments := c.Segments[lo:min(len(c.Segments), lo+source.ConvSegments)]
		p := source.Conv{X: convRowsOf(c.X, 0), Before: convRowsOf(c.Before, lo*batch), Y: convRowsOf(c.Y, 0),
			DX: convRowsOf(c.DX, 0), Dbefore: convRowsOf(c.Dbefore, lo*batch), W: c.W.Addr(),
			N: int32(n), Width: int32(width), Batch: int32(batch), Count: int32(len(segments))}
		for i, s := range segments {
			p.Segments[i] = source.ConvSegment{Lo: int32(s.Lo), Hi: int32(s.Hi), First: p.Tiles}
			p.Tiles += int32((s.Len() + convRows - 1) / convRows)
		}
		blocks := (int(p.Tiles)*batch + ConvWarps - 1) / ConvWarps
		list = append(list, ConvLaunch{[2]int{blocks, (n + columns - 1) / columns}, p})
	}
	return list, vectors
}

// convRowsOf returns the kernels' form of a view since a sample: NULL for the zero View.
func convRowsOf(v View, sample int) source.ConvRows {
	if v.IsZero() {
		return source.ConvRows{}
	}
	v = v.Slice(tensor.Batch, sample, v.Len(tensor.Batch))
	return source.ConvRows{At: v.Addr(), Sample: v.Stride(tensor.Batch), Row: int32(v.Stride(tensor.Seq))}
}
