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
	if y.DType() == tensor.F64 {
		embed[float64](c, y, table, ids)
		return
	}
	embed[float32](c, y, table, ids)
}

// checkEmbed panics unless x [rows, hidden] and table [vocab, hidden] go with ids [rows].
func checkEmbed(op string, x, table, ids tensor.View) {
	dense(op, x.DType(), x, table)
	shape.Must(x.Cols() == table.Cols() && ids.Size() == x.Rows() && ids.DType() == tensor.I32 &&
		ids.IsDense(), op, x, table, ids)
}

func embed[T tensor.Element](c *Kernels, y, table, ids tensor.View) {
	ys, ts, is := tensor.Data[T](y), tensor.Data[T](table), tensor.Data[int32](ids)
	n, vocab := y.Cols(), table.Rows()
	c.stream.Do("embed", func() error {
		if err := inVocab("embed", is, vocab); err != nil {
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

// inVocab returns an error that names the first id outside [0, vocab).
func inVocab(op string, ids []int32, vocab int) error {
	for i, id := range ids {
		if id < 0 || int(id) >= vocab {
			return fmt.Errorf("%s: token id %d at position %d of this rank is outside the vocabulary of %d: the data "+
				"was made with another tokenizer", op, id, i, vocab)
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
	if dy.DType() == tensor.F64 {
		embedBackward[float64](c, dtable, dy, ids)
		return
	}
	embedBackward[float32](c, dtable, dy, ids)
}

// embedCols is the columns of one piece of work: a token that occurs twice must be added
// in order, so the split is by columns and each piece goes through all tokens.
const embedCols = 64

func embedBackward[T tensor.Float](c *Kernels, dtable, dy, ids tensor.View) {
	l, ts, ys, is := simd.LoopsOf[T](c.level), tensor.Data[T](dtable), tensor.Data[T](dy), tensor.Data[int32](ids)
	n, vocab := dy.Cols(), dtable.Rows()
	c.stream.Do("embed backward", func() error {
		if err := inVocab("embed backward", is, vocab); err != nil {
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

// CrossEntropy adds to loss, a float64 scalar, the sum of -log softmax(logits)[target] over
// rows with target >= 0. With grad, logits becomes scale times the gradient of that sum; rows
// without target become 0, whatever their logits were. targets: int32, one a row. A target
// outside the vocabulary poisons the stream.
func (c *Kernels) CrossEntropy(loss, logits, targets tensor.View, scale float64, grad bool) {
	if isHalf(logits.DType()) {
		c.halfCrossEntropy(loss, logits, targets, scale, grad)
		return
	}
	dense("cross entropy", logits.DType(), logits)
	shape.Must(loss.Size() == 1 && loss.DType() == tensor.F64 && targets.DType() == tensor.I32 &&
		targets.IsDense() && targets.Size() == logits.Rows(), "cross entropy", loss, logits, targets)
	if logits.DType() == tensor.F64 {
		crossEntropy[float64](c, loss, logits, targets, scale, grad)
		return
	}
	crossEntropy[float32](c, loss, logits, targets, scale, grad)
}

func crossEntropy[T tensor.Float](c *Kernels, loss, logits, targets tensor.View, scale float64, grad bool) {
	l, sum := simd.LoopsOf[T](c.level), tensor.Data[float64](loss)
	ls, ts := tensor.Data[T](logits), tensor.Data[int32](targets)
	n := logits.Cols()
	c.stream.Do("cross entropy", func() error {
		if err := targetsInVocab(ts, n); err != nil {
			return err
		}
		rows := grow(&c.ops.f64, len(ts)) // one loss a row, so that they can be added in order
		c.blocks(len(ts), rowBlock(n), func(_, lo, hi int) {
			for r := lo; r < hi; r++ {
				row := ls[r*n : (r+1)*n]
				switch {
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

// targetsInVocab returns an error that names the first target outside the vocabulary. Those below 0 count as none.
func targetsInVocab(targets []int32, vocab int) error {
	for i, t := range targets {
		if int(t) >= vocab {
			return fmt.Errorf("cross entropy: target %d at position %d of this rank is outside the vocabulary of %d: "+
				"the data was made with another tokenizer", t, i, vocab)
		}
	}
	return nil
}

// rowLoss is log(sum(exp(logits))) - logits[target], with the largest logit taken out of both terms: the exponential
// cannot overflow, and large logits do not cancel. With grad, logits become scale * (softmax - onehot(target)).
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
		// In float64: in float32, softmax - 1 loses every digit where the target is likely.
		logits[target] = T(scale * (math.Exp(hit)/row.sum - 1))
	}
	return math.Log(row.sum) - hit
}

// rowSum adds up the exponentials of a row of logits in pieces, each of which is in cache while its largest logit
// is found and its exponentials are added up, less that: memory is read once. Pieces join by their largest.
type rowSum[T tensor.Float] struct {
	logits []T
	size   int // of all pieces but the last
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

// add adds up logits, or, to the same bits, replaces each by its exponential less the largest of its piece.
func (s *rowSum[T]) add(l simd.Loops[T], logits []T, replace bool) {
	s.logits, s.size = logits, max(leastPiece, (len(logits)+mostPieces-1)/mostPieces)
	s.top = math.Inf(-1)
	for i := range s.count() {
		piece := s.piece(i)
		top := l.MaxOf(piece)
		s.tops[i], s.top = top, max(s.top, float64(top))
		if math.IsInf(float64(top), -1) {
			top = 0 // -Inf less itself is no number, and the sum is 0
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
