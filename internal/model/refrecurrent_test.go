package model

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// packed returns a dense copy of a host view.
func packed(v View) View {
	out := tensor.New(v.DType(), v.Len(tensor.Batch), v.Len(tensor.Seq), v.Len(tensor.Heads), v.Len(tensor.Dim))
	tensor.Copy(out, v)
	return out
}

// unpack puts xs in a view that may have gaps.
func unpack(v View, xs []float64) {
	out := packed(v)
	put(out, xs)
	tensor.Copy(v, out)
}

// convTerms calls f for each product in the sums before silu: with the index of the sum in x, of the factor in x or, if
// that is negative, -1 minus the index in before, and of the weight.
func convTerms(x, w View, segments []partition.Range, f func(sum, factor, weight int)) {
	batch, rows, n, width := x.Len(tensor.Batch), x.Len(tensor.Seq), x.Len(tensor.Dim), w.Len(tensor.Dim)
	for i, s := range segments {
		for b := range batch {
			for t := s.Lo; t < s.Hi; t++ {
				for c := range n {
					for j := range width {
						from, factor := t-width+1+j, 0
						if factor = (b*rows+from)*n + c; from < s.Lo {
							factor = -1 - (((i*batch+b)*(width-1)+from-s.Lo+width-1)*n + c)
						}
						f((b*rows+t)*n+c, factor, c*width+j)
					}
				}
			}
		}
	}
}

// element returns the factor of convTerms.
func element(x, before []float64, factor int) *float64 {
	if factor < 0 {
		return &before[-1-factor]
	}
	return &x[factor]
}

func (refOps) Conv(y, x, before, w View, segments []partition.Range) {
	X, B, W, Y := get(packed(x)), get(packed(before)), get(w), get(packed(y))
	sums, set := make([]float64, len(X)), make([]bool, len(X))
	convTerms(x, w, segments, func(sum, factor, weight int) {
		sums[sum] += W[weight] * *element(X, B, factor)
		set[sum] = true
	})
	for i, s := range sums {
		if set[i] {
			Y[i] = s / (1 + math.Exp(-s))
		}
	}
	unpack(y, Y)
}

func (refOps) ConvBackward(dx, dbefore, dw, dy, x, before, w View, segments []partition.Range) {
	X, B, W, D := get(packed(x)), get(packed(before)), get(w), get(packed(dy))
	sums, DX, DB, DW := make([]float64, len(X)), get(packed(dx)), make([]float64, len(B)), make([]float64, len(W))
	convTerms(x, w, segments, func(sum, factor, weight int) {
		sums[sum] += W[weight] * *element(X, B, factor)
		DX[sum] = 0
	})
	convTerms(x, w, segments, func(sum, factor, weight int) {
		s := 1 / (1 + math.Exp(-sums[sum]))
		d := D[sum] * s * (1 + sums[sum]*(1-s))
		*element(DX, DB, factor) += d * W[weight]
		DW[weight] += d * *element(X, B, factor)
	})
	unpack(dx, DX)
	unpack(dbefore, DB)
	addTo(dw, DW)
}

// addTo adds xs to a dense view, unless that is the zero View.
func addTo(v View, xs []float64) {
	if v.IsZero() {
		return
	}
	sum := get(v)
	for i, x := range xs {
		sum[i] += x
	}
	put(v, sum)
}

func (refOps) Gates(g, beta, a, b, aLog, dt View) {
	A, L, T, G, B := get(a), get(aLog), get(dt), get(g), get(b)
	for i := range A {
		h := i % len(L)
		G[i] = -math.Exp(L[h]) * math.Log1p(math.Exp(A[i]+T[h]))
		B[i] = 1 / (1 + math.Exp(-B[i]))
	}
	put(g, G)
	put(beta, B)
}

func (refOps) GatesBackward(da, db, daLog, ddt, dg, dbeta, g, beta, a, aLog, dt View) {
	A, L, T, G, B, DA, DB := get(a), get(aLog), get(dt), get(g), get(beta), get(dg), get(dbeta)
	dlog, dT := make([]float64, len(L)), make([]float64, len(L))
	for i := range A {
		h := i % len(L)
		dlog[h] += DA[i] * G[i]
		DA[i] *= -math.Exp(L[h]) / (1 + math.Exp(-A[i]-T[h]))
		DB[i] *= B[i] * (1 - B[i])
		dT[h] += DA[i]
	}
	put(da, DA)
	put(db, DB)
	addTo(daLog, dlog)
	addTo(ddt, dT)
}

// TestRecurrentReference compares the definitions with the CPU's kernels, with columns of wider rows.
func TestRecurrentReference(t *testing.T) {
	stream := tensor.NewHostStream("test")
	defer stream.Close()
	results := func(ops Ops) (list []View) {
		rng := rand.New(rand.NewPCG(1, 2))
		random := func(shape ...int) View {
			v := tensor.New(tensor.F64, shape...)
			for i := range tensor.Data[float64](v) {
				tensor.Data[float64](v)[i] = rng.NormFloat64()
			}
			return v
		}
		columns := func(rows, seq int) View { return random(rows, seq, 1, 7).Slice(tensor.Dim, 2, 5) }
		segments := []partition.Range{{Lo: 0, Hi: 2}, {Lo: 3, Hi: 9}}
		x, before, y, dx, dbefore := columns(2, 9), columns(4, 3), columns(2, 9), columns(2, 9), columns(4, 3)
		w, dw := random(1, 3, 1, 4), random(1, 3, 1, 4)
		ops.Conv(y, x, before, w, segments)
		ops.ConvBackward(dx, dbefore, dw, y, x, before, w, segments)
		gate := func() View { return random(2, 5, 3, 1) }
		g, beta, a, b, da, db := gate(), gate(), gate(), gate(), gate(), gate()
		aLog, dt, daLog, ddt := random(3), random(3), random(3), random(3)
		ops.Gates(g, beta, a, b, aLog, dt)
		ops.GatesBackward(da, db, daLog, ddt, g, beta, g, beta, a, aLog, dt)
		if err := stream.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		return []View{y, dx, dbefore, dw, g, beta, da, db, daLog, ddt}
	}
	want := results(cpu.New(stream))
	for i, v := range results(refOps{}) {
		for j, x := range get(packed(v)) {
			near(t, fmt.Sprintf("element %d of result %d", j, i), x, get(packed(want[i]))[j], 1e-12)
		}
	}
}
