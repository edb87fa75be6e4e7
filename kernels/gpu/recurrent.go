//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Conv sets y to silu of the causal depthwise convolution of x in each segment; see model.Ops.
func (c *Ops) Conv(y, x, before, w View, segments []partition.Range) {
	const op = "conv"
	checkConv(op, before, w, segments, y, x)
	v := call.Conv{X: x, Before: before, Y: y, W: w, Segments: segments}
	c.stream.Do(op, func() error { return c.convolve("conv_", v, View{}) })
}

// ConvBackward sets dx and dbefore, and adds to dw unless that is the zero View; see model.Ops.
func (c *Ops) ConvBackward(dx, dbefore, dw, dy, x, before, w View, segments []partition.Range) {
	const op = "conv backward"
	checkConv(op, before, w, segments, dx, dy, x)
	checkConv(op, dbefore, w, segments, dx)
	if !dw.IsZero() {
		checkConv(op, before, dw, segments, x)
	}
	v := call.Conv{X: x, Before: before, Y: dy, DX: dx, Dbefore: dbefore, W: w, Segments: segments}
	c.stream.Do(op, func() error { return c.convolve("conv_backward_", v, dw) })
}

// checkConv does what shape.Conv does, and checks the types.
func checkConv(op string, before, w View, segments []partition.Range, xs ...View) {
	shape.Conv(op, before, w, segments, xs...)
	shape.Must(xs[0].DType() != tensor.F64 && typeNames[xs[0].DType()] != "", op, xs...)
	denseFloats(op, w)
}

// convolve queues the launches of a convolution, and unless dw is the zero View, the sums of their partial sums of dw.
func (c *Ops) convolve(kernel string, v call.Conv, dw View) error {
	if v.X.Size() == 0 {
		return nil
	}
	list, vectors := v.Launches()
	if !vectors {
		kernel += "any_"
	}
	kernel += typeNames[v.X.DType()]
	block := cuda.Dim{X: 32, Y: call.ConvWarps}
	for _, l := range list {
		grid := cuda.Dim{X: l.Grid[0], Y: l.Grid[1]}
		if !dw.IsZero() {
			blocks, err := c.parts("ops_conv", kernel, block.X*block.Y, grid.X*grid.Y, ceilDiv(dw.Size(), grid.Y))
			if err != nil {
				return err
			}
			grid.X, l.Params.Partial = max(1, blocks/grid.Y), c.work()
		}
		err := c.launchShared("ops_conv", kernel, grid, block, call.ConvShared, cuda.Struct(new(cuda.Args), &l.Params))
		if err == nil && !dw.IsZero() {
			err = c.addColumns(dw, c.work(), grid.X)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Gates sets g = -exp(aLog) * softplus(a + dt) and beta = sigmoid(b); see model.Ops.
func (c *Ops) Gates(g, beta, a, b, aLog, dt View) {
	const op = "gates"
	checkGates(op, []View{a, b}, aLog, dt, g, beta)
	c.stream.Do(op, func() error {
		args := new(cuda.Args).View(g).View(beta).View(a).View(b).View(aLog).View(dt).Int64(int64(a.Size())).Int(a.Cols())
		return c.launch("ops_conv", "gates_"+typeNames[a.DType()], cuda.Dim{X: ceilDiv(a.Size(), 256)},
			cuda.Dim{X: 256}, args)
	})
}

// checkGates panics unless the types are those of activations and of parameters, and the shapes match.
func checkGates(op string, activations []View, aLog, dt View, params ...View) {
	denseActivations(op, activations...)
	denseFloats(op, append(params, aLog, dt)...)
	shape.Gates(op, []View{aLog, dt}, append(params, activations...)...)
}

// GatesBackward sets da and db, given dg and dbeta, and adds to daLog and ddt, unless one is the zero View.
func (c *Ops) GatesBackward(da, db, daLog, ddt, dg, dbeta, g, beta, a, aLog, dt View) {
	const op = "gates backward"
	checkGates(op, []View{a, da, db}, aLog, dt, dg, dbeta, g, beta)
	rows, heads, sums := a.Rows(), a.Cols(), []View{ddt, daLog}
	for _, v := range sums {
		if !v.IsZero() {
			checkGates(op, []View{a}, aLog, v, g)
		}
	}
	if a.Size() == 0 {
		return
	}
	c.stream.Do(op, func() error {
		name := "gates_backward_" + typeNames[a.DType()]
		parts, err := c.parts("ops_conv", name, 32*call.ConvWarps, ceilDiv(rows, call.ConvWarps), 2*heads)
		if err != nil {
			return err
		}
		args := new(cuda.Args).View(da).View(db).Addr(c.work()).View(dg).View(dbeta).View(g).View(beta).View(a).View(aLog).
			View(dt).Int(rows).Int(heads)
		grid, block := cuda.Dim{X: parts, Y: ceilDiv(heads, 32)}, cuda.Dim{X: 32, Y: call.ConvWarps}
		err = c.launchShared("ops_conv", name, grid, block, call.ConvShared, args)
		for i, v := range sums {
			if err == nil && !v.IsZero() {
				err = c.addColumns(v, c.work()+uint64(4*i*parts*heads), parts)
			}
		}
		return err
	})
}
