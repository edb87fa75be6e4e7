package config

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var (
	integerRE = regexp.MustCompile(`^[0-9]+(_[0-9]+)*$`)
	floatRE   = regexp.MustCompile(`^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$`)
	basedRE   = regexp.MustCompile(`^[-+]?0[xXbBoO][0-9a-fA-F_]+$`)
	unitRE    = regexp.MustCompile(`^([0-9]+(?:_[0-9]+)*) ?([kKmMgGtT])i?[bB]?$`)
)

var suffixes = map[byte]int64{'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}

// ParseSize reads an integer of 0 or more: "4096", "1_000_000", or with a power-of-two suffix: "128K" for 131072, "1M",
// "2G". It refuses ambiguous forms with the fix (010, 0x10, 1e3, 128k).
func ParseSize(s string) (int64, error) {
	digits, unit := s, int64(1)
	if n := len(s); n > 0 && suffixes[s[n-1]] != 0 {
		digits, unit = s[:n-1], suffixes[s[n-1]]
	}
	if !integerRE.MatchString(digits) {
		return 0, notSize(s)
	}
	plain := strings.ReplaceAll(digits, "_", "")
	if len(plain) > 1 && plain[0] == '0' {
		return 0, fmt.Errorf("%s begins with 0, which some readers take for octal; write %s",
			clipped(s), clipped(cmp.Or(strings.TrimLeft(plain, "0"), "0")+s[len(digits):]))
	}
	v, err := strconv.ParseInt(plain, 10, 64)
	if err != nil || v > math.MaxInt64/unit {
		return 0, fmt.Errorf("%s is too large for a 64-bit integer; write a smaller one", clipped(s))
	}
	return v * unit, nil
}

// notSize explains why a word is not a size, by the likely intent.
func notSize(s string) error {
	if m := unitRE.FindStringSubmatch(s); m != nil {
		return fmt.Errorf("%s is not a size; write %s%s (powers of two)", clipped(s), clipped(m[1]),
			strings.ToUpper(m[2]))
	}
	if basedRE.MatchString(s) {
		return fmt.Errorf("%s is not decimal; write a plain integer or a size such as 128K", clipped(s))
	}
	if floatRE.MatchString(s) {
		v, err := strconv.ParseFloat(s, 64)
		switch {
		case err == nil && v < 0:
			return fmt.Errorf("%s is negative; write it without a sign", clipped(s))
		case err == nil && v == math.Trunc(v) && v < 1<<53:
			return fmt.Errorf("%s is not written as an integer; write %d", clipped(s), int64(v))
		}
		return fmt.Errorf("%s is not an integer; write one such as 4096", clipped(s))
	}
	return fmt.Errorf("%s is not an integer; write one such as 4096, or a size such as 128K", quoted(s))
}

// ParseFloat reads a finite decimal number.
func ParseFloat(s string) (float64, error) {
	if !floatRE.MatchString(s) {
		switch strings.ToLower(strings.TrimLeft(s, "+-")) {
		case ".inf", ".nan", "inf", "nan", "infinity":
			return 0, fmt.Errorf("%s is not a finite number; write one such as 0.1", clipped(s))
		}
		return 0, fmt.Errorf("%s is not a number; write one such as 0.1 or 3.0e-4", quoted(s))
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is too large for a float64; write a smaller one", clipped(s))
	}
	return v + 0, nil
}

// tenth returns v/10 as a short decimal: 3.0e-5 for 3.0e-4, not 17 digits.
func tenth(v float64) float64 {
	d, err := strconv.ParseFloat(strconv.FormatFloat(v/10, 'g', 15, 64), 64)
	if err != nil {
		return v / 10
	}
	return d
}

// formatFloat writes a float that every YAML reader reads as a float: Python's yaml reads 1e-05 as text, and 1.0e-05 as
// a number.
func formatFloat(v float64) string {
	s := strconv.FormatFloat(v, 'g', -1, 64)
	mantissa, exponent, hasExponent := strings.Cut(s, "e")
	if !strings.Contains(mantissa, ".") {
		mantissa += ".0"
	}
	if hasExponent {
		return mantissa + "e" + exponent
	}
	return mantissa
}

// longest exceeds the time of any run.
const longest = 10000 * time.Hour

// ParseTime reads a time such as 30s, 5m or 1h30m; 0 needs no unit.
func ParseTime(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	switch {
	case err != nil && floatRE.MatchString(s):
		return 0, fmt.Errorf("%s has no unit; write %ss, %sm or %sh", clipped(s), clipped(s), clipped(s), clipped(s))
	case err != nil:
		return 0, fmt.Errorf("%s is not a time; write one such as 30s, 5m or 2h", quoted(s))
	case d < 0:
		return 0, fmt.Errorf("%s is negative; write it without a sign", clipped(s))
	case d > longest:
		return 0, fmt.Errorf("%s is too long; the most is %s", clipped(s), FormatTime(longest))
	}
	return d, nil
}

// FormatTime writes a time for ParseTime, without zero units: 15m instead of Go's 15m0s.
func FormatTime(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// clipped escapes a user's word and cuts it if it is very long.
func clipped(s string) string {
	const limit = 240 // paths of temporary directories exceed 100
	clean := strconv.Quote(s)
	clean = clean[1 : len(clean)-1]
	if r := []rune(clean); len(r) > limit {
		return string(r[:limit]) + "..."
	}
	return clean
}

func quoted(s string) string { return `"` + clipped(s) + `"` }
