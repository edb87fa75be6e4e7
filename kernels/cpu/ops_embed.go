package cpu

import (
	"fmt"

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
