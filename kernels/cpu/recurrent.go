package cpu

import (
	"math"
	"slices"

	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

const (
	convColumns = 64 // columns of a piece of Conv, which has all rows
	convRows    = 32 // rows of a piece that are in scratch memory at once
)

// Conv sets y to silu of the causal depthwise convolution of x in each segment; see model.Ops.
func (c *Kernels) Conv(y, x, before, w tensor.View, segments []partition.Range) {
	const op = "conv"
	checkConv(op, before, w, segments, y, x)
	v := convViews{dx: y, dbefore: before, dy: y, x: x, before: before, w: w, segments: segments}
	forType(y, convolve[float64], convolve[float32])(c, op, v)
}

// ConvBackward sets dx and dbefore, and adds to dw unless that is the zero View; see model.Ops. The sums of dw are
// float64 and run over the rows in order.
func (c *Kernels) ConvBackward(dx, dbefore, dw, dy, x, before, w tensor.View, segments []partition.Range) {
	const op = "conv backward"
	checkConv(op, before, w, segments, dx, dy, x)
	checkConv(op, dbefore, w, segments, dx)
	if !dw.IsZero() {
		checkConv(op, before, dw, segments, x)
	}
	v := convViews{dx, dbefore, dw, dy, x, before, w, segments, true}
	forType(dx, convolve[float64], convolve[float32])(c, op, v)
}

// checkConv does what shape.Conv does, and checks the type of w.
func checkConv(op string, before, w tensor.View, segments []partition.Range, xs ...tensor.View) {
	shape.Conv(op, before, w, segments, xs...)
	dense(op, paramType(xs[0]), w)
}

// paramType returns the type of parameters beside activations.
func paramType(activations tensor.View) tensor.DType {
	if isHalf(activations.DType()) {
		return tensor.F32
	}
	return activations.DType()
}

// convViews holds the arguments of ConvBackward, or of Conv, with its result as dx and without other gradients.
type convViews struct {
	dx, dbefore, dw, dy, x, before, w tensor.View
	segments                          []partition.Range
	backward                          bool
}

// A conv is a convolution of elements that it computes as T.
type conv[T tensor.Float] struct {
	convViews
	dxs, dbefores, dys, xs, befores rows[T]
	loops                           simd.Loops[T]
	width                           int
}

// convolve queues a convolution: a piece for each block of columns.
func convolve[T tensor.Float](c *Kernels, op string, v convViews) {
	v.segments = slices.Clone(v.segments)
	k := conv[T]{v, rowsOf[T](v.dx), rowsOf[T](v.dbefore), rowsOf[T](v.dy), rowsOf[T](v.x), rowsOf[T](v.before),
		simd.LoopsOf[T](c.level), v.w.Len(tensor.Dim)}
	n := v.x.Len(tensor.Dim)
	c.queue(op, func() {
		c.split((n+convColumns-1)/convColumns, func(s *scratch, i int) {
			k.piece(s, i*convColumns, min(n, (i+1)*convColumns))
		})
	})
}

// get reads count rows since [b, s] into dst, n columns since lo of each.
func (r rows[T]) get(dst []T, b, s, lo, count, n int) {
	r.loadRows(dst, int(at(r.view, b, s, 0))+lo, int(r.view.Stride(tensor.Seq)), count, n)
}

// set writes columns since lo of row [b, s].
func (r rows[T]) set(b, s, lo int, src []T) { r.store(int(at(r.view, b, s, 0))+lo, src) }

// setTaps sets y to the sum over w [width, len(y)] times rows of r. The first is at index from, the next after step.
func setTaps[T tensor.Float](y, w, r []T, from, step int) {
	clear(y)
	for ; len(w) > 0; w, from = w[len(y):], from+step {
		ws, rs := w[:len(y)], r[from:][:len(y)]
		for i := range y {
			y[i] += ws[i] * rs[i]
		}
	}
}

// piece computes columns [lo, hi). r holds rows of x after the width-1 rows before them, and ds the gradients of the
// sums before silu, likewise. After a segment ds has width-1 rows of 0: the gradient of row t-width+1 is the sum over j
// of w_j * ds_(t-j).
func (k *conv[T]) piece(s *scratch, lo, hi int) {
	m, tail, all := hi-lo, k.width-1, convRows*(hi-lo)
	mem := open[T](s, k.width*m, all+tail*m, all+tail*m, all, all, all, all)
	w, r, ds, sum := mem.take(k.width*m), mem.take(all+tail*m), mem.take(all+tail*m), mem.take(all)
	one, dy, out := mem.take(all), mem.take(all), mem.take(all)
	for i, x := range tensor.Data[T](k.w)[lo*k.width : hi*k.width] {
		w[i%k.width*m+i/k.width] = x
	}
	for i := range one {
		one[i] = 1
	}
	var dw [shape.ConvWidth * convColumns]float64
	for i := range len(k.segments) * k.x.Len(tensor.Batch) {
		seg, b := k.segments[i/k.x.Len(tensor.Batch)], i%k.x.Len(tensor.Batch)
		end := seg.Hi
		if k.backward {
			end += tail
		}
		k.befores.get(r, i, 0, lo, tail, m)
		clear(ds[:tail*m])
		for t := seg.Lo; t < end; t += convRows {
			count, inside := min(convRows, end-t), max(0, min(convRows, seg.Hi-t))
			n := inside * m
			k.xs.get(r[tail*m:], b, t, lo, inside, m)
			for at := 0; at < n; at += m {
				setTaps(sum[at:][:m], w, r, at, m)
			}
			if !k.backward {
				k.loops.SwiGLU(out[:n], sum[:n], one[:n])
				for j := range count {
					k.dxs.set(b, t+j, lo, out[j*m:][:m])
				}
				copy(r, r[n:][:tail*m])
				continue
			}
			k.dys.get(dy, b, t, lo, inside, m)
			k.loops.SwiGLUBackward(ds[tail*m:][:n], out[:n], dy[:n], sum[:n], one[:n])
			clear(ds[tail*m+n:])
			for at := 0; at < n && !k.dw.IsZero(); at += m {
				for j, d := range ds[tail*m+at:][:m] {
					for tap := range k.width {
						dw[j*k.width+tap] += float64(d) * float64(r[at+tap*m+j])
					}
				}
			}
			for j := range count {
				setTaps(out[:m], w, ds, (tail+j)*m, -m)
				if p := t + j - tail; p >= seg.Lo {
					k.dxs.set(b, p, lo, out[:m])
				} else {
					k.dbefores.set(i, p-seg.Lo+tail, lo, out[:m])
				}
			}
			copy(r, r[count*m:][:tail*m])
			copy(ds, ds[count*m:][:tail*m])
		}
	}
	if !k.dw.IsZero() {
		to := tensor.Data[T](k.dw)[lo*k.width : hi*k.width]
		for i := range to {
			to[i] = T(float64(to[i]) + dw[i])
		}
	}
}

// Gates sets g = -exp(aLog) * softplus(a + dt) and beta = sigmoid(b). It computes in float64.
func (c *Kernels) Gates(g, beta, a, b, aLog, dt tensor.View) {
	const op = "gates"
	checkGates(op, []tensor.View{a, b}, aLog, dt, g, beta)
	as, bs, logs, dts, gs, betas := loader(a), loader(b), loader(aLog), loader(dt), storer(g), storer(beta)
	heads := int64(a.Cols())
	c.queue(op, func() {
		c.blocks(a.Size(), elementBlock, func(_, lo, hi int) {
			for i := int64(lo); i < int64(hi); i++ {
				x := as(i) + dts(i%heads)
				gs(i, -math.Exp(logs(i%heads))*(max(x, 0)+math.Log1p(math.Exp(-math.Abs(x)))))
				betas(i, sigmoid(bs(i)))
			}
		})
	})
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// checkGates panics unless the types are those of activations and of parameters, and the shapes match.
func checkGates(op string, activations []tensor.View, aLog, dt tensor.View, params ...tensor.View) {
	denseActivations(op, activations...)
	dense(op, paramType(activations[0]), append(params, aLog, dt)...)
	shape.Gates(op, []tensor.View{aLog, dt}, append(params, activations...)...)
}

// gatesRows is the rows of a piece of GatesBackward.
const gatesRows = 128

// GatesBackward sets da and db, given dg and dbeta, and adds to daLog and ddt, unless one is the zero View: da = dg *
// -exp(aLog) * sigmoid(a + dt), ddt = sum of da, daLog = sum of dg * g. It computes in float64.
func (c *Kernels) GatesBackward(da, db, daLog, ddt, dg, dbeta, g, beta, a, aLog, dt tensor.View) {
	const op = "gates backward"
	checkGates(op, []tensor.View{a, da, db}, aLog, dt, dg, dbeta, g, beta)
	vectors := []tensor.View{ddt, daLog}
	for _, v := range vectors {
		if !v.IsZero() {
			checkGates(op, []tensor.View{a}, aLog, v, g)
		}
	}
	toA, toB, dgs, dbetas, gs, betas := storer(da), storer(db), loader(dg), loader(dbeta), loader(g), loader(beta)
	as, logs, dts, rows, n := loader(a), loader(aLog), loader(dt), a.Rows(), a.Cols()
	c.queue(op, func() {
		partial := grow(&c.sums, (rows+gatesRows-1)/gatesRows*2*n)
		clear(partial)
		c.blocks(rows, gatesRows, func(part, lo, hi int) {
			sums := partial[part*2*n:]
			for i := int64(lo * n); i < int64(hi*n); i++ {
				h, x := i%int64(n), betas(i)
				d := dgs(i) * -math.Exp(logs(h)) * sigmoid(as(i)+dts(h))
				toA(i, d)
				toB(i, dbetas(i)*x*(1-x))
				sums[h] += d
				sums[int64(n)+h] += dgs(i) * gs(i)
			}
		})
		for i, v := range vectors {
			for h := 0; h < n && !v.IsZero(); h++ {
				sum := loader(v)(int64(h))
				for at := i*n + h; at < len(partial); at += 2 * n {
					sum += partial[at]
				}
				storer(v)(int64(h), sum)
			}
		}
	})
}
