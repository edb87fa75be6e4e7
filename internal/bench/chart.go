package bench

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// Chart is lines over an axis, as SVG. It is written here because the libraries for it bring
// fonts, TeX and PDF along, several megabytes for a polyline.
type Chart struct {
	Title, X, Y string
	Lines       []Line
	LogX        bool                 // powers of two at equal distances
	TickX       func(float64) string // nil: digits
}

// Line is one line of a chart. Dashed ones are what others are compared with.
type Line struct {
	Name   string
	Points [][2]float64 // x, y
	Dashed bool
}

// palette is told apart by people who see colours differently (Okabe and Ito, 2008).
var palette = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"}

const (
	chartWidth, chartHeight = 860.0, 460.0
	left, right             = 70.0, 250.0 // margins; the legend stands in the right one
	top, bottom             = 50.0, 60.0
	ticks                   = 6
)

// WriteTo writes the chart.
func (c *Chart) WriteTo(w io.Writer) (int64, error) {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" viewBox="0 0 %g %g" font-family="sans-serif" font-size="13">`+"\n",
		chartWidth, chartHeight, chartWidth, chartHeight)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	text(&b, left, 28, "start", 16, c.Title)
	s := c.scale()
	c.axes(&b, s)
	for i, l := range c.Lines {
		s.line(&b, l, i)
	}
	b.WriteString("</svg>\n")
	n, err := io.WriteString(w, b.String())
	return int64(n), err
}

// scale takes points to the drawing.
type scale struct {
	log          bool
	lo, hi, most float64 // of x, and of y, which begins at 0
	xs           []float64
}

func (c *Chart) scale() scale {
	s := scale{log: c.LogX, lo: math.Inf(1), hi: math.Inf(-1)}
	seen := make(map[float64]bool)
	for _, l := range c.Lines {
		for _, p := range l.Points {
			x := s.along(p[0])
			s.lo, s.hi, s.most = min(s.lo, x), max(s.hi, x), max(s.most, p[1])
			if !seen[p[0]] {
				seen[p[0]] = true
				s.xs = append(s.xs, p[0])
			}
		}
	}
	if s.lo >= s.hi { // one point, or none
		middle := 0.0
		if len(s.xs) > 0 {
			middle = s.lo
		}
		s.lo, s.hi = middle-1, middle+1
	}
	step := niceStep(s.most / (ticks - 1))
	s.most = step * math.Max(1, math.Ceil(s.most/step*1.02))
	return s
}

func (s *scale) along(x float64) float64 {
	if s.log {
		return math.Log2(math.Max(x, 1))
	}
	return x
}

func (s *scale) x(x float64) float64 {
	return left + (s.along(x)-s.lo)/(s.hi-s.lo)*(chartWidth-left-right)
}

func (s *scale) y(y float64) float64 {
	return chartHeight - bottom - y/s.most*(chartHeight-top-bottom)
}

// niceStep is the next of 1, 2, 5, 10, ... from x on.
func niceStep(x float64) float64 {
	if !(x > 0) {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(x)))
	for _, m := range []float64{1, 2, 5} {
		if x <= m*unit {
			return m * unit
		}
	}
	return 10 * unit
}

func (c *Chart) axes(b *strings.Builder, s scale) {
	const grey = "#dddddd"
	step := niceStep(s.most / ticks)
	for y := 0.0; y <= s.most*1.0001; y += step {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", left, s.y(y), chartWidth-right, s.y(y), grey)
		text(b, left-8, s.y(y)+4, "end", 0, digits(y))
	}
	tick := c.TickX
	if tick == nil {
		tick = digits
	}
	xs := s.xs
	if !c.LogX && len(xs) > 12 { // too many for a label each
		xs = nil
		for i := range ticks {
			xs = append(xs, math.Round(s.lo+(s.hi-s.lo)*float64(i)/(ticks-1)))
		}
	}
	for _, x := range xs {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="black"/>`+"\n", s.x(x), chartHeight-bottom, s.x(x), chartHeight-bottom+5)
		text(b, s.x(x), chartHeight-bottom+20, "middle", 0, tick(x))
	}
	fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="black"/>`+"\n", left, chartHeight-bottom, chartWidth-right, chartHeight-bottom)
	text(b, (left+chartWidth-right)/2, chartHeight-18, "middle", 0, c.X)
	text(b, left, top-8, "start", 0, c.Y)
}

func (s *scale) line(b *strings.Builder, l Line, i int) {
	colour, dash := palette[i%len(palette)], ""
	if l.Dashed {
		dash = ` stroke-dasharray="6 4"`
	}
	var path strings.Builder
	for _, p := range l.Points {
		fmt.Fprintf(&path, "%.1f,%.1f ", s.x(p[0]), s.y(p[1]))
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", strings.TrimSpace(path.String()), colour, dash)
	for _, p := range l.Points {
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`+"\n", s.x(p[0]), s.y(p[1]), colour)
	}
	x, y := chartWidth-right+20, top+float64(i)*20
	fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="2"%s/>`+"\n", x, y, x+24, y, colour, dash)
	text(b, x+32, y+4, "start", 0, l.Name)
}

// text writes a line of text; size 0 is the chart's.
func text(b *strings.Builder, x, y float64, anchor string, size int, s string) {
	big := ""
	if size > 0 {
		big = fmt.Sprintf(` font-size="%d"`, size)
	}
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s"%s>`, x, y, anchor, big)
	xml.EscapeText(b, []byte(s)) // a strings.Builder has no write errors
	b.WriteString("</text>\n")
}
