package model

import (
	"math"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Recurrence is the recurrent state of layers over all ranks that share the sequence. An Attention implements it if a
// layer of the model is recurrent.
type Recurrence interface {
	// Segments lists the segments of this rank's rows, the same for each sample.
	Segments() []partition.Range
	// States counts the segments that are entered with a state.
	States() int
	// Halo sets before, [segments*B, rows, 1, n], to the rows of x before each segment, and HaloBackward adds the
	// gradients of these rows to dx. See scan.Scan.
	Halo(layer int, before, x View) error
	HaloBackward(layer int, dx, dbefore View) error
	// Recur sets a.State, [States*B, heads, dim, dimV], and a.O. beside queues work that does not touch a: it runs while
	// states travel.
	Recur(layer int, a delta.Args, beside func()) error
	// RecurBackward sets the gradients of the inputs, given a.State and a.DO.
	RecurBackward(layer int, a delta.Args, beside func()) error
}

// Still is a Recurrence without work, for rehearsals.
type Still struct{ segments, states int }

// Segments lists the segments.
func (s Still) Segments() []partition.Range { return make([]partition.Range, s.segments) }

// States counts the entered segments.
func (s Still) States() int { return s.states }

// Halo and the other calls do nothing, except for the work beside an exchange.
func (Still) Halo(int, View, View) error { return nil }

// HaloBackward does nothing.
func (Still) HaloBackward(int, View, View) error { return nil }

// Recur does the work beside.
func (Still) Recur(_ int, _ delta.Args, beside func()) error {
	beside()
	return nil
}

// RecurBackward does the work beside.
func (Still) RecurBackward(_ int, _ delta.Args, beside func()) error {
	beside()
	return nil
}

// recur is a gated delta net over all ranks that share the sequence (arXiv:2412.06464):
//
//	h = Wo (norm(o) silu(z)),  o = delta(q, k, v, g, beta),  z = Wz n1,  n1 = norm(x)
//	q, k, v = silu(conv(Win n1)), q and k divided by the length of each head;  g, beta = gates(Wa n1, Wb n1)
type recur struct{ *layer }

// Of attendViews, a recurrent layer has q and k, [B, S, Kd, D], and v and gated, norm(o) silu(z), [B, S, Hd, Dv]. qRaw
// and kRaw are the results of the convolution.
type recurViews struct {
	qkv, before   View // [B, S, 1, N] and [segments*B, width-1, 1, N]: Win n1, and its rows before the segments
	z             View // [B, S, Hd, Dv]; in the backward pass its gradient
	a, b, g, beta View // [B, S, Hd, 1]: the inputs and results of the gates
	state         View // [states*B, Hd, D, Dv], before segments

	normed, oInv View // [B, S, Hd, Dv] and [B, S, Hd, 1]: norm(o) and its scale
}

// channels returns the columns of q, of k and of v beside each other.
func channels(d hf.Delta) (q, k, v int) {
	return d.KeyHeads * d.Dim, d.KeyHeads * d.Dim, d.Heads * d.DimV
}

func (l *recur) views(list []saved, m *Model, s *activations) []saved {
	t, f, d := m.dtype, m.accum, l.Mixer.Delta
	q, k, v := channels(d)
	input := l.copies(hf.InputNorm)
	return append(list, []saved{
		{at: &s.out.O, dtype: t, heads: d.Heads, dim: d.DimV, group: ofOutput},
		{at: &s.q, dtype: t, heads: d.KeyHeads, dim: d.Dim, group: ofMixer},
		{at: &s.k, dtype: t, heads: d.KeyHeads, dim: d.Dim, group: ofMixer},
		{at: &s.v, dtype: t, heads: d.Heads, dim: d.DimV, group: ofMixer},
		{at: &s.qRaw, dtype: t, heads: d.KeyHeads, dim: d.Dim, group: ofMixer},
		{at: &s.kRaw, dtype: t, heads: d.KeyHeads, dim: d.Dim, group: ofMixer},
		{at: &s.qInv, dtype: f, heads: d.KeyHeads, dim: 1, group: ofMixer},
		{at: &s.kInv, dtype: f, heads: d.KeyHeads, dim: 1, group: ofMixer},
		{at: &s.qkv, dtype: t, heads: 1, dim: q + k + v, group: ofMixer},
		{at: &s.z, dtype: t, heads: d.Heads, dim: d.DimV, group: ofOutput}, // the output needs it
		{at: &s.a, dtype: t, heads: d.Heads, dim: 1, group: ofMixer},
		{at: &s.b, dtype: t, heads: d.Heads, dim: 1, group: ofMixer},
		{at: &s.g, dtype: f, heads: d.Heads, dim: 1, group: ofMixer},
		{at: &s.beta, dtype: f, heads: d.Heads, dim: 1, group: ofMixer},
		{at: &s.inv1, dtype: f, heads: input, dim: 1, group: ofMixerTile},
		{at: &s.n1, dtype: t, heads: input, dim: m.cfg.HiddenSize, group: ofMixerTile},
		{at: &s.normed, dtype: t, heads: d.Heads, dim: d.DimV, group: ofTile},
		{at: &s.oInv, dtype: f, heads: d.Heads, dim: 1, group: ofTile},
		{at: &s.gated, dtype: t, heads: d.Heads, dim: d.DimV, group: ofTile},
		{at: &s.before, dtype: t, heads: 1, dim: q + k + v, group: ofMixer, each: d.Conv - 1},
		{at: &s.state, dtype: f, heads: d.Dim, dim: d.DimV, group: ofOutput, each: d.Heads},
	}...)
}

func (l *recur) forward(p *pass, s *activations, known bool) error {
	p.alloc(l.layer, s, ofOutput, ofMixer)
	l.project(p, s, s.early())
	if err := p.rec.Halo(l.index, s.before, s.qkv); err != nil {
		return err
	}
	for _, c := range l.columns(s.qRaw, s.kRaw, s.v) {
		p.ops.Conv(c.y, c.of(s.qkv), c.of(s.before), l.filter(l.at(hf.DeltaConv).w, c), p.rec.Segments())
	}
	mark := p.a.Mark()
	unit, eps := l.unit(p)
	p.ops.RMSNorm(s.q, s.qInv, s.qRaw, unit, eps)
	p.ops.RMSNorm(s.k, s.kInv, s.kRaw, unit, eps)
	p.a.Release(mark)
	p.ops.Gates(s.g, s.beta, s.a, s.b, l.at(hf.DeltaLog).w, l.at(hf.DeltaTime).w)
	if known {
		return nil
	}
	return p.rec.Recur(l.index, l.args(p, s), func() { l.project(p, s, s.late()) })
}

// A projection is the result of a role's product with n1, or its gradient.
type projection struct {
	role hf.Role
	y    View
}

func (s *activations) early() []projection {
	return []projection{{hf.DeltaQKV, s.qkv}, {hf.DeltaA, s.a}, {hf.DeltaB, s.b}}
}

func (s *activations) late() []projection { return []projection{{hf.DeltaZ, s.z}} }

// project sets projections of n1.
func (l *recur) project(p *pass, s *activations, list []projection) {
	l.inputs(p, s, func(t *activations, n1 View, lo, hi int) {
		var ws []*weight
		for _, x := range list {
			ws = append(ws, l.at(x.role))
		}
		in := p.operand(n1, ws...)
		for _, x := range list {
			p.project(l.layer, x.role, part(x.y, lo, hi), in, View{})
		}
	})
}

// inputs calls f for each tile with n1.
func (l *recur) inputs(p *pass, s *activations, f func(t *activations, n1 View, lo, hi int)) {
	defer p.a.Release(p.a.Mark())
	rows := *s
	p.allocTile(l.layer, &rows, ofMixerTile, ofMixerTile)
	for lo, hi := range p.tiles(s.x) {
		t, mark := p.tile(l.layer, &rows, lo, hi), p.a.Mark()
		f(&t, l.input(p, &t, false), lo, hi)
		p.a.Release(mark)
	}
}

// columns are columns [lo, hi) of wider views.
type columns struct {
	y      View
	lo, hi int
}

// columns returns q, k and v with their columns beside each other.
func (l *recur) columns(q, k, v View) []columns {
	list, at := make([]columns, 0, 3), 0
	for _, y := range []View{q, k, v} {
		n := y.Cols()
		list = append(list, columns{y.Reshape([4]int{y.Len(tensor.Batch), y.Len(tensor.Seq), 1, n}), at, at + n})
		at += n
	}
	return list
}

func (c columns) of(v View) View { return v.Slice(tensor.Dim, c.lo, c.hi) }

// filter returns the part of a convolution's vector for some channels, [1, n, 1, width]; the zero View of one.
func (l *recur) filter(v View, c columns) View {
	if v.IsZero() {
		return v
	}
	width := l.Mixer.Delta.Conv
	return v.Reshape([4]int{1, v.Size() / width, 1, width}).Slice(tensor.Seq, c.lo, c.hi)
}

// unit returns the weight and the epsilon that make a norm divide a head by its length: x / sqrt(sum(x^2) + 1e-6).
func (l *recur) unit(p *pass) (w View, eps float64) {
	dim := l.Mixer.Delta.Dim
	w = p.a.Alloc(p.accum, 1, 1, 1, dim)
	p.ops.Zero(w)
	p.ops.Affine(w, w, 0, 1/math.Sqrt(float64(dim)))
	return w, 1e-6 / float64(dim)
}

func (l *recur) args(p *pass, s *activations) delta.Args {
	d := l.Mixer.Delta
	return delta.Args{Q: s.q, K: s.k, V: s.v, G: s.g, Beta: s.beta, O: s.out.O, Scale: 1 / math.Sqrt(float64(d.Dim)),
		State:    s.state.Reshape([4]int{s.state.Len(tensor.Batch), d.Heads, d.Dim, d.DimV}),
		Segments: p.rec.Segments()}
}

// byHeads returns rows as [1, rows, heads, dim].
func byHeads(v View, dim int) View { return v.Reshape([4]int{1, v.Rows(), v.Cols() / dim, dim}) }

func (l *recur) output(p *pass, t *activations) {
	dim := l.Mixer.Delta.DimV
	p.ops.RMSNorm(byHeads(t.normed, dim), byHeads(t.oInv, 1), byHeads(t.out.O, dim), l.at(hf.DeltaNorm).w,
		p.cfg.RMSNormEps)
	p.ops.GLU(t.gated, t.z, t.normed, kernels.SiLU)
	defer p.a.Release(p.a.Mark())
	p.project(l.layer, hf.DeltaOutput, t.h, p.operand(t.gated, l.at(hf.DeltaOutput)), View{})
}

// outputBackward also replaces z by its gradient.
func (l *recur) outputBackward(p *pass, do, d View, t *activations) {
	defer p.a.Release(p.a.Mark())
	dim, norm, w := l.Mixer.Delta.DimV, l.at(hf.DeltaNorm), l.at(hf.DeltaOutput)
	dy := p.gradient(d, w, true)
	p.projectDW(l.layer, hf.DeltaOutput, dy, p.inputDW(t.gated, w))
	dgated := t.gated // no longer needed
	p.linearDX(dgated, dy, w, false)
	p.ops.GLUBackward(t.z, t.normed, dgated, t.z, t.normed, kernels.SiLU)
	p.ops.RMSNormBackward(byHeads(do, dim), norm.g, byHeads(t.normed, dim), byHeads(t.out.O, dim), byHeads(t.oInv, 1),
		norm.w, false)
}

func (l *recur) backward(p *pass, d, do View, s *activations) error {
	defer p.a.Release(p.a.Mark())
	like := func(v View) View { return p.a.Alloc(v.DType(), shape(v)...) }
	g := l.args(p, s)
	g.DO, g.DQ, g.DK, g.DV, g.DG, g.DBeta = do, like(s.q), like(s.k), like(s.v), like(s.g), like(s.beta)
	err := p.rec.RecurBackward(l.index, g, func() {
		l.inputs(p, s, func(_ *activations, n1 View, lo, hi int) {
			w := l.at(hf.DeltaZ)
			p.projectDW(l.layer, hf.DeltaZ, p.inputDW(part(s.z, lo, hi), w), p.inputDW(n1, w))
		})
	})
	if err != nil {
		return err
	}
	unit, _ := l.unit(p)
	none := like(unit)
	p.ops.RMSNormBackward(s.qRaw, none, g.DQ, s.qRaw, s.qInv, unit, false)
	p.ops.RMSNormBackward(s.kRaw, none, g.DK, s.kRaw, s.kInv, unit, false)
	decay, time, conv := l.at(hf.DeltaLog), l.at(hf.DeltaTime), l.at(hf.DeltaConv)
	grads := activations{}
	grads.qkv, grads.before, grads.a, grads.b = like(s.qkv), like(s.before), like(s.a), like(s.b)
	p.ops.GatesBackward(grads.a, grads.b, decay.g, time.g, g.DG, g.DBeta, s.g, s.beta, s.a, decay.w, time.w)
	for _, c := range l.columns(s.qRaw, s.kRaw, g.DV) {
		p.ops.ConvBackward(c.of(grads.qkv), c.of(grads.before), l.filter(conv.g, c), c.y, c.of(s.qkv), c.of(s.before),
			l.filter(conv.w, c), p.rec.Segments())
	}
	if err := p.rec.HaloBackward(l.index, grads.qkv, grads.before); err != nil {
		return err
	}
	grads.z = s.z
	l.inputs(p, s, func(t *activations, n1 View, lo, hi int) {
		in := p.inputDW(n1, l.at(hf.DeltaQKV))
		for _, x := range grads.early() {
			p.projectDW(l.layer, x.role, p.inputDW(part(x.y, lo, hi), l.at(x.role)), in)
		}
		l.inputBackward(p, part(d, lo, hi), t, n1, append(grads.early(), grads.late()...), lo, hi)
	})
	return nil
}

// inputBackward adds the gradient of x to d, if a parameter below is trained. It overwrites n1.
func (l *recur) inputBackward(p *pass, d View, t *activations, n1 View, list []projection, lo, hi int) {
	norm := l.at(hf.InputNorm)
	if l.index <= p.lowest && norm.frozen {
		return
	}
	for i, x := range list {
		w := l.at(x.role)
		p.linearDX(n1, p.quantize(part(x.y, lo, hi), w.scaled(), false, w.codes.Factors), w, i > 0)
	}
	p.ops.RMSNormBackward(d, norm.g, n1, t.x, t.inv1, norm.w, true)
}
