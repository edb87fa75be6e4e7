package top

import (
	"strings"

	"github.com/clipperhouse/displaywidth"
)

// Style is how a part of a line is drawn.
type Style int

// The styles. Each can be told from the words alone, if a terminal has no colours.
const (
	Plain  Style = iota
	Dim          // labels
	Bold         // figures that are looked for
	Good         // of a run that does well
	Warn         // to be looked at
	Bad          // of a run that has failed
	Accent       // curves
)

// Span is a part of a line: Text in one Style.
type Span struct {
	Text  string
	Style Style
}

// Line is one line of the picture.
type Line []Span

// String returns the line without its styles.
func (l Line) String() string {
	var b strings.Builder
	for _, s := range l {
		b.WriteString(s.Text)
	}
	return strings.TrimRight(b.String(), " ")
}

// width returns the number of columns of a text: some characters take two or none.
func width(s string) int { return displaywidth.String(s) }

// width returns the columns of the whole line.
func (l Line) width() int {
	n := 0
	for _, s := range l {
		n += width(s.Text)
	}
	return n
}

// clip returns at most n columns of the line.
func (l Line) clip(n int) Line {
	var out Line
	for _, s := range l {
		w := width(s.Text)
		if w > n {
			s.Text = clip(s.Text, n)
			return append(out, s)
		}
		out, n = append(out, s), n-w
	}
	return out
}

// clip returns at most n columns of s, the last of them ".." if it is longer.
func clip(s string, n int) string {
	if width(s) <= n {
		return s
	}
	tail := ".."
	if n < 6 {
		tail = ""
	}
	return displaywidth.TruncateString(s, max(n, 0), tail)
}

// fill returns s in n columns, at the right end of them or at the left.
func fill(s string, n int, right bool) string {
	s = clip(s, n)
	space := strings.Repeat(" ", max(0, n-width(s)))
	if right {
		return space + s
	}
	return s + space
}

// ends returns a line with one part at each end of w columns.
func ends(left, right Line, w int) Line {
	left = left.clip(w)
	space := w - left.width() - right.width()
	if space < 2 {
		return left
	}
	return append(append(left, Span{strings.Repeat(" ", space), Plain}), right...)
}

// An item is a figure with its label.
type item struct {
	label, text string
	style       Style
}

// flow puts items beside each other, on as many lines of w columns as they take, the first part of each line being
// name.
func flow(name string, items []item, w int) []Line {
	line := Line{{fill(name, nameWidth, false), Dim}}
	var out []Line
	empty := true
	for _, it := range items {
		var part Line
		if it.label != "" {
			part = append(part, Span{it.label + " ", Dim})
		}
		part = append(part, Span{it.text, it.style})
		if !empty && line.width()+2+part.width() > w {
			out = append(out, line)
			line, empty = Line{{strings.Repeat(" ", nameWidth), Plain}}, true
		}
		if !empty {
			line = append(line, Span{"  ", Plain})
		}
		line, empty = append(line, part...), false
	}
	out = append(out, line)
	for i := range out {
		out[i] = out[i].clip(w)
	}
	return out
}

// nameWidth counts the columns of the names at the left.
const nameWidth = 8
