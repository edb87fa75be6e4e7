//go:build cuda

package call

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// unpackArguments calls kernels of several parameters, which the host passes as one struct.
const unpackArguments = `
#include <tuple>
struct Packed { alignas(8) char bytes[1024]; };
template <class A> A next_argument(const char*& at) {
  at = (const char*)(((uintptr_t)at + alignof(A) - 1) / alignof(A) * alignof(A));
  A x;
  memcpy(&x, at, sizeof x);
  at += sizeof x;
  return x;
}
template <class... A> void unpack_arguments(void (*f)(A...), const Packed& p) {
  const char* at = p.bytes;
  std::tuple<A...> all{next_argument<A>(at)...};
  std::apply(f, all);
}
`

// hostExperts runs kernels of experts on a host.
type hostExperts struct {
	*host
	rng *rand.Rand
}

func newHostExperts(t *testing.T, program string, kernels ...string) hostExperts {
	h := newHost(t)
	p, err := source.Find(program)
	ok(t, err)
	code, headers, err := p.Source()
	ok(t, err)
	ok(t, h.compiler.add(headers))
	code = append(code, unpackArguments...)
	for _, k := range kernels {
		code = fmt.Appendf(code, "extern \"C\" void host_%s(Packed p) { unpack_arguments(%[1]s, p); }\n", k)
	}
	_, err = h.compiler.text(program, code)
	ok(t, err)
	return hostExperts{h, rand.New(rand.NewPCG(1, 2))}
}

// call runs a kernel. Arguments are Views, integers, and structs.
func (h hostExperts) call(program, kernel string, grid, block [2]int, shared int, args ...any) {
	h.t.Helper()
	var a arguments
	buf, n := unsafe.Slice((*byte)(unsafe.Pointer(&a)), unsafe.Sizeof(a)), 0
	room := func(size, align int) []byte {
		at := (n + align - 1) / align * align
		n = at + size
		return buf[at:n]
	}
	for _, x := range args {
		switch x := x.(type) {
		case View:
			at := x.Addr()
			h.move(&at)
			binary.NativeEndian.PutUint64(room(8, 8), at)
		case int:
			binary.NativeEndian.PutUint32(room(4, 4), uint32(x))
		case source.Pairs:
			h.move(&x.Tokens, &x.Places, &x.Starts)
			copy(room(int(unsafe.Sizeof(x)), 8), unsafe.Slice((*byte)(unsafe.Pointer(&x)), unsafe.Sizeof(x)))
		case int64:
			binary.NativeEndian.PutUint64(room(8, 8), uint64(x))
		case source.Conv:
			h.move(&x.X.At, &x.Before.At, &x.Y.At, &x.DX.At, &x.Dbefore.At, &x.W, &x.Partial)
			copy(room(int(unsafe.Sizeof(x)), 8), unsafe.Slice((*byte)(unsafe.Pointer(&x)), unsafe.Sizeof(x)))
		case source.Quantize:
			h.move(&x.X, &x.ByRow, &x.ByColumn, &x.RowFactors, &x.ColumnFactors, &x.Largest, &x.By, &x.Least)
			copy(room(int(unsafe.Sizeof(x)), 8), unsafe.Slice((*byte)(unsafe.Pointer(&x)), unsafe.Sizeof(x)))
		case source.Router:
			copy(room(int(unsafe.Sizeof(x)), 8), unsafe.Slice((*byte)(unsafe.Pointer(&x)), unsafe.Sizeof(x)))
		default:
			h.t.Fatalf("an argument of type %T", x)
		}
	}
	ok(h.t, h.start(program, "host_"+kernel, [3]int{grid[0], grid[1], 1}, block, shared, a))
}

// put returns a view of xs, rounded to dtype, and the rounded values.
func (h hostExperts) put(dtype tensor.DType, xs []float64, shape ...int) (View, []float64) {
	h.t.Helper()
	mem, err := h.alloc(int64(max(1, len(xs))*dtype.Size()+15) &^ 15)
	ok(h.t, err)
	v := tensor.Dense(mem, dtype, 0, [4]int(shape))
	near.Encode(v, xs)
	return v, near.Decode(v)
}

func (h hostExperts) random(dtype tensor.DType, shape ...int) (View, []float64) {
	xs := make([]float64, shape[0]*shape[1]*shape[2]*shape[3])
	for i := range xs {
		xs[i] = h.rng.NormFloat64()
	}
	return h.put(dtype, xs, shape...)
}

func (h hostExperts) ints(xs []int32, shape ...int) View {
	h.t.Helper()
	mem, err := h.alloc(int64(4*max(1, len(xs))+15) &^ 15)
	ok(h.t, err)
	v := tensor.Dense(mem, tensor.I32, 0, [4]int(shape))
	copy(tensor.Data[int32](v), xs)
	return v
}

func (h hostExperts) close(what string, v View, want []float64) {
	h.t.Helper()
	share := map[tensor.DType]float64{tensor.F32: 1e-5, tensor.F64: 1e-12, tensor.F16: 1e-3, tensor.BF16: 8e-3}
	if len(want) == 0 {
		return
	}
	if err := near.Within(near.Decode(v), want, near.Finite, share[v.DType()]); err != nil {
		h.t.Fatalf("%s: %v", what, err)
	}
}

// A hostDeal holds choices, their sorted pairs by the definition, and the pair of each place.
type hostDeal struct {
	tokens, experts, chosen int
	choice                  []int32
	pair                    []int
	starts                  []int32
	args                    source.Pairs
	views                   [3]View
}

func (h hostExperts) deal(tokens, experts, chosen int) (d hostDeal) {
	d = hostDeal{tokens: tokens, experts: experts, chosen: chosen}
	for range tokens {
		for _, e := range h.rng.Perm(max(chosen, experts-experts/4))[:chosen] {
			d.choice = append(d.choice, int32(e))
		}
	}
	places, of := make([]int32, len(d.choice)), []int32{}
	for e := range experts {
		d.starts = append(d.starts, int32(len(d.pair)))
		for i, c := range d.choice {
			if int(c) == e {
				places[i] = int32(len(d.pair))
				d.pair, of = append(d.pair, i), append(of, int32(i/chosen))
			}
		}
	}
	d.starts = append(d.starts, int32(len(d.pair)))
	n := len(d.pair)
	d.views = [3]View{h.ints(of, 1, n, 1, 1), h.ints(places, 1, tokens, chosen, 1),
		h.ints(d.starts, 1, experts+1, 1, 1)}
	d.args = source.Pairs{Tokens: d.views[0].Addr(), Places: d.views[1].Addr(), Starts: d.views[2].Addr(),
		Count: int32(n), Chosen: int32(chosen), Experts: int32(experts)}
	return d
}

// row returns the row of a place in an operand of n columns.
func (d hostDeal) row(x []float64, n, place int, byToken bool) []float64 {
	if byToken {
		place = d.pair[place] / d.chosen
	}
	return x[place*n:][:n]
}

// TestGroupProductsOnHost runs the products of stacked matrices: whole and partial tiles, several tiles of an
// expert, none, every kernel, rows of places and of tokens, set and added.
func TestGroupProductsOnHost(t *testing.T) {
	var names []string
	for _, k := range []string{"linear", "linear_dx", "linear_dw"} {
		for _, ty := range []string{"bf16", "fp16", "any_bf16", "any_fp16", "any_fp32"} {
			names = append(names, "group_"+k+"_"+ty)
		}
	}
	h := newHostExperts(t, "ops_group", names...)
	for _, s := range []struct{ tokens, experts, chosen, out, in int }{
		{70, 4, 2, 24, 64}, {1, 8, 2, 8, 40}, {300, 2, 1, 136, 72}, {0, 3, 1, 16, 8}, {33, 4, 3, 264, 8}, {20, 4, 2, 0, 16},
		{20, 4, 2, 16, 0}, {40, 3, 2, 65, 17}, {90, 2, 2, 1, 130},
	} {
		for i, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32} {
			fast := dtype != tensor.F32 && s.out%8 == 0 && s.in%8 == 0
			for _, any := range []bool{true, false} {
				if any || fast {
					suffix := []string{"bf16", "fp16", "fp32"}[i]
					h.products(h.deal(s.tokens, s.experts, s.chosen), dtype, suffix, any, s.out, s.in)
					h.used = 0
				}
			}
		}
	}
}

func (h hostExperts) products(d hostDeal, dtype tensor.DType, suffix string, any bool, out, in int) {
	h.t.Helper()
	side, block, shared := 128, [2]int{256, 1}, 48<<10
	if any {
		suffix, side, block, shared = "any_"+suffix, 64, [2]int{16, 16}, 2*16*65*4
	}
	n := len(d.pair)
	tiles := func(n int) int { return (n + side - 1) / side }
	w, ws := h.random(dtype, 1, d.experts*out, 1, in)
	for _, bits := range []int{0, 3, 5, 6} {
		dyBy, xBy, accumulate := bits&1 > 0, bits&2 > 0, bits&4 > 0
		operand := func(byToken bool, cols int) (v View, xs []float64, index View) {
			if byToken {
				v, xs = h.random(dtype, 1, d.tokens, 1, cols)
				return v, xs, d.views[0]
			}
			v, xs = h.random(dtype, 1, n, 1, cols)
			return v, xs, View{}
		}
		x, xs, xi := operand(xBy, in)
		dy, dys, dyi := operand(dyBy, out)
		y, wantY := h.random(dtype, 1, n, 1, out)
		dx, wantDX := h.random(dtype, 1, n, 1, in)
		dw, wantDW := h.random(tensor.F32, 1, d.experts*out, 1, in)
		add := 0
		if accumulate {
			add = 1
		} else {
			clear(wantY)
			clear(wantDX)
			clear(wantDW)
		}
		for i, pair := range d.pair {
			row, grad := d.row(xs, in, i, xBy), d.row(dys, out, i, dyBy)
			for o := range out {
				at := (int(d.choice[pair])*out + o) * in
				for c := range in {
					wantY[i*out+o] += row[c] * ws[at+c]
					wantDX[i*in+c] += grad[o] * ws[at+c]
					wantDW[at+c] += grad[o] * row[c]
				}
			}
		}
		for _, k := range []struct {
			kernel  string
			to      View
			a, ai   View
			b, bi   View
			grid    [2]int
			want    []float64
			columns int
		}{
			{"group_linear_", y, x, xi, w, View{}, [2]int{tiles(out) * (n/side + d.experts), 1}, wantY, out},
			{"group_linear_dx_", dx, dy, dyi, w, View{}, [2]int{tiles(in) * (n/side + d.experts), 1}, wantDX, in},
			{"group_linear_dw_", dw, dy, dyi, x, xi, [2]int{tiles(out) * tiles(in), d.experts}, wantDW, in},
		} {
			if k.to.Size() == 0 {
				continue
			}
			h.call("ops_group", k.kernel+suffix, k.grid, block, shared, k.to, k.a, k.ai, k.b, k.bi, d.args, out, in,
				add)
			h.close(fmt.Sprint(k.kernel, suffix, d.tokens, d.experts, out, in, dyBy, xBy, accumulate), k.to, k.want)
		}
	}
}

// TestExpertRowsOnHost runs the operations by rows, with vectors and without.
func TestExpertRowsOnHost(t *testing.T) {
	h := newHostExperts(t, "ops_experts", expertKernels...)
	for _, n := range []int{16, 264, 7} {
		d := h.deal(21, 4, 3)
		pairs := len(d.pair)
		rows, block := [2]int{(pairs + 7) / 8, 1}, [2]int{32, 8}
		for i, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			lanes, any := 1, "any_fp32"
			if i == 1 {
				if n%8 > 0 {
					continue
				}
				lanes, any = 8, "bf16"
			}
			bias, bs := h.random(tensor.F32, 1, 1, 1, d.experts*n)
			weight, ws := h.random(tensor.F32, 1, d.tokens, d.chosen, 1)
			y, ys := h.random(dtype, 1, pairs, 1, n)
			dy, dys := h.random(dtype, 1, d.tokens, 1, n)
			dweight, dws := h.random(tensor.F32, 1, d.tokens, d.chosen, 1)
			sum, sums := h.random(tensor.F32, 1, 1, 1, d.experts*n)
			out, outs := h.random(dtype, 1, d.tokens, 1, n)
			wantY := slices.Clone(ys)
			for i, pair := range d.pair {
				e := int(d.choice[pair])
				for c := range n {
					g := dys[pair/d.chosen*n+c]
					wantY[i*n+c] += bs[e*n+c]
					sums[e*n+c] += ws[pair] * g
					dws[pair] += g * bs[e*n+c]
					outs[pair/d.chosen*n+c] += ws[pair] * ys[i*n+c]
				}
			}
			h.call("ops_experts", "combine_"+any, [2]int{d.tokens, 1}, [2]int{32, 1}, 0, out, out, y, weight, d.args, n)
			h.close("combine", out, outs)
			h.call("ops_experts", "group_add_"+any, rows, block, 0, y, bias, d.args, n)
			h.close("add", y, wantY)
			h.call("ops_experts", "group_sum_"+any, [2]int{(n + 32*lanes - 1) / (32 * lanes), d.experts}, block,
				1024*lanes, sum, dy, 1, weight, d.args, n)
			h.close("sum", sum, sums)
			h.call("ops_experts", "group_dot_"+any, rows, block, 0, dweight, dy, 1, bias, d.args, n)
			h.close("dot", dweight, dws)
		}
		h.gates(d, n)
	}
}

// gates checks the gated activation and its gradients in place, for the clamped gate.
func (h hostExperts) gates(d hostDeal, n int) {
	h.t.Helper()
	pairs, name := len(d.pair), "group_clamped_"
	if n%4 > 0 {
		name += "any_"
	}
	x, xs := h.random(tensor.F32, 1, pairs, 1, 2*n)
	for i := range xs {
		xs[i] *= 4
	}
	near.Encode(x, xs)
	da, das := h.random(tensor.F32, 1, pairs, 1, n)
	weight, ws := h.random(tensor.F32, 1, d.tokens, d.chosen, 1)
	y, _ := h.random(tensor.F32, 1, pairs, 1, n)
	dweight, dws := h.random(tensor.F32, 1, d.tokens, d.chosen, 1)
	clear(dws)
	value := func(gate, up float64) float64 {
		g := min(gate, 7)
		return (min(max(up, -7), 7) + 1) * g / (1 + math.Exp(-1.702*g))
	}
	var wantY, wantWY []float64
	wantDX := make([]float64, len(xs))
	for i, pair := range d.pair {
		for c := range n {
			gate, up := xs[i*2*n+c], xs[i*2*n+n+c]
			v, g := value(gate, up), das[i*n+c]
			wantY, wantWY = append(wantY, v), append(wantWY, ws[pair]*v)
			dws[pair] += g * v
			const by = 1e-6
			wantDX[i*2*n+c] = ws[pair] * g * (value(gate+by, up) - value(gate-by, up)) / (2 * by)
			wantDX[i*2*n+n+c] = ws[pair] * g * (value(gate, up+by) - value(gate, up-by)) / (2 * by)
		}
	}
	rows, block := [2]int{(pairs + 7) / 8, 1}, [2]int{32, 8}
	h.call("ops_experts", name+"fp32", rows, block, 0, y, x, pairs, n)
	h.close("y", y, wantY)
	h.call("ops_experts", name+"backward_fp32", rows, block, 0, x, da, dweight, da, x, weight, d.args, n)
	h.close("dx", x, wantDX)
	h.close("wy", da, wantWY)
	h.close("dweight", dweight, dws)
}

// TestSortOnHost sorts pairs over several chunks.
func TestSortOnHost(t *testing.T) {
	h := newHostExperts(t, "ops_experts", expertKernels...)
	for _, s := range []struct{ tokens, experts, chosen int }{{0, 4, 2}, {1, 1, 1}, {3, 8, 8}, {400, 130, 3}, {700, 5, 2}} {
		d := h.deal(s.tokens, s.experts, s.chosen)
		const chunk = 256
		n := len(d.choice)
		chunks, choice := (n+chunk-1)/chunk, h.ints(d.choice, 1, s.tokens, s.chosen, 1)
		counts := h.ints(make([]int32, chunks*s.experts), 1, chunks, 1, s.experts)
		totals := h.ints(make([]int32, s.experts), 1, s.experts, 1, 1)
		tokens, places := h.ints(make([]int32, n), 1, n, 1, 1), h.ints(make([]int32, n), 1, n, 1, 1)
		starts := h.ints(make([]int32, s.experts+1), 1, s.experts+1, 1, 1)
		if chunks > 0 {
			h.call("ops_experts", "sort_count", [2]int{chunks, 1}, [2]int{256, 1}, 4*s.experts, counts, choice, n, chunk,
				s.experts)
		}
		h.call("ops_experts", "sort_scan", [2]int{s.experts, 1}, [2]int{32, 1}, 0, counts, totals, chunks)
		h.call("ops_experts", "sort_starts", [2]int{1, 1}, [2]int{32, 1}, 0, starts, totals, s.experts)
		if chunks > 0 {
			h.call("ops_experts", "sort_place", [2]int{chunks, 1}, [2]int{256, 1}, 32*s.experts, tokens, places, starts,
				counts, choice, n, s.chosen, chunk, s.experts)
		}
		for i, c := range []struct{ got, want View }{{tokens, d.views[0]}, {places, d.views[1]}, {starts, d.views[2]}} {
			if got, want := tensor.Data[int32](c.got), tensor.Data[int32](c.want); !slices.Equal(got, want) {
				t.Errorf("%v: view %d is %v, want %v", s, i, got, want)
			}
		}
	}
}

var expertKernels = []string{"route", "route_backward_fp32", "count_parts", "count_add", "sort_count", "sort_scan",
	"sort_starts", "sort_place", "combine_bf16", "combine_any_fp32", "group_add_bf16", "group_add_any_fp32",
	"group_sum_bf16", "group_sum_any_fp32", "group_dot_bf16", "group_dot_any_fp32", "group_clamped_fp32",
	"group_clamped_any_fp32", "group_clamped_any_backward_fp32", "group_clamped_backward_fp32"}

// TestRouteOnHost compares choices, weights, gradients and counts with their definitions.
func TestRouteOnHost(t *testing.T) {
	h := newHostExperts(t, "ops_experts", expertKernels...)
	for _, s := range []struct {
		rows, n, k int
		r          source.Router
	}{
		{9, 8, 2, source.Router{Scale: 1}}, {5, 40, 3, source.Router{Scale: 0.5, Normalize: 1}},
		{7, 33, 33, source.Router{Scale: 2, Sigmoid: 1}},
		{6, 64, 4, source.Router{Scale: 1, Sigmoid: 1, Normalize: 1, Groups: 8, Kept: 3}},
		{5, 70, 3, source.Router{Scale: 1, Groups: 35, Kept: 2}},
		{4, 12, 2, source.Router{Scale: 1, Sigmoid: 1, Groups: 12, Kept: 5}},
	} {
		logits, ls := h.random(tensor.F32, 1, s.rows, 1, s.n)
		correction, cs := h.random(tensor.F32, 1, 1, 1, s.n)
		weight, _ := h.random(tensor.F32, 1, s.rows, s.k, 1)
		choice := h.ints(make([]int32, s.rows*s.k), 1, s.rows, s.k, 1)
		const warps = 4
		grid := [2]int{(s.rows + warps - 1) / warps, 1}
		h.call("ops_experts", "route", grid, [2]int{32, warps}, warps*8*(2*s.n+int(s.r.Groups)), weight, choice, logits,
			correction, s.rows, s.n, s.k, s.r)
		dweight, dws := h.random(tensor.F32, 1, s.rows, s.k, 1)
		dshare, dss := h.random(tensor.F32, 1, 1, 1, s.n)
		dlogits, _ := h.random(tensor.F32, 1, s.rows, 1, s.n)
		numbers := make([]int32, s.rows)
		numbers[1] = -1
		tokens := h.ints(numbers, 1, s.rows, 1, 1)
		h.call("ops_experts", "route_backward_fp32", grid, [2]int{32, warps}, warps*16*s.n, dlogits, dweight, choice, logits,
			dshare, tokens, s.rows, s.n, s.k, s.r)
		load, loads := h.put(tensor.F64, make([]float64, s.n), 1, 1, 1, s.n)
		share, shares := h.random(tensor.F64, 1, 1, 1, s.n)
		parts, _ := h.put(tensor.F64, make([]float64, 4*s.n), 1, 2, 2, s.n)
		h.call("ops_experts", "count_parts", [2]int{2, 1}, [2]int{32, 2}, 2*16*s.n+4*s.n, parts, choice, logits, tokens,
			1, s.rows, s.n, s.k)
		h.call("ops_experts", "count_add", [2]int{(2*s.n + 127) / 128, 1}, [2]int{128, 1}, 0, load, share, parts, 2,
			s.n)
		var want, wantDL []float64
		for row := range s.rows {
			score := hostScores(ls[row*s.n:][:s.n], s.r.Sigmoid == 1)
			got := tensor.Data[int32](choice)[row*s.k:][:s.k]
			if w := hostRoute(score, cs, s.k, s.r); !slices.Equal(got, w) {
				t.Fatalf("%+v: row %d has the choices %v, want %v", s, row, got, w)
			}
			w := hostWeights(score, got, s.r)
			want = append(want, w...)
			for e := range s.n { // the derivative by differences
				of := func(by float64) (sum float64) {
					moved := slices.Clone(ls[row*s.n:][:s.n])
					moved[e] += by
					for j, x := range hostWeights(hostScores(moved, s.r.Sigmoid == 1), got, s.r) {
						sum += x * dws[row*s.k+j]
					}
					for i, x := range hostScores(moved, false) {
						if numbers[row] >= 0 {
							sum += x * dss[i]
						}
					}
					return sum
				}
				wantDL = append(wantDL, (of(1e-5)-of(-1e-5))/2e-5)
			}
			if numbers[row] >= 0 {
				for _, e := range got {
					loads[e]++
				}
				for e, x := range hostScores(ls[row*s.n:][:s.n], false) {
					shares[e] += x
				}
			}
		}
		h.close("weight", weight, want)
		h.close("dlogits", dlogits, wantDL)
		h.close("load", load, loads)
		h.close("share", share, shares)
	}
}

func hostScores(logits []float64, sigmoid bool) []float64 {
	s, sum := make([]float64, len(logits)), 0.0
	for i, x := range logits {
		if s[i] = math.Exp(x); sigmoid {
			s[i] = 1 / (1 + math.Exp(-x))
		}
		sum += s[i]
	}
	for i := range s {
		if !sigmoid {
			s[i] /= sum
		}
	}
	return s
}

func hostRoute(score, correction []float64, k int, r source.Router) (choice []int32) {
	keys, groups := make([]float64, len(score)), max(1, int(r.Groups))
	size := len(score) / groups
	sums := make([]float64, groups)
	for e := range keys {
		keys[e] = score[e] + correction[e]
	}
	best := func(keys []float64) int { return slices.Index(keys, slices.Max(keys)) }
	for g := range sums {
		of := slices.Clone(keys[g*size:][:size])
		for range min(2, size) {
			i := best(of)
			sums[g] += of[i]
			of[i] = math.Inf(-1)
		}
	}
	kept := make([]bool, groups)
	for range int(r.Kept) {
		g := best(sums)
		kept[g], sums[g] = true, math.Inf(-1)
	}
	for range k {
		for e := range keys {
			if r.Groups > 1 && !kept[e/size] {
				keys[e] = math.Inf(-1)
			}
		}
		e := best(keys)
		choice, keys[e] = append(choice, int32(e)), math.Inf(-1)
	}
	return choice
}

func hostWeights(score []float64, choice []int32, r source.Router) (w []float64) {
	sum := 0.0
	for _, e := range choice {
		sum += score[e]
	}
	if r.Normalize == 0 {
		sum = 1
	}
	for _, e := range choice {
		w = append(w, r.Scale*score[e]/sum)
	}
	return w
}
