package call

import (
	"math"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// A GroupOperand has a row for each place or, with Tokens, for each token.
type GroupOperand struct {
	View    View
	Tokens  View // int32, of places; the zero View: rows are in the order of places
	Factors View // of a scaled matrix
}

// words returns the operand with a word of 16 bits for each two codes.
func (o GroupOperand) words() GroupOperand {
	v := o.View
	o.View = tensor.Dense(v.Memory(), tensor.BF16, v.Offset()/2, [4]int{1, v.Rows(), 1, v.Cols() / 2})
	return o
}

// A Group holds a product of rows sorted by expert; see hopper_group.cu. B is the stacked weights, except in a product
// for these. If A has factors, both are in E4M3; if then B has none, it is transposed, with columns of each expert.
type Group struct {
	Product       source.GroupProduct
	Out           View // of GroupGLUDX: of gates and ups, then of their gradients
	A, B          GroupOperand
	Starts        View
	Accumulate    bool
	Gated         View   // of the products with gated activations
	Weights, Sums uint64 // of GroupGLUDX: addresses of float32, of places, and of columns of tiles and places
}

// HopperGroup is a launch of a grouped product on Hopper.
type HopperGroup struct {
	Program, Kernel string
	Threads, Shared int
	Blocks          int    // tiles at most, the largest grid
	Maps            [3]Map // A, B and C
	Params          source.HopperGroup
}

// Hopper returns the launch; ok is false if the kernels for Hopper do not support the product. The caller has checked
// that shapes match.
func (g *Group) Hopper() (l HopperGroup, ok bool) {
	a, b, scaled := g.A, g.B, !g.A.Factors.IsZero()
	if scaled {
		a, b = a.words(), b.words()
	}
	weights, out := b.View, g.Out.DType()
	if g.Product == source.GroupDW {
		weights, out = g.Out, g.A.View.DType()
		ok = g.Out.DType() == tensor.F32
	} else {
		ok = scaled || out == a.View.DType()
	}
	experts, places := g.Starts.Size()-1, g.places()
	floats := scaled && g.Product == source.GroupForward && out == tensor.F32
	if !ok || out != tensor.BF16 && out != tensor.F16 && !floats || b.View.DType() != a.View.DType() || experts < 1 ||
		experts > source.MaxGroupExperts || places == 0 || !rowsInPieces(a.View, b.View, g.Out) ||
		!g.Gated.IsZero() && !rowsInPieces(g.Gated) {
		return l, false
	}
	rows, columns, turned := weights.Rows()/experts, g.Out.Cols(), false
	if g.Product == source.GroupDW && a.Tokens.IsZero() && !b.Tokens.IsZero() {
		// Copies of rows of tokens take more of shared memory's time than TMA, and a step has fewer columns of a.
		a, b, rows, columns, turned = b, a, columns, rows, true
	}
	if !g.Gated.IsZero() {
		columns = g.Gated.Cols()
	}
	s := source.HopperGroupShapeFor(g.Product, columns)
	l = HopperGroup{
		Program: s.Program(g.Product, scaled).Name, Kernel: "hopper_group_" + flashTypes[out], Threads: 384,
		Shared: s.Shared(g.Product, scaled, experts),
		Params: source.HopperGroup{
			ARows: a.View.Addr(), BRows: b.View.Addr(), ATokens: a.Tokens.Addr(), BTokens: b.Tokens.Addr(),
			Starts: g.Starts.Addr(), Out: g.Out.Addr(), Experts: int32(experts), Depth: int32(a.View.Cols()),
			Rows: int32(rows), Columns: int32(columns), AColumns: int32(a.View.Cols()),
			BColumns: int32(b.View.Cols()), Accumulate: cInt(g.Accumulate), Turned: cInt(turned),
			Places: int32(places), Gated: g.Gated.Addr(), Weights: g.Weights, Sums: g.Sums,
			AFactors: a.Factors.Addr(), BFactors: b.Factors.Addr(),
		},
	}
	flat := func(v View) View { return v.Reshape([4]int{1, v.Rows(), 1, v.Cols()}) }
	stack := func(v View) View {
		if n, all := v.Cols()/experts, int64(v.Cols()); scaled && b.Factors.IsZero() {
			return tensor.NewView(v.Memory(), v.DType(), v.Offset(), [4]int{experts, v.Rows(), 1, n},
				[4]int64{int64(n), all, all, 1})
		}
		return v.Reshape([4]int{experts, v.Rows() / experts, 1, v.Cols()})
	}
	high := places/source.GroupRows + experts // rows of tiles at most
	width := s.Width
	switch g.Product {
	case source.GroupForward, source.GroupGLU:
		if g.Product == source.GroupGLU {
			width /= 2
		}
		l.Maps = [3]Map{{flat(a.View), panel, source.GroupRows}, {stack(b.View), panel, width}}
	case source.GroupDX, source.GroupGLUDX:
		box := source.GroupStep
		if scaled {
			box = s.Width
		}
		l.Maps = [3]Map{{flat(a.View), panel, source.GroupRows}, {stack(b.View), panel, box}}
		if g.Product == source.GroupGLUDX {
			l.Maps[2] = Map{g.Out.Reshape([4]int{1, places, 2, columns}), panel, source.GroupRows}
		}
	case source.GroupDW:
		dw := Map{stack(g.Out), panel / 2, 16}
		if turned {
			dw = Map{stack(g.Out), 16, panel / 2}
		}
		l.Maps = [3]Map{{flat(a.View), panel, source.GroupStep}, {flat(b.View), panel, source.GroupStep}, dw}
		high = experts * (rows/source.GroupRows + 1)
	}
	l.Blocks = high * ((columns + width - 1) / width)
	return l, l.Blocks <= math.MaxInt32
}

func cInt(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

// places returns the number of places.
func (g *Group) places() int {
	switch {
	case g.Product != source.GroupDW:
		return g.Out.Rows()
	case !g.A.Tokens.IsZero():
		return g.A.Tokens.Size()
	}
	return g.A.View.Rows()
}

// rowsInPieces reports whether views are dense and of rows in aligned pieces of 16 bytes, and rows and columns are few
// enough for the kernels.
func rowsInPieces(views ...View) bool {
	for _, v := range views {
		if !v.IsDense() || v.Size() == 0 || v.Cols()%8 != 0 || v.Addr()%16 != 0 || v.Rows() > math.MaxInt32/2 ||
			v.Cols() > 1<<20 {
			return false
		}
	}
	return true
}
