package model

import (
	"math"

	"github.com/cprun/cprun/internal/model/hf"
)

// apart is an MLP for all tokens beside experts with inputs of their own, for a residual h of E columns:
//
//	norm(shared(x)) + norm(experts(norm(h))),  with the router's input norm(h) / sqrt(E)
//
// The branch has a norm of the result, so forward has y and no add.
type apart struct {
	*layer
	shared  *gated
	experts *experts
}

type apartViews struct {
	route, routeInv View // [B, S, 1, E], [B, S, 1, 1]: the router's input; later its gradient
	n3, inv3        View // likewise the experts'
	alone, aloneInv View // likewise the result of shared
	mixed, mixedInv View // likewise the result of experts
	dh              View // the gradient of h, to which backward adds
}

func (l *apart) views(list []saved, m *Model, s *activations) []saved {
	list = l.experts.views(l.shared.views(list, m, s), m, s)
	for _, v := range [][2]*View{{&s.route, &s.routeInv}, {&s.n3, &s.inv3}, {&s.alone, &s.aloneInv},
		{&s.mixed, &s.mixedInv}} {
		list = append(list, saved{v[0], m.dtype, 1, m.cfg.HiddenSize, ofTile, 0}, saved{v[1], m.accum, 1, 1, ofTile, 0})
	}
	return list
}

func (l *apart) forward(p *pass, t *activations, y, x, _ View) {
	defer p.a.Release(p.a.Mark())
	l.shared.forward(p, t, t.alone, x, View{})
	l.norm(p, hf.SharedResult, y, t.aloneInv, t.alone)
	l.norm(p, hf.RouterNorm, t.route, t.routeInv, t.h)
	l.shrink(p, t.route)
	l.norm(p, hf.ExpertNorm, t.n3, t.inv3, t.h)
	l.experts.forward(p, t, t.mixed, t.n3, View{})
	z := p.a.Alloc(p.dtype, shape(y)...)
	l.norm(p, hf.ExpertResult, z, t.mixedInv, t.mixed)
	p.ops.Add(y, z)
}

func (l *apart) backward(p *pass, dx, dy, x View, t *activations, accumulate bool) {
	l.normBackward(p, hf.SharedResult, t.alone, dy, t.alone, t.aloneInv, false)
	l.normBackward(p, hf.ExpertResult, t.mixed, dy, t.mixed, t.mixedInv, false)
	l.shared.backward(p, dx, t.alone, x, t, accumulate)
	l.experts.backward(p, t.n3, t.mixed, t.n3, t, false)
	l.shrink(p, t.route)
	l.normBackward(p, hf.RouterNorm, t.dh, t.route, t.h, t.routeInv, true)
	l.normBackward(p, hf.ExpertNorm, t.dh, t.n3, t.h, t.inv3, true)
}

func (l *apart) norm(p *pass, r hf.Role, y, inv, x View) {
	p.ops.RMSNorm(y, inv, x, l.at(r).w, p.cfg.RMSNormEps)
}

func (l *apart) normBackward(p *pass, r hf.Role, dx, dy, x, inv View, accumulate bool) {
	p.ops.RMSNormBackward(dx, l.at(r).g, dy, x, inv, l.at(r).w, accumulate)
}

// shrink divides the router's input, or its gradient, by the root of its columns.
func (l *apart) shrink(p *pass, v View) { p.ops.Affine(v, v, 1/math.Sqrt(float64(v.Cols())), 0) }
