//go:build cuda

package gpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/tensor"
)

// Reference computes attention by its definition on a GPU: float32, bfloat16 and float16 inputs, float64 arithmetic,
// one warp per row. Tests compare other kernels with it, and backends use it for float32. Its results have the same
// bits in every run. It implements attention.Kernel. Only one goroutine may call it.
type Reference struct{ deviceAttention }

// NewReference returns a reference that computes on stream.
func NewReference(stream *cuda.Stream, loader *Loader) (*Reference, error) {
	d, err := newDeviceAttention(stream, loader)
	return &Reference{d}, err
}

// Forward begins a forward pass; see attention.Kernel.
func (r *Reference) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	pass, err := r.begin(r, o, acc, q, p)
	if err == nil {
		err = r.scores("reference attention forward", p.Scores)
	}
	if err != nil {
		return nil, err
	}
	if p.Scores != nil && !p.Scores.Max.IsZero() {
		r.stream.Do("attention reset", func() error { return r.fill(p.Scores.Max, math.Inf(-1)) })
	}
	return pass, nil
}

// Backward begins a backward pass; see attention.Kernel.
func (r *Reference) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	pass, err := r.beginBackward(r, dq, do, q, s, p)
	if err == nil {
		err = r.scores("reference attention backward", p.Scores)
	}
	if err == nil && p.Scores != nil && !p.Scores.DBias.IsZero() {
		err = r.zero(p.Scores.DBias)
	}
	if err != nil {
		return nil, err
	}
	return pass, nil
}

// scores returns an error unless the tensors of s are float32 on the device.
func (r *Reference) scores(what string, s *attention.Scores) error {
	if s == nil {
		return nil
	}
	there := slices.DeleteFunc([]View{s.Slopes, s.Bias, s.DBias, s.Max}, func(v View) bool { return v.IsZero() })
	return r.floats(what, there...)
}

func (r *Reference) forwardBlock(x *deviceForward, b attention.Block) error {
	c := call.Reference{Tensors: call.Tensors{Q: x.q, K: b.K, V: b.V, O: x.acc.O, LSE: x.acc.LSE}, Softmax: x.p,
		Tiles: b.Tiles, Columns: b.Columns}
	program, err := r.usable("reference attention forward", &c, x.acc.O, x.acc.LSE)
	if err != nil {
		return err
	}
	x.reset()
	r.run("attention forward", c.Forward(program))
	return nil
}

func (r *Reference) backwardBlock(x *deviceBackward, b attention.GradBlock) error {
	c := call.Reference{
		Tensors: call.Tensors{Q: x.q, K: b.K, V: b.V, DO: x.do, LSE: x.s.LSE, Delta: x.s.Delta, DQ: x.dq, DK: b.DK,
			DV: b.DV},
		Softmax: x.p, Tiles: b.Tiles, Columns: b.Columns,
	}
	program, err := r.usable("reference attention backward", &c, x.do, x.s.LSE, x.s.Delta, x.dq, b.DK, b.DV)
	if err != nil {
		return err
	}
	if err := r.zeroFresh(b); err != nil {
		return err
	}
	r.run("attention backward", c.Backward(program))
	return nil
}

// usable returns the program for the call. It checks the inputs beyond the checks of package attention.
func (r *Reference) usable(what string, c *call.Reference, others ...View) (program string, err error) {
	if c.Q.DType() == tensor.F64 {
		return "", fmt.Errorf("%s in float64: a GPU computes in float32 and 16-bit floats; use the CPU", what)
	}
	if program, err = c.Program(what); err != nil {
		return "", err
	}
	return program, r.loader.onDevice(what, append([]View{c.Q, c.K, c.V}, others...)...)
}

// run queues the launches as one piece of work of the stream.
func (r *Reference) run(what string, launches []call.ReferenceLaunch) {
	if len(launches) == 0 {
		return
	}
	r.stream.Do(what, func() error {
		for i := range launches {
			l := &launches[i]
			list, err := r.upload(l.Lists)
			if err != nil {
				return err
			}
			l.At(list)
			grid, block := cuda.Dim{X: l.Grid[0], Y: l.Grid[1], Z: l.Grid[2]}, cuda.Dim{X: l.Block[0], Y: l.Block[1]}
			if err := r.launch(l.Program, l.Kernel, cuda.Launch{Grid: grid, Block: block},
				cuda.Struct(&cuda.Args{}, &l.Params)); err != nil {
				return err
			}
		}
		return nil
	})
}

var _ attention.Kernel = (*Reference)(nil)

// FoldSink folds sinks into attention; see attention.Sinks.
func (c *Ops) FoldSink(o, lse, sink View) error {
	if err := attention.CheckFoldSink(o, lse, sink); err != nil {
		return err
	}
	l, err := call.FoldSink(o, lse, sink)
	if err != nil {
		return err
	}
	return c.sink("attention sink", o.Size(), l, o, lse, sink)
}

// SinkGrad sets dsink to the gradient of the sinks; see attention.Sinks. Its results have the same bits in every run.
func (c *Ops) SinkGrad(dsink, do, o, lse, sink View) error {
	if err := attention.CheckSinkGrad(dsink, do, o, lse, sink); err != nil {
		return err
	}
	l, err := call.SinkGrad(dsink, do, o, lse, sink)
	if err != nil {
		return err
	}
	return c.sink("attention sink gradient", dsink.Size(), l, dsink, do, o, lse, sink)
}

// sink queues a kernel of sinks. writes is the number of elements that it writes.
func (c *Ops) sink(what string, writes int, l call.SinkLaunch, views ...View) error {
	place := c.loader.Device().Place()
	for _, v := range views {
		if v.IsZero() || v.Memory().Device() != place {
			return fmt.Errorf("%s: %v is not on %v", what, v, place)
		}
	}
	if writes == 0 {
		return nil
	}
	c.stream.Do(what, func() error {
		f, err := c.loader.Function(call.SinkProgram, l.Kernel, l.Shared)
		if err != nil {
			return err
		}
		grid := cuda.Dim{X: l.Grid[0], Y: l.Grid[1], Z: l.Grid[2]}
		c.stream.Launch(f, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
			cuda.Struct(&cuda.Args{}, &l.Params))
		return nil
	})
	return nil
}

var _ attention.Sinks = (*Ops)(nil)
