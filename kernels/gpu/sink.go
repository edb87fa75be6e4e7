//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
)

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

// SinkGrad sets dsink to the gradient of the sinks; see attention.Sinks. Its results are the same bits
// in every run.
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

// sink queues a kernel of sinks that writes that many elements.
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
