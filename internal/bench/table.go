package bench

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Table is rows of cells under headings, the first column to the left, the others to the
// right.
type Table struct {
	Title string
	Head  []string
	Rows  [][]string
	Notes []string // lines below
}

// Add appends a row.
func (t *Table) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

// WriteTo writes the table as text.
func (t *Table) WriteTo(w io.Writer) (int64, error) {
	width := make([]int, len(t.Head))
	for _, row := range append([][]string{t.Head}, t.Rows...) {
		for i, c := range row {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	if t.Title != "" {
		b.WriteString(t.Title + "\n")
	}
	line := func(cells []string) {
		var l strings.Builder
		for i, c := range cells {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c))
			switch {
			case i == 0:
				l.WriteString(c + pad)
			default:
				l.WriteString("  " + pad + c)
			}
		}
		b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
	}
	line(t.Head)
	rule := make([]string, len(width))
	for i, n := range width {
		rule[i] = strings.Repeat("-", n)
	}
	line(rule)
	for _, row := range t.Rows {
		line(row)
	}
	for _, n := range t.Notes {
		b.WriteString(n + "\n")
	}
	n, err := io.WriteString(w, b.String())
	return int64(n), err
}

// sizeText is a count in powers of two where that is exact: 128K.
func sizeText(n int64) string {
	for _, u := range []struct {
		unit int64
		name string
	}{{1 << 30, "G"}, {1 << 20, "M"}, {1 << 10, "K"}} {
		if n >= u.unit && n%u.unit == 0 {
			return fmt.Sprintf("%d%s", n/u.unit, u.name)
		}
	}
	return fmt.Sprint(n)
}

// bytesText is a number of bytes to three digits.
func bytesText(n int64) string {
	for _, u := range []struct {
		unit int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.unit {
			return digits(float64(n)/float64(u.unit)) + " " + u.name
		}
	}
	return fmt.Sprintf("%d B", n)
}

// digits is x to about three digits, never in exponents.
func digits(x float64) string {
	switch a := max(x, -x); {
	case a >= 100 || a == 0:
		return fmt.Sprintf("%.0f", x)
	case a >= 10:
		return fmt.Sprintf("%.1f", x)
	case a >= 1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

func milliseconds(s float64) string { return digits(1e3 * s) }

func percent(x float64) string { return fmt.Sprintf("%.1f%%", 100*x) }
