package model

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// refOps implement the definitions of the operations: in float64, one loop each, rounded when stored. They work on any
// float type and share no code with the kernels, so they are an independent reference for the model and for the
// kernels.
type refOps struct{}

var _ Ops = refOps{}

// get returns the elements of a view as float64.
func get(v View) []float64 {
	out := make([]float64, v.Size())
	switch v.DType() {
	case tensor.F64:
		copy(out, tensor.Data[float64](v))
	case tensor.F32:
		for i, x := range tensor.Data[float32](v) {
			out[i] = float64(x)
		}
	case tensor.BF16:
		for i, x := range tensor.Data[uint16](v) {
			out[i] = float64(math.Float32frombits(uint32(x) << 16))
		}
	default:
		panic(fmt.Sprintf("get %v", v))
	}
	return out
}

// put rounds xs to the view's type.
func put(v View, xs []float64) {
	if !v.IsDense() || v.Size() != len(xs) {
		panic(fmt.Sprintf("put %d elements to %v", len(xs), v))
	}
	switch v.DType() {
	case tensor.F64:
		copy(tensor.Data[float64](v), xs)
	case tensor.F32:
		d := tensor.Data[float32](v)
		for i, x := range xs {
			d[i] = float32(x)
		}
	case tensor.BF16:
		d := tensor.Data[uint16](v)
		for i, x := range xs {
			bits := math.Float32bits(float32(x))
			d[i] = uint16((bits + 0x7fff + bits>>16&1) >> 16) // to nearest, ties to even
		}
	default:
		panic(fmt.Sprintf("put %v", v))
	}
}

func ints(v View) []int32 { return tensor.Data[int32](v) }

func (refOps) Linear(y, x, w, add View) {
	n, in, out := x.Rows(), x.Cols(), w.Rows()
	X, W, Y := get(x), get(w), make([]float64, y.Size())
	if !add.IsZero() {
		Y = get(add)
	}
	for t := range n {
		xs := X[t*in:][:in]
		for o := range out {
			sum, ws := Y[t*out+o], W[o*in:][:in]
			for i, x := range xs {
				sum += x * ws[i]
			}
			Y[t*out+o] = sum
		}
	}
	put(y, Y)
}

func (refOps) LinearDX(dx, dy, w View, accumulate bool) {
	n, in, out := dx.Rows(), dx.Cols(), w.Rows()
	DY, W, DX := get(dy), get(w), make([]float64, dx.Size())
	if accumulate {
		DX = get(dx)
	}
	for t := range n {
		for o := range out {
			for i := range in {
				DX[t*in+i] += DY[t*out+o] * W[o*in+i]
			}
		}
	}
	put(dx, DX)
}

func (refOps) LinearDW(dw, dy, x View, accumulate bool) {
	n, in, out := x.Rows(), x.Cols(), dw.Rows()
	DY, X, DW := get(dy), get(x), make([]float64, dw.Size())
	if accumulate {
		DW = get(dw)
	}
	for t := range n {
		for o := range out {
			for i := range in {
				DW[o*in+i] += DY[t*out+o] * X[t*in+i]
			}
		}
	}
	put(dw, DW)
}

func (refOps) RMSNorm(y, inv, x, w View, eps float64) {
	d := x.Len(tensor.Dim)
	X, W, Y, I := get(x), get(w), make([]float64, y.Size()), make([]float64, inv.Size())
	for r := range I {
		ss := 0.0
		for _, v := range X[r*d : r*d+d] {
			ss += v * v
		}
		I[r] = 1 / math.Sqrt(ss/float64(d)+eps)
		for i := range d {
			Y[r*d+i] = X[r*d+i] * I[r] * W[i]
		}
	}
	put(y, Y)
	put(inv, I)
}

func (o refOps) AddRMSNorm(y, inv, sum, a, b, w View, eps float64) {
	A, B := get(a), get(b)
	for i := range A {
		A[i] += B[i]
	}
	put(sum, A)
	o.RMSNorm(y, inv, sum, w, eps)
}

// RMSNormBackward computes, with z = x * inv, dx = inv * (dy*w - z * mean(dy*w*z)) and dw = sum(dy * z).
func (refOps) RMSNormBackward(dx, dw, dy, x, inv, w View, accumulate bool) {
	d := x.Len(tensor.Dim)
	X, W, I, DY, DW := get(x), get(w), get(inv), get(dy), get(dw)
	DX := make([]float64, dx.Size())
	if accumulate {
		DX = get(dx)
	}
	for r := range I {
		mean := 0.0
		for i := range d {
			mean += DY[r*d+i] * W[i] * X[r*d+i] * I[r] / float64(d)
		}
		for i := range d {
			z := X[r*d+i] * I[r]
			DX[r*d+i] += I[r] * (DY[r*d+i]*W[i] - z*mean)
			DW[i] += DY[r*d+i] * z
		}
	}
	put(dx, DX)
	put(dw, DW)
}

func (o refOps) NormRope(y, inv, x, w, cos, sin View, eps float64) {
	if !w.IsZero() {
		o.RMSNorm(y, inv, x, w, eps)
		x = y
	}
	rotated(y, x, cos, sin, false)
}

func (o refOps) NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin View) {
	if w.IsZero() {
		rotated(dx, dy, cos, sin, true)
		return
	}
	g := tensor.New(tensor.F64, shape(dy)...)
	rotated(g, dy, cos, sin, true)
	o.RMSNormBackward(dx, dw, g, x, inv, w, false)
}

// rotated sets y to the rotation of x, or to its transpose.
func rotated(y, x, cos, sin View, inverse bool) {
	n, heads, dim, pairs := x.Rows(), x.Len(tensor.Heads), x.Len(tensor.Dim), 0
	X := get(x)
	var C, S []float64
	if !cos.IsZero() {
		C, S, pairs = get(cos), get(sin), cos.Cols()
	}
	for t := range n {
		for h := range heads {
			for i := range pairs {
				c, s := C[t*pairs+i], S[t*pairs+i]
				if inverse {
					s = -s
				}
				lo := (t*heads+h)*dim + i
				a, b := X[lo], X[lo+pairs]
				X[lo], X[lo+pairs] = a*c-b*s, b*c+a*s
			}
		}
	}
	put(y, X)
}

func (refOps) SumRows(sum, x View) {
	S, X := get(sum), get(x)
	for i, v := range X {
		S[i%len(S)] += v
	}
	put(sum, S)
}

// activated returns act(x) and its derivative.
func activated(x float64, act kernels.Activation) (y, dy float64) {
	if act == kernels.GELU {
		k := math.Sqrt(2 / math.Pi)
		th := math.Tanh(k * (x + 0.044715*x*x*x))
		return 0.5 * x * (1 + th), 0.5*(1+th) + 0.5*x*(1-th*th)*k*(1+3*0.044715*x*x)
	}
	sig := 1 / (1 + math.Exp(-x))
	return x * sig, sig * (1 + x*(1-sig))
}

// glu returns act(g) * u and its derivatives.
func glu(g, u float64, act kernels.Activation) (y, dg, du float64) {
	if act != kernels.ClampedSiLU {
		a, da := activated(g, act)
		return a * u, da * u, a
	}
	const slope, limit = 1.702, 7
	near, clip := min(g, limit), min(max(u, -limit), limit)
	sig := 1 / (1 + math.Exp(-slope*near))
	y = (clip + 1) * near * sig
	if g <= limit {
		dg = (clip + 1) * sig * (1 + slope*near*(1-sig))
	}
	if math.Abs(u) <= limit {
		du = near * sig
	}
	return y, dg, du
}

func (refOps) GLU(y, gate, up View, act kernels.Activation) {
	G, U := get(gate), get(up)
	for i, g := range G {
		U[i], _, _ = glu(g, U[i], act)
	}
	put(y, U)
}

func (refOps) GLUBackward(dgate, dup, dy, gate, up View, act kernels.Activation) {
	G, U, DY := get(gate), get(up), get(dy)
	for i, g := range G {
		_, dg, du := glu(g, U[i], act)
		G[i], U[i] = DY[i]*dg, DY[i]*du
	}
	put(dgate, G)
	put(dup, U)
}

func (refOps) Gate(y, x, gate View) {
	X, G := get(x), get(gate)
	for i := range X {
		X[i] *= 1 / (1 + math.Exp(-G[i*len(G)/len(X)]))
	}
	put(y, X)
}

func (refOps) GateBackward(dx, dgate, dy, x, gate View) {
	X, G, DY := get(x), get(gate), get(dy)
	DG := make([]float64, len(G))
	for i := range X {
		at := i * len(G) / len(X)
		s := 1 / (1 + math.Exp(-G[at]))
		DG[at] += DY[i] * X[i] * s * (1 - s)
		DY[i] *= s
	}
	put(dx, DY)
	put(dgate, DG)
}

func (refOps) Affine(y, x View, scale, shift float64) {
	X := get(x)
	for i := range X {
		X[i] = X[i]*scale + shift
	}
	put(y, X)
}

func (refOps) Scale(y, x, by View) {
	X, s := get(x), get(by)[0]
	for i := range X {
		X[i] *= s
	}
	put(y, X)
}

func (refOps) SoftCap(x View, limit float64) {
	X := get(x)
	for i := range X {
		X[i] = limit * math.Tanh(X[i]/limit)
	}
	put(x, X)
}

func (refOps) Embed(y, table, ids View) {
	d := y.Cols()
	Y, T := make([]float64, y.Size()), get(table)
	for t, id := range ints(ids) {
		copy(Y[t*d:t*d+d], T[int(id)*d:])
	}
	put(y, Y)
}

func (refOps) EmbedBackward(dtable, dy, ids View) {
	d := dy.Cols()
	DT, DY := get(dtable), get(dy)
	for t, id := range ints(ids) {
		for i := range d {
			DT[int(id)*d+i] += DY[t*d+i]
		}
	}
	put(dtable, DT)
}

func (refOps) CrossEntropy(loss, logits, targets View, scale, softcap float64, grad bool) {
	V := logits.Cols()
	L, capped, total := get(logits), get(logits), get(loss)
	for t, target := range ints(targets) {
		row := L[t*V : t*V+V]
		top, sum := math.Inf(-1), 0.0
		for _, x := range row {
			top = max(top, x)
		}
		for _, x := range row {
			sum += math.Exp(x - top)
		}
		lse := top + math.Log(sum)
		if target >= 0 {
			total[0] += lse - row[target]
		}
		for i, x := range row {
			row[i] = 0
			if target >= 0 {
				row[i] = scale * math.Exp(x-lse)
			}
		}
		if target >= 0 {
			row[target] -= scale
		}
		for i := range row {
			if softcap > 0 {
				row[i] *= 1 - math.Pow(capped[t*V+i]/softcap, 2)
			}
		}
	}
	put(loss, total)
	if grad {
		put(logits, L)
	}
}

func (refOps) Add(dst, src View) {
	D := get(dst)
	for i, x := range get(src) {
		D[i] += x
	}
	put(dst, D)
}

func (refOps) Zero(vs ...View) {
	for _, v := range vs {
		put(v, make([]float64, v.Size()))
	}
}

func (refOps) Copy(dst, src View) {
	from, to := tensor.New(src.DType(), shape(src)...), tensor.New(dst.DType(), shape(dst)...)
	tensor.Copy(from, src)
	put(to, get(from))
	tensor.Copy(dst, to)
}

func (refOps) Dropout(y, x, tokens View, d kernels.Dropout) {
	xs := get(x)
	for i := range xs {
		if xs[i] *= d.Kept(); d.Random(ints(tokens)[i/x.Cols()], i%x.Cols()) < d.Threshold() {
			xs[i] = 0
		}
	}
	put(y, xs)
}

func (refOps) FoldSink(o, lse, sink View) error {
	O, L, S, d := get(o), get(lse), get(sink), o.Len(tensor.Dim)
	for r := range L {
		s := S[r%len(S)]
		top := max(L[r], s)
		all := top + math.Log(math.Exp(L[r]-top)+math.Exp(s-top))
		for i := range d {
			O[r*d+i] *= math.Exp(L[r] - all)
		}
		L[r] = all
	}
	put(o, O)
	put(lse, L)
	return nil
}

func (refOps) SinkGrad(dsink, do, o, lse, sink View) error {
	DO, O, L, S, D, d := get(do), get(o), get(lse), get(sink), make([]float64, sink.Size()), o.Len(tensor.Dim)
	for r := range L {
		for i := range d {
			D[r%len(S)] -= math.Exp(S[r%len(S)]-L[r]) * DO[r*d+i] * O[r*d+i]
		}
	}
	put(dsink, D)
	return nil
}

// refAttention computes causal attention of whole sequences on one device, inside documents: row t sees rows j <= t of
// its own document within window(layer).
type refAttention struct {
	docs  []int // document of each position; nil: one
	cfg   *hf.Config
	calls *[2]int // forward and backward calls, if counted
	alone
}

var _ Attention = refAttention{}

// score returns a scaled and capped score.
func (r refAttention) score(s float64) float64 {
	s *= r.cfg.SoftmaxScale()
	if limit := r.cfg.AttnLogitSoftcapping; limit > 0 {
		s = limit * math.Tanh(s/limit)
	}
	return s
}

// probs returns the probabilities of query row t of head h over the keys, and the LSE.
func (r refAttention) probs(layer, b, t, h int, q, k View, Q, K []float64) (p []float64, lse float64) {
	S, H, KH, D := q.Len(tensor.Seq), q.Len(tensor.Heads), k.Len(tensor.Heads), q.Len(tensor.Dim)
	w := r.cfg.Layer(layer).Mixer.Window
	p, lse = make([]float64, S), math.Inf(-1)
	for j := range p {
		p[j] = math.Inf(-1)
		if j > t || w >= 0 && j < t-w || r.docs != nil && r.docs[j] != r.docs[t] {
			continue
		}
		s := 0.0
		for i := range D {
			s += Q[((b*S+t)*H+h)*D+i] * K[((b*S+j)*KH+h/(H/KH))*D+i]
		}
		p[j] = r.score(s)
		hi := max(lse, p[j])
		lse = hi + math.Log(math.Exp(lse-hi)+math.Exp(p[j]-hi))
	}
	for j := range p {
		p[j] = math.Exp(p[j] - lse)
	}
	return p, lse
}

func (r refAttention) Forward(layer int, acc attention.Partial, q, k, v View) error {
	if r.calls != nil {
		r.calls[0]++
	}
	B, S, H, KH, D := q.Len(0), q.Len(1), q.Len(2), k.Len(2), q.Len(3)
	Q, K, V, O, L := get(q), get(k), get(v), make([]float64, q.Size()), make([]float64, B*S*H)
	for row := range B * S * H {
		b, t, h := row/(S*H), row/H%S, row%H
		p, lse := r.probs(layer, b, t, h, q, k, Q, K)
		L[row] = lse
		for j, pj := range p {
			for i := range D {
				O[row*D+i] += pj * V[((b*S+j)*KH+h/(H/KH))*D+i]
			}
		}
	}
	put(acc.O, O)
	put(acc.LSE, L)
	return nil
}

func (r refAttention) Backward(layer int, g attention.Grads, do, q, k, v View, acc attention.Partial) error {
	if r.calls != nil {
		r.calls[1]++
	}
	B, S, H, KH, D := q.Len(0), q.Len(1), q.Len(2), k.Len(2), q.Len(3)
	Q, K, V, O, DO, LSE := get(q), get(k), get(v), get(acc.O), get(do), get(acc.LSE)
	DQ, DK, DV := make([]float64, q.Size()), make([]float64, k.Size()), make([]float64, v.Size())
	for row := range B * S * H {
		b, t, h := row/(S*H), row/H%S, row%H
		p, lse := r.probs(layer, b, t, h, q, k, Q, K)
		delta := 0.0
		for i := range D {
			delta += DO[row*D+i] * O[row*D+i]
		}
		for j, pj := range p {
			pj *= math.Exp(lse - LSE[row]) // sinks take a part
			kv := ((b*S+j)*KH + h/(H/KH)) * D
			dp := 0.0
			for i := range D {
				dp += DO[row*D+i] * V[kv+i]
				DV[kv+i] += pj * DO[row*D+i]
			}
			ds := pj * (dp - delta) * r.cfg.SoftmaxScale()
			if limit := r.cfg.AttnLogitSoftcapping; limit > 0 && pj > 0 {
				ds *= 1 - math.Pow((math.Log(pj)+LSE[row])/limit, 2) // the capped score is log(p) + LSE
			}
			for i := range D {
				DQ[row*D+i] += ds * K[kv+i]
				DK[kv+i] += ds * Q[row*D+i]
			}
		}
	}
	put(g.DQ, DQ)
	put(g.DK, DK)
	put(g.DV, DV)
	return nil
}
