package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// tokens writes a count of tokens: 1,000 or 128K (of 1,024) where it is whole.
func tokens(n float64) string {
	switch {
	case n >= 1<<20 && math.Mod(n, 1<<20) == 0:
		return thousands(n/(1<<20)) + "M"
	case n >= 1<<10 && math.Mod(n, 1<<10) == 0:
		return thousands(n/(1<<10)) + "K"
	}
	return thousands(n)
}

// thousands writes a number of about three digits, with commas: 12,345 or 0.0123.
func thousands(x float64) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return ""
	}
	digits := 3 - int(math.Floor(math.Log10(math.Abs(x)))) - 1
	if x == 0 || digits < 0 {
		digits = 0
	}
	if digits > 6 {
		return strconv.FormatFloat(x, 'e', 2, 64)
	}
	s := strconv.FormatFloat(x, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	whole, rest, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if rest != "" {
		whole += "." + rest
	}
	return whole
}

// binary writes bytes: 31.9 MiB.
func binary(n float64) string {
	for _, u := range []struct {
		size float64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.size {
			return thousands(n/u.size) + " " + u.name
		}
	}
	return thousands(n) + " B"
}

// seconds writes a duration.
func seconds(s float64) string {
	switch {
	case s >= 3600:
		return fmt.Sprintf("%d h %02d min", int(s)/3600, int(s)/60%60)
	case s >= 60:
		return fmt.Sprintf("%d min %02d s", int(s)/60, int(s)%60)
	case s >= 1 || s == 0:
		return thousands(s) + " s"
	case s >= 1e-3:
		return thousands(s*1e3) + " ms"
	}
	return thousands(s*1e6) + " µs"
}

// percent writes a share.
func percent(x float64) string {
	if math.IsNaN(x) {
		return ""
	}
	if math.Abs(x) < .0095 {
		return strconv.FormatFloat(100*x, 'f', 2, 64) + " %"
	}
	return strconv.FormatFloat(100*x, 'f', 1, 64) + " %"
}

// median returns the middle of what is known, NaN of nothing.
func median(x []float64) float64 {
	known := slices.DeleteFunc(slices.Clone(x), math.IsNaN)
	if len(known) == 0 {
		return math.NaN()
	}
	slices.Sort(known)
	if n := len(known); n%2 == 0 {
		return (known[n/2-1] + known[n/2]) / 2
	}
	return known[len(known)/2]
}

// known writes x by f where there is one, else a dash.
func known(x float64, f func(float64) string) cell {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return cell{Text: "–", Number: true}
	}
	return numeral(f(x))
}
