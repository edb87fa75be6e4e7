package ring_test

import (
	"fmt"
	"html"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// A canvas collects the elements of one SVG.
type canvas struct {
	strings.Builder
	w, h        int
	title, desc string
	style       string // rules of this picture alone
}

const pictureStyle = `
svg{--paper:#fff;--ink:#1a1d21;--soft:#5a626c;--rule:#c9cfd6;--on:#fff;` +
	`--0:#0072b2;--1:#c2540a;--2:#00805d;--3:#8f4e86}
@media (prefers-color-scheme:dark){svg{--paper:#14171a;--ink:#e7e9ec;--soft:#a2abb6;--rule:#454c55;--on:#101315;` +
	`--0:#4fb0ea;--1:#ff8a3d;--2:#33c79a;--3:#d890cd}}
text{font:15px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--ink)}
.b{font-weight:600}.s{fill:var(--soft);font-size:14px}.m{text-anchor:middle}.e{text-anchor:end}
.on{fill:var(--on);font-weight:600;text-anchor:middle}.x{fill:var(--on);font-size:12px;text-anchor:middle}
.r0{fill:var(--0)}.r1{fill:var(--1)}.r2{fill:var(--2)}.r3{fill:var(--3)}.paper{fill:var(--paper)}
.box{fill:none;stroke:var(--rule)}.slot{fill:none;stroke:var(--rule);stroke-dasharray:4 3}.pale{opacity:.38}
.a{fill:none;stroke:var(--soft);stroke-width:2;marker-end:url(#head)}.both{marker-start:url(#head)}
#head path{fill:var(--soft)}
`

func (c *canvas) svg() string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">
<title>%s</title>
<desc>%s</desc>
<style>%s%s</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" `+
		`markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>
<rect class="paper" width="%d" height="%d" rx="10"/>
%s</svg>
`, c.w, c.h, c.w, c.h, html.EscapeString(c.title), html.EscapeString(c.desc), pictureStyle, c.style, c.w, c.h,
		c.String())
}

func (c *canvas) rect(class string, x, y, w, h float64) {
	fmt.Fprintf(c, "<rect class=%q x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/>\n", class, x, y, w, h)
}

func (c *canvas) text(class string, x, y float64, format string, args ...any) {
	fmt.Fprintf(c, "<text class=%q x=\"%g\" y=\"%g\">%s</text>\n", class, x, y,
		html.EscapeString(fmt.Sprintf(format, args...)))
}

func (c *canvas) arrow(class, path string, at ...any) {
	fmt.Fprintf(c, "<path class=%q d=%q/>\n", class, fmt.Sprintf(path, at...))
}

// A world is one attention over ranks, with the schedule of each.
type world struct {
	partition.Shape
	all []*ring.Schedule
}

func newWorld(t *testing.T, algorithm string, layout partition.LayoutName, s ring.Spec, window int, docs ...int) world {
	t.Helper()
	mask := ring.Must(partition.NewMask(true, window, s.SeqQ, s.SeqQ, docs))
	s.SeqKV, s.Layout, s.Mask = s.SeqQ, layout.Layout(docs, mask.Band), mask
	w := world{Shape: s.Shape}
	for r := range s.Size {
		one := ring.Must(ring.New(algorithm, s, r))
		w.all = append(w.all, one)
	}
	return w
}

func spec(tokens, ranks int) ring.Spec {
	return ring.Spec{Shape: partition.Shape{SeqQ: tokens, Size: ranks}}
}

func (w *world) positions(rank int) []int {
	return partition.Positions(w.Layout.Spans(w.SeqQ, w.Size, rank))
}

// owner returns the rank that owns the keys of a hop.
func owner(hop ring.Hop) (n, who int) {
	fmt.Sscanf(hop.Label, "hop %d owner %d", &n, &who)
	return n, who
}

// strip draws the tokens of a sequence in the colors of their ranks, in pieces of at least unit tokens.
func (c *canvas) strip(w *world, x, y, width, height float64) {
	of := make([]int, w.SeqQ)
	for r := range w.Size {
		for _, p := range w.positions(r) {
			of[p] = r
		}
	}
	for lo, hi := 0, 0; lo < len(of); lo = hi {
		for hi = lo; hi < len(of) && of[hi] == of[lo]; hi++ {
		}
		step := width / float64(len(of))
		at, long := x+float64(lo)*step, float64(hi-lo)*step
		c.rect(fmt.Sprintf("r%d", of[lo]), at+.5, y, long-1, height)
		if long > 14 {
			c.text("on", at+long/2, y+height/2+5, "%d", of[lo])
		}
	}
}

// block draws the rows [lo, hi) of a rank's keys and values, and the place of the others.
func (c *canvas) block(w *world, who, lo, hi int, x, y, width float64) {
	c.rect("slot", x+.5, y+.5, width/2-2, 27)
	c.rect("slot", x+width/2+.5, y+.5, width/2-2, 27)
	c.chip(w, who, lo, hi, x, y, width)
}

// chip draws the chunks of a rank in its rows [lo, hi), each with its number.
func (c *canvas) chip(w *world, who, lo, hi int, x, y, width float64) {
	at := w.positions(who)
	half, chunk := len(at)/2, w.SeqQ/(2*w.Size)
	for i := range 2 {
		left := x + float64(i)*width/2
		if lo > i*half || hi < (i+1)*half {
			continue
		}
		c.rect(fmt.Sprintf("r%d", who), left, y, width/2-1, 28)
		c.text("on", left+width/4, y+19, "%d", at[i*half]/chunk)
	}
}

// mark says who computes a visible pair, and in which hop.
type mark struct {
	rank, hop int
	seen      bool
}

// marks returns the pairs of a sequence by query and key.
func (w *world) marks() [][]mark {
	all := make([][]mark, w.SeqQ)
	for i := range all {
		all[i] = make([]mark, w.SeqQ)
	}
	for r := range w.Size {
		queries := w.positions(r)
		for o := range w.Size {
			keys := w.positions(o)
			for _, tile := range partition.Plan(w.Shape, r, o) {
				for q := tile.Q.Lo; q < tile.Q.Hi; q++ {
					for k := tile.K.Lo; k < tile.K.Hi; k++ {
						if tile.Band.Sees(q, k) {
							all[queries[q]][keys[k]] = mark{r, (r - o + w.Size) % w.Size, true}
						}
					}
				}
			}
		}
	}
	return all
}

// matrix draws the pairs as a square of that side. class names the look of a mark.
func (c *canvas) matrix(w *world, x, y, side float64, class func(mark) string) {
	all, step := w.marks(), side/float64(w.SeqQ)
	c.rect("box", x-.5, y-.5, side+1, side+1)
	for i, row := range all {
		for lo, hi := 0, 0; lo < len(row); lo = hi {
			for hi = lo; hi < len(row) && row[hi] == row[lo]; hi++ {
			}
			if row[lo].seen && (i == 0 || !same(all[i-1], row, lo, hi)) { // as many rows as are alike become one
				n := 1
				for i+n < len(all) && same(all[i+n], row, lo, hi) {
					n++
				}
				c.rect(class(row[lo]), x+float64(lo)*step, y+float64(i)*step, float64(hi-lo)*step, float64(n)*step)
			}
		}
	}
}

// same reports whether a run of two rows is alike, and ends at the same places.
func same(a, b []mark, lo, hi int) bool {
	ends := func(row []mark) [2]bool {
		return [2]bool{lo == 0 || row[lo-1] != row[lo], hi == len(row) || row[hi] != row[lo]}
	}
	return slices.Equal(a[lo:hi], b[lo:hi]) && ends(a) == ends(b)
}
