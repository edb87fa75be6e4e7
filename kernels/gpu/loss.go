//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// CrossEntropy adds to loss, a float64 scalar, the sum of -log softmax(logits)[target] over rows
// with target >= 0. With grad, logits becomes scale times the gradient of that sum; rows without
// target become 0, whatever their logits were. targets: int32, one a row. A target outside the
// vocabulary makes the loss NaN; the data loader lets none in.
func (c *Ops) CrossEntropy(loss, logits, targets View, scale float64, grad bool) {
	denseActivations("cross entropy", logits)
	shape.Must(loss.Size() == 1 && loss.DType() == tensor.F64 && targets.DType() == tensor.I32 &&
		targets.IsDense() && targets.Size() == logits.Rows(), "cross entropy", loss, logits, targets)
	rows, n := logits.Rows(), logits.Cols()
	if n == 0 {
		return
	}
	kernel := "cross_entropy_" + typeNames[logits.DType()]
	if grad {
		kernel = "cross_entropy_grad_" + typeNames[logits.DType()]
	}
	// A row's logits stay in shared memory between the two passes over them, as far as they fit.
	// The kernel has a few arrays of its own.
	held, most := 0, (c.loader.Device().SharedPerBlock-1024)/16
	if grad {
		held = min(n/lanesOf(logits.DType()), most)
	}
	c.stream.Do("cross entropy", func() error {
		f, err := c.loader.Function("ops_loss", kernel, most*16)
		if err != nil {
			return err
		}
		const chunk = OpsWorkspace / 8 // rows whose losses fit in the workspace
		for lo := 0; lo < rows; lo += chunk {
			count := min(chunk, rows-lo)
			row := new(cuda.Args).Addr(c.work()).Addr(elementOf(logits, lo*n)).Addr(elementOf(targets,
				lo)).Int(n).Float(scale).Int(held)
			c.stream.Launch(f, cuda.Launch{Grid: cuda.Dim{X: count}, Block: cuda.Dim{X: 1024}, Shared: held * 16}, row)
			if err := c.addScalars(loss, count); err != nil {
				return err
			}
		}
		return nil
	})
}

// addScalars adds the sum of count float64 of the workspace to sum.
func (c *Ops) addScalars(sum View, count int) error {
	args := new(cuda.Args).View(sum).Addr(c.work()).Int(count)
	return c.launch("ops_optim", "add_scalars", cuda.Dim{X: 1}, cuda.Dim{X: 1024}, args)
}
