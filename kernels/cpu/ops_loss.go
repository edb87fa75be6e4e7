package cpu

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// CrossEntropy adds to loss, a float64 scalar, the sum of -log softmax(logits)[target] over
// rows with target >= 0. With grad, logits becomes scale times the gradient of that sum; rows
// without target become 0, whatever their logits were. targets: int32, one a row. A target
// outside the vocabulary poisons the stream.
func (c *Kernels) CrossEntropy(loss, logits, targets View, scale float64, grad bool) {
	dense("cross entropy", logits.DType(), logits)
	shape.Must(loss.Size() == 1 && loss.DType() == tensor.F64 && targets.DType() == tensor.I32 &&
		targets.IsDense() && targets.Size() == logits.Rows(), "cross entropy", loss, logits, targets)
	if logits.DType() == tensor.F64 {
		crossEntropy[float64](c, loss, logits, targets, scale, grad)
		return
	}
	crossEntropy[float32](c, loss, logits, targets, scale, grad)
}

func crossEntropy[T tensor.Float](c *Kernels, loss, logits, targets View, scale float64, grad bool) {
	sum, ls, ts := tensor.Data[float64](loss), tensor.Data[T](logits), tensor.Data[int32](targets)
	n := logits.Cols()
	c.stream.Do("cross entropy", func() error {
		for i, t := range ts {
			if int(t) >= n {
				return fmt.Errorf("cross entropy: target %d at position %d of this rank is outside the vocabulary of %d: the data was made with another tokenizer", t, i, n)
			}
		}
		rows := grow(&c.ops.f64, len(ts)) // one loss a row, so that they can be added in order
		c.blocks(len(ts), rowBlock(n), func(_, lo, hi int) {
			for r := lo; r < hi; r++ {
				row := ls[r*n : (r+1)*n]
				switch {
				case ts[r] >= 0 && grad:
					rows[r] = rowLossGrad(row, int(ts[r]), scale)
				case ts[r] >= 0:
					rows[r] = rowLoss(row, int(ts[r]))
				case grad:
					clear(row)
				}
			}
		})
		for r, t := range ts {
			if t >= 0 {
				sum[0] += rows[r]
			}
		}
		return nil
	})
}

// lossPiece is the logits whose exponentials are added in one go, in float32 as fast as the
// vocabulary of a large model needs it. The sum over pieces is in float64.
const lossPiece = 256

// rowLoss is log(sum(exp(logits))) - logits[target], with the largest logit taken out of
// both terms: the exponential cannot overflow, and large logits do not cancel.
func rowLoss[T tensor.Float](logits []T, target int) float64 {
	top := maxLogit(logits)
	var buf [lossPiece]T
	sum := 0.0
	for lo := 0; lo < len(logits); lo += lossPiece {
		piece := buf[:copy(buf[:], logits[lo:])]
		sum += expRow(piece, top)
	}
	return math.Log(sum) - (float64(logits[target]) - float64(top))
}

// rowLossGrad is rowLoss, to the bit, and replaces logits by scale * (softmax -
// onehot(target)).
func rowLossGrad[T tensor.Float](logits []T, target int, scale float64) float64 {
	top := maxLogit(logits)
	hit := float64(logits[target]) - float64(top)
	sum := 0.0
	for lo := 0; lo < len(logits); lo += lossPiece {
		sum += expRow(logits[lo:min(lo+lossPiece, len(logits))], top)
	}
	// In float64: in float32, softmax - 1 loses every digit where the target is likely.
	atTarget := T(scale * (float64(logits[target])/sum - 1))
	factor := scale / sum
	for i, e := range logits {
		logits[i] = T(float64(e) * factor)
	}
	logits[target] = atTarget
	return math.Log(sum) - hit
}

// expRow replaces x by exp(x - top) and returns the sum.
func expRow[T tensor.Float](x []T, top T) float64 {
	switch x := any(x).(type) {
	case []float32:
		return expRow32(x, float32(top))
	case []float64:
		return expRow64(x, float64(top))
	}
	panic("kernels: exponential of an unknown float type")
}

// maxLogit leaves NaN out; it comes back through the exponential.
func maxLogit[T tensor.Float](xs []T) T {
	top := xs[0]
	for _, x := range xs[1:] {
		if x > top {
			top = x
		}
	}
	return top
}
