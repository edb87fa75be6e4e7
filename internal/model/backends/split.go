package backends

// cut splits a call as the kernel on cuDNN does (internal/base/cuda/dnn.Cut): rectangles run one by one, and a band is cut
// by rows until each part has one diagonal, from the top left corner or to the bottom right one, with or without a
// window before it. cut returns nil where the kernel leaves the call as it is. The parts share no rows.
func (c Call) cut() []Call {
	if c.Documents {
		return nil
	}
	if c.Rects > 1 {
		c.Rects = 1
		return []Call{c}
	}
	lo, hi := c.band()
	p := parter{whole: c, lo: lo, hi: hi}
	row := 0
	switch shift := c.SeqKV - c.SeqQ; {
	case c.Right >= 0 && hi > 0 && hi != shift:
		row = c.SeqKV - hi // from here on the right bound hides nothing
	case c.Left >= 0 && shift < 0:
		row = -lo // up to here the left bound hides nothing
	default:
		return nil
	}
	p.cut(0, row, 0, c.SeqKV)
	p.cut(row, c.SeqQ, 0, c.SeqKV)
	return p.out
}

// band is the bounds of j-i, counted from the call's first query and key.
func (c *Call) band() (lo, hi int) {
	shift := 0
	if c.Mask == BottomRightMask {
		shift = c.SeqKV - c.SeqQ
	}
	lo, hi = -(c.SeqQ - 1), c.SeqKV-1
	if c.Left >= 0 {
		lo = shift - c.Left
	}
	if c.Right >= 0 {
		hi = shift + c.Right
	}
	return lo, hi
}

// parter collects the parts of a call.
type parter struct {
	whole  Call
	lo, hi int
	out    []Call
}

// cut adds the pairs of rows [q0, q1) and keys [k0, k1), shrunk to those that are visible.
func (p *parter) cut(q0, q1, k0, k1 int) {
	q0, q1 = max(q0, k0-p.hi), min(q1, k1-p.lo)
	k0, k1 = max(k0, q0+p.lo), min(k1, q1+p.hi)
	if q0 >= q1 || k0 >= k1 {
		return
	}
	c := p.whole
	c.QAt, c.KAt = c.QAt+q0, c.KAt+k0
	c.SeqQ, c.SeqKV = q1-q0, k1-k0
	c.masked(p.lo-k0+q0, p.hi-k0+q0)
	p.out = append(p.out, c)
}
