//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
)

// Draw sets v, float32 or of 16 bits, to elements lo, lo+1, ... of n. They are those of the host, unless the logarithm
// of a number beyond 3.4 standard deviations is rounded differently.
func (c *Ops) Draw(v View, lo int64, n kernels.Normals) {
	denseActivations("draw", v)
	shape.Must(lo >= 0, "draw", v)
	if v.Size() == 0 {
		return
	}
	const warps = 4
	size := int64(v.Size())
	blocks := (lo+size-1)/kernels.NormalBlock - lo/kernels.NormalBlock + 1
	c.stream.Do("draw", func() error {
		args := cuda.Struct(new(cuda.Args).View(v), call.Strips())
		step := uint64(kernels.NormalStep)
		cuda.Struct(args, &source.Normals{Seed: int64(n.Seed), Stream: int64(n.Stream), Step: int64(step), Lo: lo,
			N: size, Std: n.Std})
		return c.launch("ops_draw", "draw_"+typeNames[v.DType()], cuda.Dim{X: ceilDiv(int(blocks), warps)},
			cuda.Dim{X: 32 * warps}, args)
	})
}
