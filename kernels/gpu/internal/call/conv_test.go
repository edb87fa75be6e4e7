//go:build cuda

package call

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

var convKernels = []string{"conv_bf16", "conv_fp16", "conv_fp32", "conv_any_bf16", "conv_any_fp16", "conv_any_fp32",
	"conv_backward_bf16", "conv_backward_fp16", "conv_backward_fp32", "conv_backward_any_bf16", "conv_backward_any_fp16",
	"conv_backward_any_fp32", "gates_bf16", "gates_fp32", "gates_backward_bf16", "gates_backward_fp32"}

// TestConvOnHost compares the kernels with the CPU's: segments shorter than the width, within a tile and longer,
// several launches, columns of wider rows, NaN beside the ends of segments, and one block with all tiles.
func TestConvOnHost(t *testing.T) {
	h := newHostExperts(t, "ops_conv", convKernels...)
	for _, s := range []struct {
		batch, n, width int
		lengths         []int
		from, gap       int
	}{
		{2, 132, 4, []int{1, 2, 3, 33, 100}, 0, 0}, {1, 24, 4, []int{5, 40}, 8, 24}, {2, 24, 4, []int{5, 40}, 3, 8},
		{1, 4, 4, slices.Repeat([]int{1, 34}, 35), 0, 0}, {1, 35, 2, []int{3, 1}, 0, 0}, {2, 7, 8, []int{3, 40, 1}, 1, 2},
		{1, 8, 3, []int{300}, 0, 0},
	} {
		for i, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32} {
			var segments []partition.Range
			rows := 0
			for _, n := range s.lengths {
				segments = append(segments, partition.Range{Lo: rows, Hi: rows + n})
				rows += n
			}
			view := func(batch, rows int) View {
				v, _ := h.random(dtype, batch, rows, 1, s.n+s.gap)
				return v.Slice(tensor.Dim, s.from, s.from+s.n)
			}
			heads, tail := len(segments)*s.batch, s.width-1
			x, before, dy := view(s.batch, rows), view(heads, tail), view(s.batch, rows)
			w, _ := h.random(tensor.F32, 1, s.n, 1, s.width)
			set(x, [4]int{0, segments[0].Hi - 1, 0, 0}, math.NaN())
			set(before, [4]int{heads - 1, tail - 1, 0, s.n - 1}, math.NaN())
			name := []string{"bf16", "fp16", "fp32"}[i]
			results := [2][4]View{}
			for i := range results {
				dw, _ := h.put(tensor.F32, make([]float64, s.n*s.width), 1, s.n, 1, s.width)
				results[i] = [4]View{view(s.batch, rows), view(s.batch, rows), view(heads, tail), dw}
			}
			c, got := Conv{X: x, Before: before, Y: results[0][0], W: w, Segments: segments}, results[0]
			launches, vectors := c.Launches()
			if want := s.width == 4 && s.n%4 == 0 && s.from%4 == 0; vectors != want {
				t.Fatalf("%v: vectors %t", s, vectors)
			}
			if !vectors {
				name = "any_" + name
			}
			block := [2]int{32, ConvWarps}
			for _, l := range launches {
				h.call("ops_conv", "conv_"+name, l.Grid, block, 0, l.Params)
			}
			c.Y, c.DX, c.Dbefore = dy, got[1], got[2]
			launches, _ = c.Launches()
			sum := make([]float64, s.n*s.width)
			for i, l := range launches {
				blocks := l.Grid[0]
				if i == 0 {
					blocks = 1
				}
				partial, _ := h.random(tensor.F32, 1, blocks, 1, len(sum))
				l.Params.Partial = partial.Addr()
				h.call("ops_conv", "conv_backward_"+name, [2]int{blocks, l.Grid[1]}, block, ConvShared, l.Params)
				for i, x := range near.Decode(partial) {
					sum[i%len(sum)] += x
				}
			}
			near.Encode(got[3], sum)

			stream, want := tensor.NewHostStream("test"), results[1]
			k := cpu.New(stream)
			k.Conv(want[0], x, before, w, segments)
			k.ConvBackward(want[1], want[2], want[3], dy, x, before, w, segments)
			ok(t, stream.Sync(context.Background()))
			ok(t, stream.Close())
			for i, what := range []string{"y", "dx", "dbefore", "dw"} {
				h.agree(fmt.Sprint(what, " of ", name, s), got[i], want[i])
			}
			h.used = 0
		}
	}
}

// set sets an element of v.
func set(v View, at [4]int, x float64) {
	near.Encode(v.Slice(tensor.Batch, at[0], at[0]+1).Slice(tensor.Seq, at[1], at[1]+1).
		Slice(tensor.Dim, at[3], at[3]+1), []float64{x})
}

// agree fails the test unless the elements are as close as their type allows. NaN agrees with NaN.
func (h hostExperts) agree(what string, got, want View) {
	h.t.Helper()
	share := map[tensor.DType]float64{tensor.F32: 1e-5, tensor.F16: 2e-3, tensor.BF16: 1.6e-2}[got.DType()]
	rows := func(v View) []float64 { return near.Decode(tensor.Gather(v, all(v.Len(tensor.Seq)))) }
	if err := near.Within(rows(got), rows(want), near.NonFinite, share); err != nil {
		h.t.Fatalf("%s: %v", what, err)
	}
}

func all(n int) (list []int) {
	for i := range n {
		list = append(list, i)
	}
	return list
}

// TestDecayOnHost compares the gates with the CPU's.
func TestDecayOnHost(t *testing.T) {
	h := newHostExperts(t, "ops_conv", convKernels...)
	stream := tensor.NewHostStream("test")
	defer stream.Close()
	k := cpu.New(stream)
	for _, s := range [][2]int{{1, 1}, {50, 16}, {21, 48}} {
		for i, dtype := range []tensor.DType{tensor.BF16, tensor.F32} {
			name, rows, heads := []string{"bf16", "fp32"}[i], s[0], s[1]
			view := func(dtype tensor.DType) View { v, _ := h.random(dtype, 1, rows, heads, 1); return v }
			a, b, dg, dbeta := view(dtype), view(dtype), view(tensor.F32), view(tensor.F32)
			set(a, [4]int{}, 100)
			aLog, _ := h.random(tensor.F32, 1, 1, 1, heads)
			dt, _ := h.random(tensor.F32, 1, 1, 1, heads)
			var g, beta, da, db [2]View
			for i := range 2 {
				g[i], beta[i], da[i], db[i] = view(tensor.F32), view(tensor.F32), view(dtype), view(dtype)
			}
			h.call("ops_conv", "gates_"+name, [2]int{(rows*heads + 255) / 256, 1}, [2]int{256, 1}, 0, g[0], beta[0], a, b,
				aLog, dt, int64(rows*heads), heads)
			const parts = 3
			partial, _ := h.random(tensor.F32, 2, parts, 1, heads)
			h.call("ops_conv", "gates_backward_"+name, [2]int{parts, (heads + 31) / 32}, [2]int{32, ConvWarps}, ConvShared,
				da[0], db[0], partial, dg, dbeta, g[0], beta[0], a, aLog, dt, rows, heads)

			daLog, _ := h.put(tensor.F32, make([]float64, heads), 1, 1, 1, heads)
			ddt, _ := h.put(tensor.F32, make([]float64, heads), 1, 1, 1, heads)
			k.Gates(g[1], beta[1], a, b, aLog, dt)
			k.GatesBackward(da[1], db[1], daLog, ddt, dg, dbeta, g[1], beta[1], a, aLog, dt)
			ok(t, stream.Sync(context.Background()))
			for i, what := range []string{"g", "beta", "da", "db"} {
				v := [][2]View{g, beta, da, db}[i]
				h.agree(fmt.Sprint(what, " of ", name, s), v[0], v[1])
			}
			for i, want := range []View{ddt, daLog} {
				sums := make([]float64, heads)
				for j, x := range near.Decode(partial.Slice(tensor.Batch, i, i+1)) {
					sums[j%heads] += x
				}
				h.close(fmt.Sprint("gradient ", i, " of ", name, s), want, sums)
			}
			h.used = 0
		}
	}
}
