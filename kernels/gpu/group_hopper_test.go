//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// A groupRig has the operands of grouped products, for experts of out rows and in columns of weights.
type groupRig struct {
	*cudaRig
	dtype   tensor.DType
	pairs   kernels.Pairs
	tokens  []int32
	experts []int32 // of each place
	out, in int
}

// newGroupRig returns a rig with so many places of each expert.
func newGroupRig(r *cudaRig, dtype tensor.DType, counts []int, tokens, out, in int) *groupRig {
	g := &groupRig{cudaRig: r, dtype: dtype, out: out, in: in}
	starts := []int32{0}
	for e, n := range counts {
		for range n {
			g.experts = append(g.experts, int32(e))
			g.tokens = append(g.tokens, r.rng.Int32N(int32(tokens)))
		}
		starts = append(starts, int32(len(g.experts)))
	}
	g.pairs = kernels.Pairs{Tokens: r.upload(tensor.FromSlice(g.tokens, 1, len(g.tokens), 1, 1)),
		Starts: r.upload(tensor.FromSlice(starts, 1, len(starts), 1, 1))}
	return g
}

// operand returns an operand and its values, and the row of each place. Its last row is NaN.
func (g *groupRig) operand(tokens, columns int, byToken bool) (o kernels.Operand, x []float32, row func(i int) int) {
	rows := len(g.experts)
	if row = func(i int) int { return i }; byToken {
		rows, row = tokens, func(i int) int { return int(g.tokens[i]) }
	}
	v := g.matrix(g.dtype, rows, columns)
	x = g.values(v)
	return kernels.Operand{View: v, ByToken: byToken}, x, row
}

// matrix returns a random matrix of small numbers of few bits, whose sums are exact, and NaN in its last row.
func (g *groupRig) matrix(dtype tensor.DType, rows, columns int) View {
	host := tensor.New(tensor.F32, 1, rows, 1, columns)
	x := tensor.Data[float32](host)
	for i := range x {
		x[i] = float32(g.rng.IntN(9)-4) / 4
	}
	for i := range columns {
		x[len(x)-1-i] = float32(math.NaN())
	}
	return g.put(dtype, host)
}

// TestGroupOnHopper compares the products to sums in float64. NaN must only reach results that depend on it. A second
// call gives the same bits.
func TestGroupOnHopper(t *testing.T) {
	rig := newCUDARig(t)
	for _, c := range []struct {
		counts          []int
		tokens, out, in int
	}{
		{[]int{130, 0, 1, 64, 200}, 77, 72, 200},
		{[]int{300, 0, 128, 64, 1, 77, 65}, 500, 264, 200},
		{[]int{0, 0, 700, 8}, 999, 136, 392},
	} {
		for way := range 8 {
			dtype := []tensor.DType{tensor.BF16, tensor.F16}[way&1^way>>1&1^way>>2]
			t.Run(fmt.Sprintf("%v/%v/%d", c, dtype, way), func(t *testing.T) {
				g := newGroupRig(rig.within(t), dtype, c.counts, c.tokens, c.out, c.in)
				g.test(c.tokens, len(c.counts), way&1 > 0, way&2 > 0, way&4 > 0)
			})
		}
	}
}

// test tests all products, of dy and x by token or by place.
func (g *groupRig) test(tokens, experts int, dyByToken, xByToken, accumulate bool) {
	dy, dys, dyRow := g.operand(tokens, g.out, dyByToken)
	x, xs, xRow := g.operand(tokens, g.in, xByToken)
	w := g.matrix(g.dtype, experts*g.out, g.in)
	ws := g.values(w)
	g.check(source.GroupForward, g.matrix(g.dtype, len(g.experts), g.out), x, kernels.Operand{View: w}, accumulate,
		func(i, j int) (sum float64) {
			row := ws[(int(g.experts[i])*g.out+j)*g.in:]
			for k, x := range xs[xRow(i)*g.in:][:g.in] {
				sum += float64(x) * float64(row[k])
			}
			return sum
		})
	g.check(source.GroupDX, g.matrix(g.dtype, len(g.experts), g.in), dy, kernels.Operand{View: w}, accumulate,
		func(i, j int) (sum float64) {
			column := ws[int(g.experts[i])*g.out*g.in+j:]
			for k, dy := range dys[dyRow(i)*g.out:][:g.out] {
				sum += float64(dy) * float64(column[k*g.in])
			}
			return sum
		})
	first := make([]int, experts+1)
	for _, e := range g.experts {
		first[e+1]++
	}
	for e := range experts {
		first[e+1] += first[e]
	}
	g.check(source.GroupDW, g.matrix(tensor.F32, experts*g.out, g.in), dy, x, accumulate, func(i, j int) (sum float64) {
		for k := first[i/g.out]; k < first[i/g.out+1]; k++ {
			sum += float64(dys[dyRow(k)*g.out+i%g.out]) * float64(xs[xRow(k)*g.in+j])
		}
		return sum
	})
}

// queue queues a product, and reports whether the kernels support it.
func (g *groupRig) queue(p source.GroupProduct, to View, a, b kernels.Operand, accumulate bool) bool {
	return g.groupOnHopper(groupCall{kind: p, to: to, a: a, b: b, p: g.pairs, accumulate: accumulate}.onHopper())
}

func (g *groupRig) check(p source.GroupProduct, out View, a, b kernels.Operand, accumulate bool,
	want func(i, j int) float64) {
	old, again := g.values(out), g.upload(g.host(out))
	for _, y := range []View{out, again} {
		if !g.queue(p, y, a, b, accumulate) {
			g.t.Fatalf("%v: the kernels do not support it", p)
		}
	}
	got, same := g.values(out), g.values(again)
	for i, y := range got {
		z := want(i/out.Cols(), i%out.Cols())
		if accumulate {
			z += float64(old[i])
		}
		near := math.Abs(float64(y)-z) <= math.Abs(z)/250
		if math.IsNaN(z) != math.IsNaN(float64(y)) || !near && z == z || math.Float32bits(y) != math.Float32bits(same[i]) {
			g.t.Fatalf("%v: row %d column %d is %g and %g, want %g", p, i/out.Cols(), i%out.Cols(), y, same[i], z)
		}
	}
}

// testGated compares products with gated activations to two operations. A second call gives the same bits.
func (g *groupRig) testGated(tokens, experts int) {
	const act = kernels.SiLU
	places := len(g.experts)
	x, _, _ := g.operand(tokens, g.in, true)
	dy, _, _ := g.operand(tokens, g.out, true)
	w, weight := g.matrix(g.dtype, experts*g.out, g.in), g.matrix(tensor.F32, places, 1)
	pairs, gated := g.matrix(g.dtype, places, g.out), g.matrix(g.dtype, places, g.out/2)
	dx, wy, dweight := g.matrix(g.dtype, places, 2*g.in), g.matrix(g.dtype, places, g.in), g.matrix(tensor.F32, places, 1)
	gates := g.host(dx)
	var before [][]float32
	for i, share := range []float64{0, 1.0 / 100, 0} {
		g.send(dx, gates)
		if i == 0 {
			g.GroupLinear(pairs, x, w, g.pairs, false)
			g.GroupGLU(gated, pairs, act)
			g.GroupLinearDX(wy, dy, w, g.pairs, false)
			g.GroupGLUBackward(dx, wy, dweight, wy, dx, weight, g.pairs, act)
		} else if !g.GroupLinearGLU(gated, pairs, x, kernels.Scaled{View: w}, g.pairs, act) ||
			!g.GroupLinearDXGLUBackward(dx, wy, dweight, dy, kernels.Scaled{View: w}, weight, g.pairs, act) {
			g.t.Fatal("the kernels do not support it")
		}
		var now [][]float32
		for j, v := range []View{pairs, gated, dx, wy, dweight} {
			now = append(now, g.values(v))
			for k := 0; i > 0 && k < v.Size(); k++ {
				y, z := float64(now[j][k]), float64(before[j][k])
				if math.IsNaN(y) != math.IsNaN(z) || math.Abs(y-z) > share*(math.Abs(z)+0.5) {
					g.t.Fatalf("result %d: element %d is %g, want %g", j, k, y, z)
				}
			}
		}
		before = now
	}
}

// host returns a copy on the host.
func (g *groupRig) host(v View) View {
	h, err := g.download(v)
	check(g.t, err)
	return h
}

// TestManyPairs sorts and multiplies the pairs of long sequences: half a million of one expert of 512, and of a few. A
// second run gives the same bits.
func TestManyPairs(t *testing.T) {
	const experts, out, in = 512, 16, 16
	rig := newCUDARig(t)
	for _, c := range []struct{ tokens, k, few int }{{1 << 19, 1, 1}, {1 << 16, 8, 11}, {1 << 17, 1, experts}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			g := &groupRig{cudaRig: rig.within(t), dtype: tensor.BF16, out: out, in: in}
			n := c.tokens * c.k
			choice, byExpert := make([]int32, n), make([][]int32, experts)
			for i := range choice {
				e := g.rng.Int32N(int32(c.few)) * int32(experts/c.few)
				if i >= n-c.k {
					e = experts - 1 // of the token with NaN
				}
				choice[i], byExpert[e] = e, append(byExpert[e], int32(i))
			}
			ints := func(shape ...int) View { return g.upload(tensor.New(tensor.I32, shape...)) }
			g.pairs = kernels.Pairs{Tokens: ints(1, n, 1, 1), Places: ints(1, c.tokens, c.k, 1),
				Starts: ints(1, experts+1, 1, 1)}
			g.Sort(g.pairs, g.upload(tensor.FromSlice(choice, 1, c.tokens, c.k, 1)))
			places, tokens := tensor.Data[int32](g.host(g.pairs.Places)), tensor.Data[int32](g.host(g.pairs.Tokens))
			starts, at := tensor.Data[int32](g.host(g.pairs.Starts)), 0
			for e, list := range byExpert {
				if int(starts[e]) != at {
					t.Fatalf("expert %d begins at %d, want %d", e, starts[e], at)
				}
				for _, i := range list {
					if int(places[i]) != at || tokens[at] != i/int32(c.k) {
						t.Fatalf("pair %d is at place %d, with token %d there; want %d", i, places[i], tokens[at], at)
					}
					at++
				}
			}
			g.tokens = tokens
			for i := range tokens {
				g.experts = append(g.experts, int32(slices.IndexFunc(starts[1:], func(end int32) bool { return int32(i) < end })))
			}
			g.test(c.tokens, experts, false, true, false)
			if c.few == experts {
				g.testGated(c.tokens, experts)
			}
		})
	}
}

// TestGroupNotOnHopper lists calls that the kernels do not support.
func TestGroupNotOnHopper(t *testing.T) {
	rig := newCUDARig(t)
	for _, c := range []struct {
		dtype   tensor.DType
		counts  []int
		out, in int
	}{{tensor.F32, []int{5}, 8, 8}, {tensor.BF16, []int{5}, 12, 8}, {tensor.BF16, []int{5}, 8, 20}} {
		g := newGroupRig(rig, c.dtype, c.counts, 9, c.out, c.in)
		x, _, _ := g.operand(9, c.in, true)
		if w := g.matrix(c.dtype, c.out, c.in); g.queue(source.GroupForward, g.matrix(c.dtype, 5, c.out), x,
			kernels.Operand{View: w}, false) {
			t.Errorf("%+v is supported", c)
		}
	}
	const n = OpsWorkspace/8 + 1 // places. Their weights and sums do not fit the workspace.
	view := func(dtype tensor.DType, columns int) View {
		return place(t, rig.loader.Device(), dtype, [4]int{1, n, 1, columns})
	}
	pairs := kernels.Pairs{Tokens: view(tensor.I32, 1), Places: view(tensor.I32, 1),
		Starts: rig.upload(tensor.FromSlice([]int32{0, n}, 1, 2, 1, 1))}
	w, dy := rig.like(tensor.BF16, tensor.New(tensor.BF16, 1, 8, 1, 8)), kernels.Operand{View: view(tensor.BF16, 8)}
	if rig.GroupLinearDXGLUBackward(view(tensor.BF16, 16), view(tensor.BF16, 8), view(tensor.F32, 1), dy, kernels.Scaled{View: w},
		view(tensor.F32, 1), pairs, kernels.SiLU) {
		t.Errorf("%d places are supported", n)
	}
}

// BenchmarkGroup measures the products of the up and down projections of a layer with 128 experts of 768 and a width of
// 2048, 8 of them for each of 8K tokens. The routes are even, or a tenth of the experts get half of the places.
func BenchmarkGroup(b *testing.B) {
	const tokens, places, experts, width, inner = 8192, 8 * 8192, 128, 2048, 768
	rig := newCUDARig(b)
	for _, skewed := range []bool{false, true} {
		counts, rng := make([]int, experts), rand.New(rand.NewPCG(1, 2))
		for i := range places {
			switch {
			case !skewed:
				counts[i%experts]++
			case i%2 == 0:
				counts[rng.IntN(experts/10)*10]++
			default:
				counts[rng.IntN(experts)]++
			}
		}
		for _, d := range [][2]int{{2 * inner, width}, {width, inner}} {
			g := newGroupRig(rig, tensor.BF16, counts, tokens, d[0], d[1])
			view := func(t tensor.DType, rows, columns int) View {
				return place(b, rig.loader.Device(), t, [4]int{1, rows, 1, columns})
			}
			rows := func(columns int, byToken bool) kernels.Operand {
				n := places
				if byToken {
					n = tokens
				}
				return kernels.Operand{View: g.fill(view(tensor.BF16, n, columns)), ByToken: byToken}
			}
			up := d[1] == width
			w := kernels.Operand{View: g.fill(view(tensor.BF16, experts*d[0], d[1]))}
			x, dy := rows(d[1], up), rows(d[0], !up)
			y, dx, dw := view(tensor.BF16, places, d[0]), view(tensor.BF16, places, d[1]), view(tensor.F32, experts*d[0], d[1])
			for _, c := range []struct {
				p          source.GroupProduct
				out        View
				a, b       kernels.Operand
				accumulate bool
			}{{source.GroupForward, y, x, w, false}, {source.GroupDX, dx, dy, w, false}, {source.GroupDW, dw, dy, x, false},
				{source.GroupDW, dw, dy, x, true}} {
				b.Run(fmt.Sprintf("skewed=%t/up=%t/%v/accumulate=%t", skewed, up, c.p, c.accumulate), func(b *testing.B) {
					for range b.N {
						g.queue(c.p, c.out, c.a, c.b, c.accumulate)
					}
					check(b, g.stream.Sync(context.Background()))
					b.ReportMetric(2*places*float64(d[0]*d[1])*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
				})
			}
		}
	}
}

// BenchmarkGroupScaled measures the products of BenchmarkGroup in bfloat16 and in E4M3, quantizations of their operands,
// and gated activations, for random routes of some tokens.
func BenchmarkGroupScaled(b *testing.B) {
	const experts, width, inner = 128, 2048, 768
	for _, tokens := range []int{8192, 16384, 32768} {
		places, rig := 8*tokens, newCUDARig(b)
		g, choice := &groupRig{cudaRig: rig}, make([]int32, 0, places)
		for range tokens {
			for _, e := range g.rng.Perm(experts)[:8] {
				choice = append(choice, int32(e))
			}
		}
		view := func(t tensor.DType, rows, columns int) View {
			return place(b, rig.loader.Device(), t, [4]int{1, rows, columns, 1}).Reshape([4]int{1, rows, 1, columns})
		}
		g.pairs = kernels.Pairs{Tokens: view(tensor.I32, places, 1), Places: view(tensor.I32, tokens, 8).
			Reshape([4]int{1, tokens, 8, 1}), Starts: view(tensor.I32, experts+1, 1)}
		g.Sort(g.pairs, g.upload(tensor.FromSlice(choice, 1, tokens, 8, 1)))
		block := g.fill(view(tensor.BF16, 1, 1<<20))
		noisy := func(rows, columns int) View {
			v := view(tensor.BF16, rows, columns)
			flat := v.Reshape([4]int{1, 1, 1, v.Size()})
			for at := 0; at < v.Size(); at += 1 << 20 {
				n := min(1<<20, v.Size()-at)
				rig.Copy(flat.Slice(tensor.Dim, at, at+n), block.Slice(tensor.Dim, 0, n))
			}
			return v
		}
		x, dout, act, in := noisy(tokens, width), noisy(tokens, width), noisy(places, inner), noisy(places, 2*inner)
		out, wy, weight := view(tensor.BF16, places, width), view(tensor.BF16, places, inner), view(tensor.F32, tokens, 8)
		wUp, wDown := noisy(experts*2*inner, width), noisy(experts*width, inner)
		xq, actq, dinq, doutq := rig.scaled(tokens, width), rig.scaled(places, inner), rig.scaled(places, 2*inner),
			rig.scaled(places, width)
		up, down := rig.scaled(experts*2*inner, width), rig.scaled(experts*width, inner)
		upT := kernels.Scaled{View: view(tensor.U8, width, experts*2*inner)}
		downT := kernels.Scaled{View: view(tensor.U8, inner, experts*width)}
		of := func(s kernels.Scaled, byToken bool) kernels.Operand {
			return kernels.Operand{View: s.View, Factors: s.Factors, ByToken: byToken}
		}
		plain := func(v View, byToken bool) kernels.Operand { return kernels.Operand{View: v, ByToken: byToken} }
		glu := func(from kernels.Operand, w kernels.Scaled) bool {
			return g.GroupLinearGLU(act, in, from, w, g.pairs, kernels.SiLU)
		}
		gluDX := func(from kernels.Operand, w kernels.Scaled) bool {
			return g.GroupLinearDXGLUBackward(in, wy, weight, from, w, weight, g.pairs, kernels.SiLU)
		}
		for _, c := range []struct {
			name            string
			rows, cols, sum int // sum: of a product; 0: a pass over bfloat16 and E4M3
			run             func() bool
		}{
			{"quantize/x", tokens, width, 0, func() bool { g.Quantize(xq, kernels.Scaled{}, x, View{}); return true }},
			{"quantize/act", places, inner, 0, func() bool { g.Quantize(actq, kernels.Scaled{}, act, View{}); return true }},
			{"quantize/up", experts * 2 * inner, width, 0, func() bool { g.Quantize(up, kernels.Scaled{}, wUp, View{}); return true }},
			{"quantize/down", experts * width, inner, 0, func() bool {
				g.Quantize(down, kernels.Scaled{}, wDown, View{})
				return true
			}},
			{"quantize/din", places, 2 * inner, 0, func() bool {
				g.GroupQuantize(dinq, plain(in, false), up.Factors, g.pairs)
				return true
			}},
			{"quantize/dout", places, width, 0, func() bool {
				g.GroupQuantize(doutq, plain(dout, true), down.Factors, g.pairs)
				return true
			}},
			{"transpose/up", experts * 2 * inner, width, 0, func() bool { g.Transpose(upT.View, up.View); return true }},
			{"transpose/down", experts * width, inner, 0, func() bool { g.Transpose(downT.View, down.View); return true }},
			{"up/bf16", places, 2 * inner, width, func() bool {
				g.GroupLinear(in, plain(x, true), wUp, g.pairs, false)
				return true
			}},
			{"up/e4m3", places, 2 * inner, width, func() bool { g.GroupScaledLinear(in, of(xq, true), up, g.pairs); return true }},
			{"down/bf16", places, width, inner, func() bool {
				g.GroupLinear(out, plain(act, false), wDown, g.pairs, false)
				return true
			}},
			{"down/e4m3", places, width, inner, func() bool {
				g.GroupScaledLinear(out, of(actq, false), down, g.pairs)
				return true
			}},
			{"down dx/bf16", places, inner, width, func() bool {
				g.GroupLinearDX(wy, plain(dout, true), wDown, g.pairs, false)
				return true
			}},
			{"down dx/e4m3", places, inner, width, func() bool {
				g.GroupScaledLinear(wy, of(doutq, false), downT, g.pairs)
				return true
			}},
			{"up dx/bf16", places, width, 2 * inner, func() bool {
				g.GroupLinearDX(out, plain(in, false), wUp, g.pairs, false)
				return true
			}},
			{"up dx/e4m3", places, width, 2 * inner, func() bool {
				g.GroupScaledLinear(out, of(dinq, false), upT, g.pairs)
				return true
			}},
			{"glu/bf16", places, 2 * inner, width, func() bool { return glu(plain(x, true), kernels.Scaled{View: wUp}) }},
			{"glu/e4m3", places, 2 * inner, width, func() bool { return glu(of(xq, true), up) }},
			{"glu dx/bf16", places, inner, width, func() bool { return gluDX(plain(dout, true), kernels.Scaled{View: wDown}) }},
			{"glu dx/e4m3", places, inner, width, func() bool { return gluDX(of(doutq, false), downT) }},
		} {
			b.Run(fmt.Sprintf("%dK/%s", tokens>>10, c.name), func(b *testing.B) {
				for range b.N {
					if !c.run() {
						b.Fatal("the kernels do not support it")
					}
				}
				check(b, g.stream.Sync(context.Background()))
				work, unit := 3e-12*float64(c.rows)*float64(c.cols), "TB/s"
				if c.sum > 0 {
					work, unit = 2e-12*float64(c.rows)*float64(c.cols)*float64(c.sum), "TFLOP/s"
				}
				b.ReportMetric(work*float64(b.N)/b.Elapsed().Seconds(), unit)
			})
		}
	}
}

// fill fills a matrix with noise.
func (g *groupRig) fill(v View) View {
	shape := v.Shape()
	host := tensor.New(v.DType(), shape[:]...)
	copy(tensor.Data[uint16](host), noise(v.Size(), 1))
	g.send(v, host)
	return v
}
