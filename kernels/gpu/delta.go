//go:build cuda

package gpu

import (
	"context"
	"errors"
	"fmt"
	"math/bits"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// Delta computes the gated delta rule on a GPU: q of float32, bfloat16 or float16, dim up to 256, and any dimV. In 16
// bits, it rounds factors of products to the type of q. Results have the same bits in every run. It implements
// delta.Kernel. Only one goroutine may call it.
type Delta struct {
	stream    *cuda.Stream
	loader    *Loader
	most      int64 // DeltaWorkspace, or less in tests
	shared    int   // bytes of shared memory of a block, or fewer in tests
	workspace *cuda.Memory
}

// NewDelta returns a Delta that computes on stream. It allocates its workspace when calls need it, until the device is
// closed. A call that needs more waits for the stream.
func NewDelta(stream *cuda.Stream, loader *Loader) *Delta {
	return &Delta{stream: stream, loader: loader, most: DeltaWorkspace, shared: loader.Device().SharedPerBlock}
}

// Summarize sets Maps; see delta.Kernel.
func (d *Delta) Summarize(a delta.Args) error { return d.queue("delta summarize", a) }

// Forward sets O; see delta.Kernel.
func (d *Delta) Forward(a delta.Args) error { return d.queue("delta forward", a) }

// SummarizeBackward sets DMaps; see delta.Kernel.
func (d *Delta) SummarizeBackward(a delta.Args) error { return d.queue("delta summarize backward", a) }

// Backward sets the gradients; see delta.Kernel.
func (d *Delta) Backward(a delta.Args) error { return d.queue("delta backward", a) }

// Compose composes maps, or applies them to states; see delta.Kernel.
func (d *Delta) Compose(dst, later, earlier View) error {
	const op = "delta compose"
	err := delta.CheckCompose(dst, later, earlier)
	if err = errors.Join(err, d.loader.onDevice(op, dst, later, earlier)); err != nil {
		return err
	}
	if later.DType() != tensor.F32 {
		return fmt.Errorf("%s of %v: a GPU computes in float32; use the CPU", op, later.DType())
	}
	p, grid, shared := call.DeltaCompose(dst, later, earlier)
	if dst.Size() == 0 {
		return nil
	}
	d.stream.Do(op, func() error {
		return d.launch(source.DeltaShape{Hopper: d.hopper()}.Program().Name, "delta_compose", grid, shared,
			cuda.Struct(new(cuda.Args), &p))
	})
	return nil
}

func (d *Delta) hopper() bool { return d.loader.Device().Arch == hopperArch }

func (d *Delta) queue(op string, a delta.Args) error {
	a, err := a.Check(op)
	if err != nil {
		return err
	}
	for _, v := range a.Views() {
		if !v.IsZero() {
			err = errors.Join(err, d.loader.onDevice(op, *v))
		}
	}
	c := call.Delta{Args: a, Op: op, Hopper: d.hopper(), Shared: d.shared,
		SMs: d.loader.Device().SMs, Most: d.most, Alloc: d.alloc}
	program, unsupported := c.Program()
	if err = errors.Join(err, unsupported); err != nil || len(a.Segments)*a.V.Size() == 0 {
		return err
	}
	launches, err := c.Launches()
	if err != nil {
		return fmt.Errorf("%s: workspace: %w", op, err)
	}
	d.stream.Do(op, func() error {
		for i := range launches {
			l := &launches[i]
			if err := d.launch(program, l.Kernel, l.Grid, l.Shared, cuda.Struct(new(cuda.Args), &l.Params)); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// alloc returns the address of workspace. Larger workspace replaces smaller, after the work that uses it.
func (d *Delta) alloc(n int64) (uint64, error) {
	if d.workspace != nil && d.workspace.Bytes() < n {
		if err := errors.Join(d.stream.Sync(context.Background()), d.workspace.Free()); err != nil {
			return 0, err
		}
		d.workspace = nil
	}
	if d.workspace == nil {
		m, err := d.loader.Device().Alloc(max(n, min(d.most, 1<<bits.Len64(uint64(n)))))
		if err != nil {
			return 0, err
		}
		d.workspace = m
	}
	return d.workspace.Addr(), nil
}

func (d *Delta) launch(program, kernel string, grid [3]int, shared int, args *cuda.Args) error {
	f, err := d.loader.Function(program, kernel, shared)
	if err == nil {
		d.stream.Launch(f, cuda.Launch{Grid: cuda.Dim{X: grid[0], Y: grid[1], Z: grid[2]},
			Block: cuda.Dim{X: source.DeltaThreads}, Shared: shared}, args)
	}
	return err
}
