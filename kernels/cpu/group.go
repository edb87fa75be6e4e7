package cpu

import (
	"fmt"
	"sort"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// pairs is kernels.Pairs on the host, of tokens with k choices each.
type pairs struct {
	tokens, places, starts []int32
	k                      int
}

// pairsOf panics unless p holds dense int32 views of matching shapes.
func pairsOf(op string, p kernels.Pairs) pairs {
	all := []tensor.View{p.Tokens, p.Places, p.Starts}
	ints(op, all...)
	shape.Must(p.Tokens.Size() == p.Places.Size() && p.Starts.Size() > 1, op, all...)
	data := tensor.Data[int32]
	return pairs{data(p.Tokens), data(p.Places), data(p.Starts), p.Places.Cols()}
}

func (p pairs) experts() int { return len(p.starts) - 1 }

// of returns the places of an expert, from lo to hi.
func (p pairs) of(e int) (lo, hi int) { return int(p.starts[e]), int(p.starts[e+1]) }

// each calls f for the places from lo to hi, with their experts.
func (p pairs) each(lo, hi int, f func(place, e int)) {
	e := sort.Search(p.experts(), func(e int) bool { return int(p.starts[e+1]) > lo })
	for i := lo; i < hi; i++ {
		for i >= int(p.starts[e+1]) {
			e++
		}
		f(i, e)
	}
}

// pair returns the pair at a place.
func (p pairs) pair(place int) int {
	i := int(p.tokens[place]) * p.k
	for int(p.places[i]) != place {
		i++
	}
	return i
}

// holds panics unless x has a row for each place or token.
func (p pairs) holds(op string, x kernels.Operand) {
	rows := len(p.tokens)
	if x.ByToken {
		rows /= max(p.k, 1)
	}
	shape.Must(x.Rows() == rows, op, x.View)
}

// operandOf returns x as a factor with a row for each place.
func operandOf[T tensor.Float](x kernels.Operand, p pairs) factor[T] {
	f := factorOf[T](x.View, false)
	if x.ByToken {
		f.gather = p.tokens
	}
	return f
}

// places returns the part of an operand's rows from lo to hi.
func (f factor[T]) places(lo, hi int) factor[T] {
	if f.gather != nil {
		f.gather = f.gather[lo:hi]
		return f
	}
	return f.since(lo * f.ld)
}

// since returns the part of a factor's memory from an element, the first of a row if there are scales.
func (f factor[T]) since(at int) factor[T] {
	if f.codes == nil {
		f.memory = f.from(at)
		return f
	}
	f.codes = f.codes[at:]
	if f.scales != nil {
		f.scales = f.scales[at/max(f.ld, 1):]
	}
	return f
}

// Sort sets p for the choices: a stable counting sort. A choice beyond the experts poisons the stream.
func (c *Kernels) Sort(p kernels.Pairs, choice tensor.View) {
	const op = "sort"
	to := pairsOf(op, p)
	ints(op, choice)
	shape.Must(choice.Size() == len(to.tokens) && choice.Cols() == to.k, op, choice, p.Places)
	chosen := tensor.Data[int32](choice)
	c.stream.Do(op, func() error {
		next := make([]int32, to.experts())
		for i, e := range chosen {
			if e < 0 || int(e) >= len(next) {
				return fmt.Errorf("sort: choice %d of token %d is none of %d experts", e, i/to.k, len(next))
			}
			next[e]++
		}
		at := int32(0)
		for e, n := range next {
			to.starts[e], next[e] = at, at
			at += n
		}
		to.starts[len(next)] = at
		for i, e := range chosen {
			to.tokens[next[e]], to.places[i] = int32(i/to.k), next[e]
			next[e]++
		}
		return nil
	})
}

// GroupLinear sets y [P, out] to each row of x times the transpose of its expert's rows of w [E*out, in], or adds it.
func (c *Kernels) GroupLinear(y tensor.View, x kernels.Operand, w tensor.View, p kernels.Pairs, accumulate bool) {
	forType(y, groupLinear[float64], groupLinear[float32])(c, "group linear", y, x, w, p, true, accumulate)
}

// GroupLinearDX sets dx [P, in] to each row of dy times its expert's rows of w [E*out, in], or adds it.
func (c *Kernels) GroupLinearDX(dx tensor.View, dy kernels.Operand, w tensor.View, p kernels.Pairs, accumulate bool) {
	forType(dx, groupLinear[float64], groupLinear[float32])(c, "group linear dx", dx, dy, w, p, false, accumulate)
}

func groupLinear[T tensor.Float](c *Kernels, op string, y tensor.View, x kernels.Operand, w tensor.View,
	p kernels.Pairs, transposed, accumulate bool) {
	g, out, in := pairsOf(op, p), y.Cols(), x.Cols()
	rows, cols := out, in // of an expert's matrix
	if !transposed {
		rows, cols = in, out
	}
	denseActivations(op, y, x.View, w)
	shape.Must(y.Rows() == len(g.tokens) && w.Cols() == cols && w.Rows() == g.experts()*rows, op, y, x.View, w, p.Starts)
	g.holds(op, x)
	groupProduct(c, op, g, y, operandOf[T](x, g), factorOf[T](w, transposed), rows*cols, in, accumulate)
}

// groupProduct queues the products of rows of left with their experts' matrices in right, each step elements after the
// one before it.
func groupProduct[T tensor.Float](c *Kernels, op string, g pairs, y tensor.View, left, right factor[T], step, in int,
	accumulate bool) {
	out, to := y.Cols(), memoryOf[T](y)
	groups(c, op, g, func(e, lo, hi int) product[T] {
		return product[T]{m: hi - lo, n: out, k: in, left: left.places(lo, hi), right: right.since(e * step),
			out: to.from(lo * out), accumulate: accumulate}
	})
}

// GroupLinearDW sets each expert's rows of dw [E*out, in] to its rows of dy transposed times those of x, or adds it.
func (c *Kernels) GroupLinearDW(dw tensor.View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool) {
	forType(dw, groupLinearDW[float64], groupLinearDW[float32])(c, dw, dy, x, p, accumulate)
}

func groupLinearDW[T tensor.Float](c *Kernels, dw tensor.View, dy, x kernels.Operand, p kernels.Pairs,
	accumulate bool) {
	const op = "group linear dw"
	g, out, in := pairsOf(op, p), dy.Cols(), x.Cols()
	denseActivations(op, dy.View, x.View)
	sums(op, dw, x.View)
	shape.Must(dw.Rows() == g.experts()*out && dw.Cols() == in, op, dw, dy.View, x.View, p.Starts)
	g.holds(op, dy)
	g.holds(op, x)
	left, right, to := operandOf[T](dy, g), operandOf[T](x, g), memoryOf[T](dw)
	left.transposed = true
	groups(c, op, g, func(e, lo, hi int) product[T] {
		return product[T]{m: out, n: in, k: hi - lo, left: left.places(lo, hi), right: right.places(lo, hi),
			out: to.from(e * out * in), accumulate: accumulate}
	})
}

// groups queues the products of all experts, given their places.
func groups[T tensor.Float](c *Kernels, op string, p pairs, of func(e, lo, hi int) product[T]) {
	c.queue(op, func() {
		list := make([]*product[T], p.experts())
		for e := range list {
			lo, hi := p.of(e)
			x := of(e, lo, hi)
			x.loops = simd.LoopsOf[T](c.level)
			list[e] = &x
		}
		runAll(c, list)
	})
}
