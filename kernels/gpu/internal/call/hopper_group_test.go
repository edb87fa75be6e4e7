//go:build cuda

package call

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// A groupCase is a product for experts with so many places each.
type groupCase struct {
	dtype        tensor.DType
	counts       []int
	out, in      int  // rows of an expert's weights, and columns
	byA, byB     bool // operands have rows of tokens
	accumulate   bool
	tokens, grid int
	scaled       bool // operands are in E4M3
}

func (c groupCase) places() (n int) {
	for _, x := range c.counts {
		n += x
	}
	return n
}

// TestHopperGroupOnHost compares grouped products to sums in float64. Some tokens are NaN, and only places of theirs, or
// their experts' weights, may become NaN.
func TestHopperGroupOnHost(t *testing.T) {
	h := newHost(t)
	cases := []groupCase{
		{tensor.BF16, []int{130, 0, 1, 64, 200}, 80, 200, true, false, true, 40, 3, false},
		{tensor.F16, []int{0, 5, 129, 0}, 272, 136, false, true, true, 50, 2, false},
		{tensor.BF16, []int{70, 66, 0}, 400, 264, true, true, false, 300, 2, false},
		{tensor.BF16, []int{2100, 0, 100}, 16, 16, false, false, false, 1, 5, false},
		{tensor.F16, []int{1, 1, 1, 0, 1, 1}, 192, 64, true, false, false, 3, 200, false},
	}
	if testing.Short() {
		cases = cases[:1]
	}
	for i, c := range cases {
		for p := source.GroupForward; p <= source.GroupGLUDX; p++ {
			for _, scaled := range []bool{false, true} {
				if scaled && (p == source.GroupDX || p == source.GroupDW) {
					continue
				}
				t.Run(fmt.Sprintf("%v %d scaled=%t", p, i, scaled), func(t *testing.T) {
					h.t, h.used = t, 0
					c := c
					if c.scaled = scaled; scaled {
						c.out, c.in = (c.out+15)&^15, (c.in+15)&^15
					}
					c.run(h, p)
				})
			}
		}
	}
}

func (c groupCase) run(h *host, p source.GroupProduct) {
	t, rng := h.t, rand.New(rand.NewPCG(uint64(c.out), uint64(p)))
	k := &hostFlash{host: h}
	ints := func(n int) View { return k.empty(tensor.I32, 1, 1, n+n%2).Slice(tensor.Dim, 0, n) } // memory is in 8 bytes
	starts, tokens := ints(len(c.counts)+1), ints(c.places())
	clear(tensor.Data[int32](starts))
	experts := make([]int, 0, c.places()) // of places
	for e, n := range c.counts {
		for range n {
			experts = append(experts, e)
		}
		tensor.Data[int32](starts)[e+1] = int32(len(experts))
	}
	for i := range tensor.Data[int32](tokens) {
		tensor.Data[int32](tokens)[i] = rng.Int32N(int32(c.tokens))
	}
	draw := func(dtype tensor.DType, rows, columns, bad int) View {
		v := k.empty(dtype, rows, 1, columns)
		each(v, func(_ float32, at [4]int) float32 {
			if at[tensor.Seq] == bad {
				return float32(math.NaN())
			}
			return float32(rng.IntN(9)-4) / 4
		})
		return v
	}
	// operand returns an operand of a product, and the row of each place.
	operand := func(columns int, byToken bool) (GroupOperand, func(place int) int) {
		if byToken {
			return GroupOperand{View: draw(c.dtype, c.tokens, columns, c.tokens-1), Tokens: tokens},
				func(i int) int { return int(tensor.Data[int32](tokens)[i]) }
		}
		return GroupOperand{View: draw(c.dtype, len(experts), columns, len(experts)-1)}, func(i int) int { return i }
	}
	weights := GroupOperand{View: draw(c.dtype, len(c.counts)*c.out, c.in, c.out*len(c.counts)-1)}
	g := Group{Product: p, Starts: starts, Accumulate: c.accumulate}
	var a, b func(place int) int
	at := func(v View, row, column int) float64 { return float64(value(v, [4]int{0, row, 0, column})) }
	product := func(sum float64, x, y float64) float64 { return sum + x*y }
	var want func(row, column int) float64
	switch p {
	case source.GroupForward, source.GroupGLU:
		g.A, a = operand(c.in, c.byA)
		g.B, g.Out = weights, draw(c.dtype, len(experts), c.out, -1)
		want = func(row, column int) (sum float64) {
			for i := range c.in {
				sum = product(sum, at(g.A.View, a(row), i), at(g.B.View, experts[row]*c.out+column, i))
			}
			return sum
		}
	case source.GroupDX, source.GroupGLUDX:
		g.A, a = operand(c.out, c.byA)
		g.B, g.Out = weights, draw(c.dtype, len(experts), c.in, -1)
		want = func(row, column int) (sum float64) {
			for i := range c.out {
				sum = product(sum, at(g.A.View, a(row), i), at(g.B.View, experts[row]*c.out+i, column))
			}
			return sum
		}
	case source.GroupDW:
		g.A, a = operand(c.out, c.byB)
		g.B, b = operand(c.in, c.byA)
		g.Out = draw(tensor.F32, len(c.counts)*c.out, c.in, -1)
		want = func(row, column int) (sum float64) {
			for i, e := range experts {
				if e == row/c.out {
					sum = product(sum, at(g.A.View, a(i), row%c.out), at(g.B.View, b(i), column))
				}
			}
			return sum
		}
	}
	scale := func(int, int) float64 { return 1 }
	if c.scaled {
		fa, fb := k.factors(rng, g.A.View.Rows()), k.factors(rng, g.B.View.Rows())
		of := func(v View, i int) float64 { return float64(tensor.Data[float32](v)[i]) }
		g.A.Factors = fa
		scale = func(row, _ int) float64 { return of(fa, a(row)) }
		if p != source.GroupGLUDX {
			g.B.Factors = fb
			scale = func(row, column int) float64 { return of(fa, a(row)) * of(fb, experts[row]*c.out+column) }
		}
	}
	wants := make([]float64, g.Out.Size())
	for i := range wants {
		row, column := i/g.Out.Cols(), i%g.Out.Cols()
		wants[i] = want(row, column) * scale(row, column)
		if c.accumulate && p != source.GroupGLUDX {
			wants[i] += at(g.Out, row, column)
		}
	}
	nan := func(v View) View {
		each(v, func(float32, [4]int) float32 { return float32(math.NaN()) })
		return v
	}
	if !c.accumulate {
		nan(g.Out)
	}
	one := draw(c.dtype, 1, 8, -1)
	rounded := func(x float64) float64 {
		set(one, [4]int{}, x)
		return at(one, 0, 0)
	}
	results := []groupResult{{"result", g.Out, wants, 1.0 / 200}}
	switch p {
	case source.GroupDW:
		results[0].share = 0 // sums of such numbers are exact in float32
	case source.GroupGLU:
		n := c.out / 2
		g.Gated = nan(draw(c.dtype, len(experts), n, -1))
		ys := make([]float64, g.Gated.Size())
		for i := range ys {
			gate := rounded(wants[i/n*2*n+i%n])
			ys[i] = gate / (1 + math.Exp(-gate)) * rounded(wants[i/n*2*n+n+i%n])
		}
		results = append(results, groupResult{"act(gate) * up", g.Gated, ys, 1.0 / 200})
	case source.GroupGLUDX:
		n := c.in
		const width = 256 // of a tile
		g.Accumulate, g.Gated = false, nan(draw(c.dtype, len(experts), n, -1))
		g.Out = draw(c.dtype, len(experts), 2*n, -1)
		inf := math.Inf(1)
		for i, x := range []float64{inf, -inf, math.NaN(), 100, -100} { // gates, then ups
			set(g.Out, [4]int{0, 0, 0, i}, x)
			set(g.Out, [4]int{0, 0, 0, n + 5 + i}, x)
		}
		floats := func(n int) View { return draw(tensor.F32, 1, n+n%2, -1).Slice(tensor.Dim, 0, n) }
		weight, sums := floats(len(experts)), nan(floats((n+width-1)/width*len(experts)))
		dx, wy, total := make([]float64, g.Out.Size()), make([]float64, g.Gated.Size()), make([]float64, sums.Size())
		for i, da := range wants {
			row, column := i/n, i%n
			da = rounded(da)
			gate, up, w := at(g.Out, row, column), at(g.Out, row, n+column), at(weight, 0, row)
			s := 1 / (1 + math.Exp(-gate))
			wy[i] = w * gate * s * up
			dx[row*2*n+column] = w * da * up * s * (1 + gate*(1-s))
			dx[row*2*n+n+column] = w * da * gate * s
			total[column/width*len(experts)+row] += da * gate * s * up
		}
		g.Weights, g.Sums = weight.Addr(), sums.Addr()
		results = []groupResult{{"dx", g.Out, dx, 1.0 / 200}, {"wy", g.Gated, wy, 1.0 / 200}, {"sums", sums, total, 1e-4}}
	}
	if c.scaled {
		same := func(i, j int) (int, int) { return i, j }
		rows, columns, from := g.B.View.Rows(), c.in, same
		if p == source.GroupGLUDX {
			rows, columns = c.in, len(c.counts)*c.out
			from = func(i, j int) (int, int) { return j, i }
		}
		g.A.View, g.B.View = k.codes(g.A.View, g.A.View.Rows(), g.A.View.Cols(), same), k.codes(g.B.View, rows, columns, from)
	}
	l, served := g.Hopper()
	if !served {
		t.Fatal("the kernels do not support the product")
	}
	x := &l.Params
	for i, to := range []*source.TensorMap{&x.A, &x.B, &x.C} {
		if !l.Maps[i].View.IsZero() {
			h.encode(l.Maps[i:i+1], to)
		}
	}
	next := ints(2)
	clear(tensor.Data[int32](next))
	x.Next = next.Addr()
	h.move(&x.ARows, &x.BRows, &x.ATokens, &x.BTokens, &x.Starts, &x.Out, &x.Next, &x.Gated, &x.Weights, &x.Sums,
		&x.AFactors, &x.BFactors)
	ok(t, h.start(l.Program, l.Kernel, [3]int{min(c.grid, l.Blocks), 1, 1}, [2]int{l.Threads, 1}, l.Shared,
		argumentsOf(x)))
	if left := tensor.Data[int32](next); left[0] != 0 || left[1] != 0 {
		t.Errorf("counters are %d after a launch", left)
	}
	for _, r := range results {
		r.check(t)
	}
}

// factors returns powers of two.
func (k *hostFlash) factors(rng *rand.Rand, n int) View {
	v := k.empty(tensor.F32, 1, 1, n+n%2).Slice(tensor.Dim, 0, n)
	each(v, func(float32, [4]int) float32 { return []float32{0.5, 1, 2}[rng.IntN(3)] })
	return v
}

// codes returns elements of v in E4M3, which has their values.
func (k *hostFlash) codes(v View, rows, columns int, from func(i, j int) (row, column int)) View {
	codes := k.empty(tensor.U8, rows, 1, columns)
	for i := range tensor.Data[uint8](codes) {
		row, column := from(i/columns, i%columns)
		tensor.Data[uint8](codes)[i] = half.ToE4M3(value(v, [4]int{0, row, 0, column}))
	}
	return codes
}

// A groupResult is a view with the wanted values, and a largest error as a share of these.
type groupResult struct {
	what  string
	v     View
	want  []float64
	share float64
}

func (r groupResult) check(t testing.TB) {
	faults, finite := 0, 0
	for i, want := range r.want {
		row, column := i/r.v.Cols(), i%r.v.Cols()
		got := float64(value(r.v, [4]int{0, row, 0, column}))
		switch {
		case math.IsNaN(want) != math.IsNaN(got), math.IsInf(want, 0) && got != want,
			math.Abs(got-want) > r.share*(math.Abs(want)+0.01):
			if faults++; faults < 5 {
				t.Errorf("%s: row %d column %d is %g, want %g", r.what, row, column, got, want)
			}
		case !math.IsNaN(want):
			finite++
		}
	}
	if finite == 0 {
		t.Errorf("%s: all is NaN", r.what)
	}
}
