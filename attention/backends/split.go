package backends

// split cuts a call into full rectangles, triangles and simpler bands that more versions of
// a library can run than the band as it is: nil where nothing is left to cut. Parts that
// share rows are merged by their LSE, which is what the accumulators of Kernel do.
func (c Call) split() []Call {
	if c.Documents {
		return nil // each document has a diagonal of its own
	}
	c.done &^= 1 << SplitCall // a part may be split again; parts are strictly simpler
	if c.Rects > 1 {          // each rectangle of the hop is a call of its own
		c.Rects = 1
		return []Call{c}
	}
	lo, hi := c.band()
	p := parter{whole: c, lo: lo, hi: hi}
	boundLeft, boundRight := c.Left >= 0, c.Right >= 0
	// Rows below right meet the right bound, rows from left on meet the left one.
	right, left := c.SeqKV-hi, -lo
	switch {
	case boundLeft && boundRight && left == 0 && right == c.SeqQ:
		p.stairs()
	case boundLeft && boundRight:
		a, b := min(left, right), max(left, right)
		p.cut(0, a, 0, c.SeqKV)
		p.cut(a, b, 0, c.SeqKV)
		p.cut(b, c.SeqQ, 0, c.SeqKV)
	case boundRight:
		p.cut(0, right, 0, hi)
		p.cut(0, right, hi, c.SeqKV)
		p.cut(right, c.SeqQ, 0, c.SeqKV)
	case boundLeft:
		n := c.SeqQ - left
		p.cut(0, left, 0, c.SeqKV)
		p.cut(left, c.SeqQ, 0, n)
		p.cut(left, c.SeqQ, n, c.SeqKV)
	}
	if len(p.out) < 2 || len(p.out) > maxCalls {
		return nil
	}
	return p.out
}

// cut is what of split this build does: the kernel on cuDNN takes rectangles one by one and cuts a
// band by rows until each part has one diagonal, from the top left corner or to the bottom right one, with
// or without a window before it (internal/cuda/dnn.Cut). nil where it leaves the call as it is.
func (c Call) cut() []Call {
	if c.Documents {
		return nil
	}
	c.done &^= 1 << SplitCall
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

// stairs cuts a band in which every row meets both bounds: steps of rows, each a triangle at
// either side and a rectangle between.
func (p *parter) stairs() {
	step := p.hi - p.lo
	if step == 0 || p.whole.SeqQ > step*maxCalls {
		return
	}
	for q := 0; q < p.whole.SeqQ; q += step {
		end := min(q+step, p.whole.SeqQ)
		n := end - q
		p.cut(q, end, q+p.lo, q+p.lo+n)
		p.cut(q, end, q+p.lo+n, q+p.hi)
		p.cut(q, end, q+p.hi, q+p.hi+n)
	}
}
