package model

import "github.com/cprun/cprun/tensor"

// The loss processes the tokens in chunks. The logits, [tokens, V], can exceed all activations together for a long
// sequence, so only one chunk of them exists at a time. In training the gradients are computed in the same pass, so no
// logits are kept.

// lossForward adds the sum of -log p(target) to loss. x: [B, S, 1, E], the last layer's output.
func (m *Model) lossForward(a *tensor.Arena, b Batch, loss, x View) {
	m.chunks(a, b, x, func(c chunk) {
		m.logits(c)
		if b.Rows != nil {
			b.Rows(c.lo, c.logits)
			return
		}
		for i := c.lo; i < c.hi && b.Each; i++ {
			at := i - c.lo
			m.ops.CrossEntropy(loss.Slice(tensor.Dim, i, i+1), c.logits.Slice(tensor.Seq, at, at+1),
				c.targets.Slice(tensor.Seq, at, at+1), 1, m.softcap, false)
		}
		if b.Each {
			return
		}
		sum := loss
		if len(b.Parts) > 0 {
			sum = loss.Slice(tensor.Dim, c.sum, c.sum+1)
		}
		m.ops.CrossEntropy(sum, c.logits, c.targets, 1, m.softcap, false)
	})
}

// lossBackward also adds that sum, sets d to the gradient of scale times the sum with respect to x, and adds to the
// gradients of the last norm and the head.
func (m *Model) lossBackward(a *tensor.Arena, b Batch, loss, d, x View, scale float64) {
	d = rows(d)
	m.chunks(a, b, x, func(c chunk) {
		m.logits(c)
		m.ops.CrossEntropy(loss, c.logits, c.targets, scale, m.softcap, true)
		dlogits := c.logits
		m.linearDW(m.head, dlogits, c.n)
		dn := c.n // no longer needed
		m.ops.LinearDX(dn, dlogits, m.head.w, false)
		m.ops.RMSNormBackward(d.Slice(tensor.Seq, c.lo, c.hi), m.norm.g, dn, c.x, c.inv, m.norm.w, false)
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

// logits sets n = norm(x), logits = Whead n, within the soft cap.
func (m *Model) logits(c chunk) {
	m.ops.RMSNorm(c.n, c.inv, c.x, m.norm.w, m.cfg.RMSNormEps)
	m.ops.Linear(c.logits, c.n, m.head.w, View{})
	if m.softcap > 0 {
		m.ops.SoftCap(c.logits, m.softcap)
	}
}

// chunks calls f for each chunk, all in the same memory; never without tokens. A chunk lies in one part.
func (m *Model) chunks(a *tensor.Arena, b Batch, x View, f func(chunk)) {
	x, targets := rows(x), rows(b.Targets)
	tokens, part := x.Len(tensor.Seq), 0
	for lo, hi := 0, 0; lo < tokens; lo = hi {
		hi = min(lo+m.opt.LossChunk, tokens)
		sum := 0
		if len(b.Parts) > 0 {
			for b.Parts[part].Hi <= lo {
				part++
			}
			hi, sum = min(hi, b.Parts[part].Hi), b.Parts[part].Sum
		}
		mark := a.Mark()
		f(chunk{
			lo: lo, hi: hi, sum: sum,
			x:       x.Slice(tensor.Seq, lo, hi),
			targets: targets.Slice(tensor.Seq, lo, hi),
			inv:     a.Alloc(m.accum, 1, hi-lo, 1, 1),
			n:       a.Alloc(m.dtype, 1, hi-lo, 1, m.cfg.HiddenSize),
			logits:  a.Alloc(m.dtype, 1, hi-lo, 1, m.cfg.VocabSize),
		})
		a.Release(mark)
		if m.dryRun {
			return // the others are no larger, and a very long sequence has many
		}
	}
}

// rows returns v as one sequence of all its tokens, [1, B*S, 1, dim].
func rows(v View) View { return v.Reshape([4]int{1, v.Rows(), 1, v.Cols()}) }
