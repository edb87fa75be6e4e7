// Package readable formats numbers, times and tables for people. Each kind of number has one format:
//
//	readable.Bytes(33449574.4) // "31.9 MiB"
//	readable.Seconds(0.0123)   // "12.3 ms"
package readable

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Number formats a number with about three digits and commas: 12,345 or 0.0123. It uses exponents only below 1e-4, and
// returns "" for NaN and infinities.
func Number(x float64) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return ""
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(x))))
	if x == 0 || digits < 0 {
		digits = 0
	}
	if digits > 6 {
		return strconv.FormatFloat(x, 'e', 2, 64)
	}
	whole, rest, _ := strings.Cut(strconv.FormatFloat(x, 'f', digits, 64), ".")
	if rest = strings.TrimRight(rest, "0"); rest != "" {
		rest = "." + rest
	}
	return commas(whole) + rest
}

func commas(digits string) string {
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// Count formats an integer with commas: 1,234,567.
func Count(n int64) string { return commas(strconv.FormatInt(n, 10)) }

// Counted formats an integer with a noun: 1 rank, 1,024 ranks.
func Counted[N int | int64](n N, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return Count(int64(n)) + " " + noun
}

// Short formats a number with three digits and, from 10,000, a letter: 3.21B parameters or tokens.
func Short(x float64) string {
	if math.Abs(x) < 1e4 {
		return Number(x)
	}
	return scaled(x, "", 1000, "K", "M", "B", "T")
}

// Bytes formats a size in binary units: 31.9 MiB.
func Bytes[N int64 | float64](n N) string {
	return scaled(float64(n), " B", 1024, " KiB", " MiB", " GiB", " TiB")
}

// scaled formats x in the largest unit that is not larger than x. Each unit is step times the previous one.
func scaled(x float64, unit string, step float64, larger ...string) string {
	for _, next := range larger {
		if math.Abs(x) < step {
			break
		}
		x, unit = x/step, next
	}
	return Number(x) + unit
}

// Size formats a number of tokens, in powers of two if that is exact: 1000 or 128K.
func Size[N int64 | float64](n N) string {
	for _, u := range []struct {
		of   float64
		name string
	}{{1 << 30, "G"}, {1 << 20, "M"}, {1 << 10, "K"}} {
		if x := float64(n) / u.of; x >= 1 && x == math.Trunc(x) {
			return Number(x) + u.name
		}
	}
	return strconv.FormatFloat(float64(n), 'f', -1, 64)
}

// Seconds formats a time in a suitable unit: 12.3 ms or 2 min 05 s.
func Seconds(s float64) string {
	switch {
	case s >= 1e7:
		return Number(s/86400) + " days"
	case s >= 3600:
		return fmt.Sprintf("%d h %02d min", int(s)/3600, int(s)/60%60)
	case s >= 60:
		return fmt.Sprintf("%d min %02d s", int(s)/60, int(s)%60)
	case s >= 1 || s == 0:
		return Number(s) + " s"
	case s >= 1e-3:
		return Number(s*1e3) + " ms"
	}
	return Number(s*1e6) + " µs"
}

// Duration formats a time compactly, in its two largest units: 48s, 1m23s, 2h05m, 3d04h.
func Duration(d time.Duration) string {
	s := int64(max(d, 0).Round(time.Second) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 86400:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	}
	return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
}

// Rate formats tokens per second: 5,312 tok/s; below 10 with one decimal.
func Rate(perSecond float64) string {
	switch {
	case math.IsNaN(perSecond) || math.IsInf(perSecond, 0) || perSecond < 0:
		return "? tok/s"
	case perSecond < 9.95:
		return fmt.Sprintf("%.1f tok/s", perSecond)
	}
	return Number(math.Round(min(perSecond, 1e18))) + " tok/s"
}

// Percent formats a share: 12.3%. It returns "" for NaN.
func Percent(x float64) string {
	switch {
	case math.IsNaN(x):
		return ""
	case math.Abs(x) < .0095:
		return strconv.FormatFloat(100*x, 'f', 2, 64) + "%"
	}
	return strconv.FormatFloat(100*x, 'f', 1, 64) + "%"
}

// Table has rows of cells under headings. The first column is left-aligned, the others are right-aligned.
type Table struct {
	Title string
	Head  []string
	Rows  [][]string
	Notes []string // lines below the table
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
