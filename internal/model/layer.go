package model

import (
	"iter"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// tileRows is the number of tokens whose row-wise activations exist at once, unless the layer keeps them. Longer matrix
// products are no faster.
const tileRows = 16384

// A layer is two branches, a mixer across tokens and an mlp for each token alone:
//
//	h = x + mixer(x),  out = h + mlp(h)
//
// Branches receive the residual instead of returning a summand, so that a sum and the norm after it, or a product and
// the sum after it, are one operation.
type layer struct {
	hf.Layer
	index int
	parts map[hf.Role]*weight
	mixer mixer
	mlp   mlpBranch
}

// A mixer first computes s.out for all tokens, which recomputation may keep, and then its summand tile by tile.
type mixer interface {
	// views appends the branch's views.
	views(list []saved, m *Model, s *activations) []saved
	// forward sets s.out. With known, s.out is kept, and forward sets the views for its gradient only.
	forward(p *pass, s *activations, known bool) error
	// output sets t.h to the summand.
	output(p *pass, t *activations)
	// outputBackward sets do, the gradient of t.out, given d, the gradient of h.
	outputBackward(p *pass, do, d View, t *activations)
	// backward adds the gradient of x to d, given do.
	backward(p *pass, d, do View, s *activations) error
}

func newLayer(cfg *hf.Config, i int) *layer {
	l := &layer{Layer: cfg.Layer(i), index: i, parts: map[hf.Role]*weight{}}
	l.mixer = &attend{l}
	if l.Mixer.Recurs() {
		l.mixer = &recur{l}
	}
	l.mlp = mlpBranch{l, newMLP(l)}
	return l
}

// at returns a part, without memory if the layer lacks it.
func (l *layer) at(r hf.Role) *weight {
	if w := l.parts[r]; w != nil {
		return w
	}
	return &weight{}
}

// copies returns 1 if the layer has an optional part, else 0. It multiplies the heads of views.
func (l *layer) copies(r hf.Role) int {
	if l.parts[r] == nil {
		return 0
	}
	return 1
}

// activations are the tensors of one layer for its backward pass. Retain selects those kept from the forward pass.
// Others are zero until they are computed again.
type activations struct {
	mark  tensor.Mark // start of this layer in the arena
	host  bool        // the hooks Keep and Bring move it
	moved []View      // its views for these
	all   bool        // SaveAll

	x   View              // [B, S, 1, E], the layer's input
	out attention.Partial // the mixer's result before its product: [B, S, H, D], and [B, S, H, 1]
	h   View              // [B, S, 1, E]: the mixer's summand, then the MLP's input
	attendViews
	recurViews
	mlpViews
}

// A group of views exists at the same time.
type group int

// Each layer with a backward pass keeps the first group: a route that is computed again, after other kernels, could be
// another one. SaveInput keeps one more, SaveOutput two, SaveAll all but the last.
const (
	ofRoute group = iota // the choices of experts
	ofInput
	ofOutput    // of the mixer, before its product
	ofMixer     // of the mixer, for its gradient
	ofMixerTile // of the mixer's input, row by row: all tokens or one tile
	ofTile      // of the rest, row by row
	ofAgain     // of a tile that is computed again
)

// A saved view is [B, S, heads, dim], or with each [segments*B, each, heads, dim]. With 0 heads the layer lacks it.
type saved struct {
	at         *View
	dtype      tensor.DType
	heads, dim int
	group      group
	each       int
}

func (m *Model) views(l *layer, s *activations) []saved {
	list := append(make([]saved, 0, 48), saved{&s.x, m.dtype, 1, m.cfg.HiddenSize, ofInput, 0},
		saved{&s.h, m.dtype, 1, m.cfg.HiddenSize, ofTile, 0})
	return l.mlp.views(l.mixer.views(list, m, s), m, s)
}

// alloc allocates the missing views of the groups lo to hi.
func (m *Model) alloc(a *tensor.Arena, l *layer, s *activations, lo, hi group, batch, seq int) {
	for _, v := range m.views(l, s) {
		switch {
		case v.group < lo || v.group > hi || v.heads == 0 || !v.at.IsZero():
		case v.each > 0:
			n := len(m.rec.Segments())
			if v.at == &s.state {
				n = m.rec.States()
			}
			*v.at = a.Alloc(v.dtype, batch*n, v.each, v.heads, v.dim)
		default:
			*v.at = a.Alloc(v.dtype, batch, seq, v.heads, v.dim)
		}
	}
}

func (p *pass) alloc(l *layer, s *activations, lo, hi group) {
	p.Model.alloc(p.a, l, s, lo, hi, p.b.IDs.Len(tensor.Batch), p.b.IDs.Len(tensor.Seq))
}

func (p *pass) allocTile(l *layer, s *activations, lo, hi group) {
	p.Model.alloc(p.a, l, s, lo, hi, 1, min(p.opt.tile, s.x.Rows()))
}

// layerForward sets out to layer i of kept.x, and the views of kept. If it runs again, it leaves out the mixer with a
// kept output.
func (p *pass) layerForward(i int, out View, kept activations, again bool) error {
	defer p.a.Release(p.a.Mark())
	l, s := p.layers[i], kept
	s.routed = again
	if !again || s.out.O.IsZero() {
		if err := l.mixer.forward(p, &s, false); err != nil {
			return err
		}
	}
	p.allocTile(l, &s, ofRoute, ofRoute)
	p.allocTile(l, &s, ofTile, ofTile)
	for lo, hi := range p.tiles(s.x) {
		t := p.tile(l, &s, lo, hi)
		l.mixer.output(p, &t)
		y := part(out, lo, hi)
		l.mlp.forward(p, &t, y)
		p.scaleLayer(l, y)
	}
	return nil
}

// scaleLayer multiplies a layer's output, or its gradient, by the layer's factor, if it has one.
func (p *pass) scaleLayer(l *layer, v View) {
	if by := l.at(hf.LayerScale).w; !by.IsZero() {
		p.ops.Scale(v, v, by)
	}
}

// layerBackward replaces d, the gradient of the layer's output, by the gradient of its input, and adds to the gradients
// of its parameters. It overwrites s. It computes the missing activations by the calls of the forward pass on the same
// inputs, so the bits are the same.
func (p *pass) layerBackward(i int, d View, s activations) error {
	l, last := p.layers[i], ofTile
	s.routed = true
	p.scaleLayer(l, d)
	p.transpose(l)
	if !s.all {
		last = ofAgain
		if err := l.mixer.forward(p, &s, !s.out.O.IsZero()); err != nil {
			return err
		}
	}
	do := p.a.Alloc(p.dtype, shape(s.out.O)...)
	mark, rows := p.a.Mark(), s
	p.allocTile(l, &rows, ofTile, last)
	for lo, hi := range p.tiles(s.x) {
		t, d := p.tile(l, &rows, lo, hi), part(d, lo, hi)
		if !s.all {
			l.mixer.output(p, &t)
			l.mlp.forward(p, &t, View{})
		}
		l.mlp.backward(p, d, &t)
		l.mixer.outputBackward(p, part(do, lo, hi), d, &t)
	}
	p.a.Release(mark)
	return l.mixer.backward(p, d, do, &s)
}

// tiles returns the ranges of tokens, lo and hi, that are computed at a time.
func (p *pass) tiles(x View) iter.Seq2[int, int] {
	return func(yield func(int, int) bool) {
		for lo, n := 0, x.Rows(); lo < n; lo += p.opt.tile {
			if p.row = lo; !yield(lo, min(lo+p.opt.tile, n)) || p.dry {
				return // the others of a plan are no larger
			}
		}
	}
}

// tile returns the activations of the tokens from lo to hi.
func (p *pass) tile(l *layer, s *activations, lo, hi int) activations {
	t, all := *s, s.x.Rows()
	for _, v := range p.views(l, &t) {
		switch {
		case v.at.IsZero() || v.each > 0:
		case v.at.Rows() == all:
			*v.at = part(*v.at, lo, hi)
		default:
			*v.at = part(*v.at, 0, hi-lo)
		}
	}
	return t
}

// part returns the tokens of v from lo to hi, [1, hi-lo, 1, dim].
func part(v View, lo, hi int) View { return rows(v).Slice(tensor.Seq, lo, hi) }

func shape(v View) []int {
	s := v.Shape()
	return s[:]
}
