package cpu

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Embed sets row i of y to row ids[i] of table [vocab, hidden]. ids: int32. An id outside the
// vocabulary poisons the stream.
func (c *Kernels) Embed(y, table, ids tensor.View) {
	if isHalf(y.DType()) {
		c.halfEmbed(y, table, ids)
		return
	}
	checkEmbed("embed", y, table, ids)
	forType(y, embed[float64], embed[float32])(c, y, table, ids)
}

// checkEmbed panics unless x [rows, hidden], table [vocab, hidden] and ids [rows] match.
func checkEmbed(op string, x, table, ids tensor.View) {
	dense(op, x.DType(), x, table)
	shape.Must(x.Cols() == table.Cols() && ids.Size() == x.Rows() && ids.DType() == tensor.I32 &&
		ids.IsDense(), op, x, table, ids)
}

func embed[T tensor.Element](c *Kernels, y, table, ids tensor.View) {
	ys, ts, is := tensor.Data[T](y), tensor.Data[T](table), tensor.Data[int32](ids)
	n, vocab := y.Cols(), table.Rows()
	c.stream.Do("embed", func() error {
		if err := inVocab("embed: token id", is, 0, vocab); err != nil {
			return err
		}
		c.blocks(len(is), rowBlock(n), func(_, lo, hi int) {
			for r := lo; r < hi; r++ {
				id := int(is[r])
				copy(ys[r*n:(r+1)*n], ts[id*n:(id+1)*n])
			}
		})
		return nil
	})
}

// inVocab returns an error for the first id outside [least, vocab).
func inVocab(what string, ids []int32, least, vocab int) error {
	for i, id := range ids {
		if int(id) < least || int(id) >= vocab {
			return fmt.Errorf("%s %d at position %d of this rank is outside the vocabulary of %d: the data was made "+
				"with another tokenizer", what, id, i, vocab)
		}
	}
	return nil
}

// EmbedBackward adds row i of dy to row ids[i] of dtable.
func (c *Kernels) EmbedBackward(dtable, dy, ids tensor.View) {
	if isHalf(dy.DType()) {
		c.halfEmbedBackward(dtable, dy, ids)
		return
	}
	checkEmbed("embed backward", dy, dtable, ids)
	forType(dy, embedBackward[float64], embedBackward[float32])(c, dtable, dy, ids)
}

// embedCols is the number of columns in one piece of work. The split is by columns, and each piece visits all tokens in
// order, so that the rows of repeated tokens are added in order.
const embedCols = 64

func embedBackward[T tensor.Float](c *Kernels, dtable, dy, ids tensor.View) {
	l, ts, ys, is := simd.LoopsOf[T](c.level), tensor.Data[T](dtable), tensor.Data[T](dy), tensor.Data[int32](ids)
	n, vocab := dy.Cols(), dtable.Rows()
	c.stream.Do("embed backward", func() error {
		if err := inVocab("embed backward: token id", is, 0, vocab); err != nil {
			return err
		}
		c.blocks(n, embedCols, func(_, lo, hi int) {
			for r, id := range is {
				to := ts[int(id)*n+lo : int(id)*n+hi]
				l.AddTo(to, to, ys[r*n+lo:r*n+hi])
			}
		})
		return nil
	})
}

// CrossEntropy adds the sum of -log softmax(logits)[target] over rows with target >= 0 to loss, a float64 scalar. With
// grad, it replaces logits by scale times the gradient of that sum, and by 0 in rows without a target. If softcap is
// not 0, logits are the results of SoftCap, and the gradient is that of its arguments. targets: int32, one per row. A
// target outside the vocabulary poisons the stream.
func (c *Kernels) CrossEntropy(loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	if isHalf(logits.DType()) {
		c.halfCrossEntropy(loss, logits, targets, scale, softcap, grad)
		return
	}
	dense("cross entropy", logits.DType(), logits)
	shape.Must(loss.Size() == 1 && loss.DType() == tensor.F64 && targets.DType() == tensor.I32 &&
		targets.IsDense() && targets.Size() == logits.Rows(), "cross entropy", loss, logits, targets)
	forType(logits, crossEntropy[float64], crossEntropy[float32])(c, loss, logits, targets, scale, softcap, grad)
}

func crossEntropy[T tensor.Float](c *Kernels, loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	l, sum := simd.LoopsOf[T](c.level), tensor.Data[float64](loss)
	ls, ts := tensor.Data[T](logits), tensor.Data[int32](targets)
	n := logits.Cols()
	c.stream.Do("cross entropy", func() error {
		if err := inVocab("cross entropy: target", ts, math.MinInt32, n); err != nil {
			return err
		}
		rows := grow(&c.sums, len(ts)) // the losses, which are added in order below
		size := rowBlock(n)
		c.split((len(ts)+size-1)/size, func(s *scratch, block int) {
			for r := block * size; r < min(len(ts), (block+1)*size); r++ {
				row := ls[r*n : (r+1)*n]
				switch {
				case ts[r] >= 0 && grad && softcap > 0:
					mem := open[T](s, n)
					capped := mem.take(n)
					copy(capped, row)
					rows[r] = rowLoss(l, row, int(ts[r]), scale, grad)
					for i, y := range capped {
						tanh := float64(y) / softcap
						row[i] *= T(1 - tanh*tanh)
					}
				case ts[r] >= 0:
					rows[r] = rowLoss(l, row, int(ts[r]), scale, grad)
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

// rowLoss returns log(sum(exp(logits))) - logits[target]. It subtracts the largest logit in both terms, so that
// exponentials do not overflow and large logits do not cancel. With grad, it replaces logits by
// scale * (softmax - onehot(target)).
func rowLoss[T tensor.Float](l simd.Loops[T], logits []T, target int, scale float64, grad bool) float64 {
	hit := float64(logits[target])
	var row rowSum[T]
	row.add(l, logits, grad)
	hit -= row.top
	if grad {
		for i := range row.count() {
			piece := row.piece(i)
			l.Scaled(piece, piece, T(scale/row.sum*math.Exp(float64(row.tops[i])-row.top)))
		}
		// In float64: for a likely target, softmax - 1 has no digits left in float32.
		logits[target] = T(scale * (math.Exp(hit)/row.sum - 1))
	}
	return math.Log(row.sum) - hit
}

// rowSum adds up the exponentials of a row of logits in one pass over memory. It takes pieces that fit the cache, each
// relative to its largest logit, and then combines the pieces' sums.
type rowSum[T tensor.Float] struct {
	logits []T
	size   int // of a piece; the last may be shorter
	tops   [mostPieces]T
	sums   [mostPieces]float64

	top, sum float64 // the largest logit, and the sum of e^(logit-top)
}

const (
	mostPieces = 64
	leastPiece = 1 << 12
)

func (s *rowSum[T]) count() int { return (len(s.logits) + s.size - 1) / s.size }

func (s *rowSum[T]) piece(i int) []T {
	return s.logits[i*s.size : min((i+1)*s.size, len(s.logits))]
}

// add sums the exponentials of logits. With replace, it also replaces each logit by its exponential relative to the
// largest of its piece; the sum has the same bits.
func (s *rowSum[T]) add(l simd.Loops[T], logits []T, replace bool) {
	s.logits, s.size = logits, max(leastPiece, (len(logits)+mostPieces-1)/mostPieces)
	s.top = math.Inf(-1)
	for i := range s.count() {
		piece := s.piece(i)
		top := l.MaxOf(piece)
		s.tops[i], s.top = top, max(s.top, float64(top))
		if math.IsInf(float64(top), -1) {
			top = 0 // -Inf minus itself is NaN; so, the sum is 0
		}
		if replace {
			s.sums[i] = l.ExpSum(piece, piece, top)
		} else {
			s.sums[i] = l.SumExp(piece, top)
		}
	}
	for i := range s.count() {
		s.sum += s.sums[i] * math.Exp(float64(s.tops[i])-s.top)
	}
}
