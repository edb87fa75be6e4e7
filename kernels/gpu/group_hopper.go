//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
)

// onHopper returns the product for the kernels for Hopper.
func (g groupCall) onHopper() call.Group {
	operand := func(o kernels.Operand) call.GroupOperand {
		if o.ByToken {
			return call.GroupOperand{View: o.View, Tokens: g.p.Tokens, Factors: o.Factors}
		}
		return call.GroupOperand{View: o.View, Factors: o.Factors}
	}
	return call.Group{Product: g.kind, Out: g.to, A: operand(g.a), B: operand(g.b), Starts: g.p.Starts,
		Accumulate: g.accumulate}
}

// groupOnHopper queues a product on the kernels for Hopper, and reports whether they support it: dense, of 16 bits,
// with columns in multiples of 8, and gradients of weights in float32. The caller has checked that shapes match.
func (c *Ops) groupOnHopper(g call.Group) bool {
	l, ok := g.Hopper()
	if ok = ok && c.loader.Device().Arch == hopperArch; ok {
		c.stream.Do(fmt.Sprintf("group %v", g.Product), func() error { return c.launchGroup(&l) })
	}
	return ok
}

func (c *Ops) launchGroup(l *call.HopperGroup) error {
	dev, x := c.loader.Device(), &l.Params
	if c.taken == nil {
		m, err := dev.Alloc(8)
		if err != nil {
			return fmt.Errorf("the counters of grouped products: %w", err)
		}
		c.stream.Memset(m.Addr(), 0, 8)
		c.taken = m
	}
	x.Next = c.taken.Addr()
	for i, to := range []*source.TensorMap{&x.A, &x.B, &x.C} {
		if l.Maps[i].View.IsZero() {
			continue
		}
		if err := encodeMap(dev, to, l.Maps[i]); err != nil {
			return err
		}
	}
	f, err := c.loader.Function(l.Program, l.Kernel, l.Shared)
	if err != nil {
		return err
	}
	grid := cuda.Dim{X: min(l.Blocks, dev.SMs)}
	c.stream.Launch(f, cuda.Launch{Grid: grid, Block: cuda.Dim{X: l.Threads}, Shared: l.Shared},
		cuda.StructAligned(&cuda.Args{}, x, source.MapAlign))
	return nil
}
