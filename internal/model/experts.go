package model

import (
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// experts is a mixture of experts, plus an MLP for all tokens if the layer has one:
//
//	shared(x) + sum over the choices of weight * (Wdown_e y),  y = act(gate) * up,  [gate, up] = Win_e x
//
// Its products run over the pairs of tokens and choices, sorted by expert. The gradient of a weight is <y, dout
// Wdown_e>, so the product of Wdown is not kept (arXiv:2512.14080).
type experts struct {
	*layer
	shared *gated // nil: none
}

type expertViews struct {
	choice, weight View // [B, S, k, 1]: the chosen experts, int32, and their weights
	logits         View // [B, S, 1, E]
	in, act        View // [B, S, k, 2I] and [B, S, k, I], for the pairs of a tile in their places

	routed bool // choice and weight are known
}

func (l *experts) views(list []saved, m *Model, s *activations) []saved {
	e := l.MLP.Experts
	list = append(list, []saved{
		{&s.choice, tensor.I32, e.Chosen, 1, ofRoute, 0},
		{&s.weight, m.accum, e.Chosen, 1, ofRoute, 0},
		{&s.logits, m.accum, 1, e.Count, ofTile, 0},
		{&s.in, m.dtype, e.Chosen, 2 * e.Width, ofTile, 0},
		{&s.act, m.dtype, e.Chosen, e.Width, ofTile, 0},
	}...)
	if l.shared != nil {
		list = l.shared.views(list, m, s)
	}
	return list
}

func (l *experts) forward(p *pass, t *activations, y, x, add View) {
	if l.shared != nil {
		l.shared.forward(p, t, y, x, add)
		add = y
	}
	defer p.a.Release(p.a.Mark())
	e, choice, weight := l.MLP.Experts, l.chosen(t.choice), l.chosen(t.weight)
	p.project(l.layer, hf.Router, t.logits, operand{View: t.routerInput(x)}, View{})
	if !t.routed {
		p.ops.Route(weight, choice, t.logits, l.at(hf.Correction).w, e.Router)
		if r := p.b.Routes; !r.Load.IsZero() {
			p.ops.Count(r.Load.Slice(tensor.Seq, l.index, l.index+1), r.Share, choice, t.logits, p.counted(x))
		}
	}
	pairs, in, act := p.sort(e, choice), places(t.in, e), places(t.act, e)
	up, byToken := l.at(hf.ExpertIn), kernels.Operand{View: x, ByToken: true}
	from, w := p.groupOperand(byToken, up)
	fused, _ := p.ops.(FusedExperts)
	if fused == nil || up.lora != nil || !l.at(hf.ExpertIn.Bias()).w.IsZero() ||
		!fused.GroupLinearGLU(act, in, from, w, pairs, p.act) {
		p.groupLinear(in, byToken, from, up, pairs)
		l.groupAdd(p, hf.ExpertIn, in, pairs)
		p.ops.GroupGLU(act, in, p.act)
	}
	if y.IsZero() {
		return
	}
	down, result := l.at(hf.ExpertDown), p.a.Alloc(p.dtype, 1, act.Rows(), 1, x.Cols())
	from, _ = p.groupOperand(kernels.Operand{View: act}, down)
	p.groupLinear(result, kernels.Operand{View: act}, from, down, pairs)
	l.groupAdd(p, hf.ExpertDown, result, pairs)
	p.ops.Combine(y, add, result, l.weights(p, t), pairs)
}

// routerInput returns the router's input beside x, that of the experts.
func (t *activations) routerInput(x View) View {
	if t.route.IsZero() {
		return x
	}
	return t.route
}

// weights returns the weights of a tile's choices, times the experts' factors if the layer has them.
func (l *experts) weights(p *pass, t *activations) View {
	weight, scale := l.chosen(t.weight), l.at(hf.ChoiceScale).w
	if scale.IsZero() {
		return weight
	}
	y := p.a.Alloc(p.accum, shape(weight)...)
	p.ops.ScaleChoices(y, View{}, weight, View{}, l.chosen(t.choice), scale)
	return y
}

// weightsBackward replaces dweight by the gradient of the weights without the factors, and adds to that of the factors.
func (l *experts) weightsBackward(p *pass, dweight View, t *activations, pairs kernels.Pairs) {
	scale := l.at(hf.ChoiceScale)
	if scale.w.IsZero() {
		return
	}
	defer p.a.Release(p.a.Mark())
	terms := p.a.Alloc(p.accum, shape(dweight)...)
	ones := p.fillOnes(p.a.Alloc(p.dtype, 1, dweight.Len(tensor.Seq), 1, 1))
	p.ops.ScaleChoices(dweight, terms, dweight, l.chosen(t.weight), l.chosen(t.choice), scale.w)
	p.groupSum(scale, kernels.Operand{View: ones, ByToken: true}, terms, pairs)
}

func (l *experts) backward(p *pass, dx, dy, x View, t *activations, accumulate bool) {
	defer p.a.Release(p.a.Mark())
	e, choice, weight := l.MLP.Experts, l.chosen(t.choice), l.weights(p, t)
	pairs, in, da := p.sort(e, choice), places(t.in, e), places(t.act, e)
	byToken, dout := kernels.Operand{View: x, ByToken: true}, kernels.Operand{View: dy, ByToken: true}
	down, up, router := l.at(hf.ExpertDown), l.at(hf.ExpertIn), l.at(hf.Router)

	dweight := p.a.Alloc(p.accum, shape(weight)...)
	din, scaled := in, da
	fused, _ := p.ops.(FusedExperts)
	mark := p.a.Mark()
	from, w := p.groupGradient(dout, down, pairs)
	if fused == nil || down.lora != nil ||
		!fused.GroupLinearDXGLUBackward(in, da, dweight, from, w, weight, pairs, p.act) {
		p.groupLinearDX(da, dout, from, down, pairs)
		p.ops.GroupGLUBackward(din, scaled, dweight, da, in, weight, pairs, p.act)
	}
	p.a.Release(mark)
	if bias := l.at(hf.ExpertDown.Bias()); !bias.w.IsZero() {
		p.ops.GroupDot(dweight, dout, bias.w, pairs)
		p.groupSum(bias, dout, weight, pairs)
		p.groupSum(l.at(hf.ExpertIn.Bias()), kernels.Operand{View: din}, View{}, pairs)
	}
	p.groupLinearDW(down, dout, kernels.Operand{View: scaled}, pairs)
	p.groupLinearDW(up, kernels.Operand{View: din}, byToken, pairs)
	l.weightsBackward(p, dweight, t, pairs)
	dlogits := p.a.Alloc(p.dtype, shape(t.logits)...)
	p.ops.RouteBackward(dlogits, dweight, choice, t.logits, p.dshare, p.counted(x), e.Router)
	drouted := operand{View: dlogits}
	p.projectDW(l.layer, hf.Router, drouted, operand{View: t.routerInput(x)})

	if l.shared != nil {
		l.shared.backward(p, dx, dy, x, t, accumulate)
		accumulate = true
	}
	sum := dx
	if t.route.IsZero() {
		p.linearDX(dx, drouted, router, accumulate)
	} else if p.linearDX(t.route, drouted, router, false); !accumulate {
		sum = View{}
	}
	dpairs := p.a.Alloc(p.dtype, 1, din.Rows(), 1, x.Cols())
	from, _ = p.groupGradient(kernels.Operand{View: din}, up, pairs)
	p.groupLinearDX(dpairs, kernels.Operand{View: din}, from, up, pairs)
	p.ops.Combine(dx, sum, dpairs, View{}, pairs)
}

// groupAdd adds an expert's bias, if it has one.
func (l *experts) groupAdd(p *pass, r hf.Role, y View, pairs kernels.Pairs) {
	if bias := l.at(r.Bias()).w; !bias.IsZero() {
		p.ops.GroupAdd(y, bias, pairs)
	}
}

// groupSum adds to the gradient of a bias, unless it is frozen.
func (p *pass) groupSum(bias *weight, dy kernels.Operand, weight View, pairs kernels.Pairs) {
	if !bias.frozen {
		p.ops.GroupSum(bias.g, dy, weight, pairs)
	}
}

// sort returns the pairs of a tile, in memory of the arena.
func (p *pass) sort(e hf.Experts, choice View) kernels.Pairs {
	pairs := kernels.Pairs{
		Tokens: p.a.Alloc(tensor.I32, 1, choice.Size(), 1, 1),
		Places: p.a.Alloc(tensor.I32, shape(choice)...),
		Starts: p.a.Alloc(tensor.I32, 1, e.Count+1, 1, 1),
	}
	p.ops.Sort(pairs, choice)
	return pairs
}

// chosen returns a view of the choices as [1, T, k, 1].
func (l *experts) chosen(v View) View { return v.Reshape([4]int{1, v.Rows(), l.MLP.Experts.Chosen, 1}) }

// places returns a view of pairs with a row for each place, [1, T*k, 1, n].
func places(v View, e hf.Experts) View {
	n := v.Rows() * e.Chosen
	return v.Reshape([4]int{1, n, 1, v.Size() / max(n, 1)})
}

// counted returns the numbers of the tile's tokens, or the zero View.
func (p *pass) counted(x View) View {
	if p.b.Tokens.IsZero() {
		return View{}
	}
	return rows(p.b.Tokens).Slice(tensor.Seq, p.row, p.row+x.Rows())
}

// balance sets dshare. The loss of balance is E times the sum over the experts of the product of two means over all
// tokens and layers: of their choices, which are constants, and of their share (arXiv:2101.03961, as in transformers).
func (p *pass) balance() error {
	r := p.b.Routes
	if r.Counted != nil {
		if err := r.Counted(); err != nil {
			return err
		}
	}
	if r.Total.IsZero() {
		return nil
	}
	mark := p.a.Mark()
	load := p.a.Alloc(p.accum, shape(r.Total)...)
	p.ops.Copy(load, r.Total)
	p.ops.Zero(p.dshare)
	p.ops.SumRows(p.dshare, load)
	p.ops.Affine(p.dshare, p.dshare, r.Factor, 0)
	p.a.Release(mark)
	return nil
}
