package model

import "github.com/cprun/cprun/tensor"

// The loss processes the tokens in chunks. The logits, [tokens, V], can exceed all activations together for a long
// sequence, so only one chunk of them exists at a time. In training the gradients are computed in the same pass, so no
// logits are kept.

// lossForward adds the sum of -log p(target) to loss. x: [B, S, 1, E], the last layer's output.
func (p *pass) lossForward(loss, x View) {
	p.chunks(x, func(c chunk) {
		p.logits(c)
		if p.b.Rows != nil {
			p.b.Rows(c.lo, c.logits)
			return
		}
		for i := c.lo; i < c.hi && p.b.Each; i++ {
			at := i - c.lo
			p.ops.CrossEntropy(loss.Slice(tensor.Dim, i, i+1), c.logits.Slice(tensor.Seq, at, at+1),
				c.targets.Slice(tensor.Seq, at, at+1), 1, p.softcap, false)
		}
		if p.b.Each {
			return
		}
		sum := loss
		if len(p.b.Parts) > 0 {
			sum = loss.Slice(tensor.Dim, c.sum, c.sum+1)
		}
		p.ops.CrossEntropy(sum, c.logits, c.targets, 1, p.softcap, false)
	})
}

// lossBackward also adds that sum, sets d to the gradient of scale times the sum with respect to x, and adds to the
// gradients of the last norm and the head.
func (p *pass) lossBackward(loss, d, x View, scale float64) {
	d = rows(d)
	p.chunks(x, func(c chunk) {
		p.logits(c)
		p.ops.CrossEntropy(loss, c.logits, c.targets, scale, p.softcap, true)
		dlogits := c.logits
		p.linearDW(p.head, operand{View: dlogits}, operand{View: c.n})
		dn := c.n // no longer needed
		p.ops.LinearDX(dn, dlogits, p.head.w, false)
		p.divideLogits(dn)
		p.ops.RMSNormBackward(d.Slice(tensor.Seq, c.lo, c.hi), p.norm.g, dn, c.x, c.inv, p.norm.w, false)
	})
}

// A chunk is the tokens lo to hi, T of them.
type chunk struct {
	lo, hi  int
	sum     int  // index of the part's sum
	x       View // [1, T, 1, E]
	targets View // [1, T, 1, 1]
	inv, n  View // [1, T, 1, 1] and [1, T, 1, E], the last norm
	logits  View // [1, T, 1, V]
}

// logits sets n = norm(x), divided by the scaling of logits, and logits = Whead n, within the soft cap.
func (p *pass) logits(c chunk) {
	p.ops.RMSNorm(c.n, c.inv, c.x, p.norm.w, p.cfg.RMSNormEps)
	p.divideLogits(c.n)
	p.ops.Linear(c.logits, c.n, p.head.w, View{})
	if p.softcap > 0 {
		p.ops.SoftCap(c.logits, p.softcap)
	}
}

// divideLogits divides the head's input, or its gradient, by the scaling of logits.
func (p *pass) divideLogits(n View) {
	if by := p.cfg.LogitsScaling; by > 0 {
		p.ops.Affine(n, n, 1/by, 0)
	}
}

// chunks calls f for each chunk, all in the same memory; never without tokens. A chunk lies in one part.
func (p *pass) chunks(x View, f func(chunk)) {
	x, targets := rows(x), rows(p.b.Targets)
	tokens, part := x.Len(tensor.Seq), 0
	for lo, hi := 0, 0; lo < tokens; lo = hi {
		hi = min(lo+p.opt.LossChunk, tokens)
		sum := 0
		if len(p.b.Parts) > 0 {
			for p.b.Parts[part].Hi <= lo {
				part++
			}
			hi, sum = min(hi, p.b.Parts[part].Hi), p.b.Parts[part].Sum
		}
		mark := p.a.Mark()
		f(chunk{
			lo: lo, hi: hi, sum: sum,
			x:       x.Slice(tensor.Seq, lo, hi),
			targets: targets.Slice(tensor.Seq, lo, hi),
			inv:     p.a.Alloc(p.accum, 1, hi-lo, 1, 1),
			n:       p.a.Alloc(p.dtype, 1, hi-lo, 1, p.cfg.HiddenSize),
			logits:  p.a.Alloc(p.dtype, 1, hi-lo, 1, p.cfg.VocabSize),
		})
		p.a.Release(mark)
		if p.dry {
			return // the others are no larger, and a very long sequence has many
		}
	}
}

// rows returns v as one sequence of all its tokens, [1, B*S, 1, dim].
func rows(v View) View { return v.Reshape([4]int{1, v.Rows(), 1, v.Cols()}) }
