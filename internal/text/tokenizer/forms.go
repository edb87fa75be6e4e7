package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// A form is one of the four Unicode normal forms, as in the library: by an older Unicode version, in which newer runes
// never change, and without the limit of golang.org/x/text of 30 marks on a letter.
type form struct {
	form    norm.Form
	compose bool
}

var forms = map[string]form{
	"NFC": {norm.NFC, true}, "NFD": {norm.NFD, false}, "NFKC": {norm.NFKC, true}, "NFKD": {norm.NFKD, false},
}

// manyMarks bounds the marks in a row that golang.org/x/text handles. It takes up to 30 after decomposition, and each
// mark decomposes into at most three.
const manyMarks = 8

// active holds the runes that normalization changes in the library's Unicode version.
var active = newClassOnce("active")

func (f form) normalizeText(s string) string {
	k := 0
	for k < len(s) && s[k] < utf8.RuneSelf {
		k++
	}
	if k == len(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + len(s)/8)
	start, marks, slow := 0, 0, false // of the current stretch
	for at := max(k-1, 0); at < len(s); {
		r, n := runeAt(s, at)
		switch {
		case r < utf8.RuneSelf:
			marks = 0
		case !active().has(r) && touched(s[at:at+n]):
			b.WriteString(f.stretch(s[start:at], slow))
			b.WriteString(s[at : at+n])
			start, marks, slow = at+n, 0, false
		default:
			p := norm.NFKD.PropertiesString(s[at : at+n])
			if marks++; p.CCC() == 0 && p.LeadCCC() == 0 && p.TrailCCC() == 0 {
				marks = 0
			}
			slow = slow || marks > manyMarks
		}
		at += n
	}
	b.WriteString(f.stretch(s[start:], slow))
	return b.String()
}

// touched reports whether golang.org/x/text changes a rune.
func touched(s string) bool {
	p := norm.NFKD.PropertiesString(s)
	return p.CCC() != 0 || p.Decomposition() != nil || !p.BoundaryBefore() ||
		!norm.NFC.PropertiesString(s).BoundaryBefore() || !norm.NFC.PropertiesString(s).BoundaryAfter()
}

func (f form) stretch(s string, slow bool) string {
	if !slow {
		return f.form.String(s)
	}
	apart := norm.NFD
	if f.form == norm.NFKC || f.form == norm.NFKD {
		apart = norm.NFKD
	}
	type mark struct {
		r   rune
		ccc uint8
	}
	var marks []mark
	for _, r := range s {
		for _, d := range apart.String(string(r)) {
			marks = append(marks, mark{d, norm.NFD.PropertiesString(string(d)).CCC()})
		}
	}
	for at := 0; at < len(marks); {
		end := at + 1
		if marks[at].ccc != 0 {
			for end < len(marks) && marks[end].ccc != 0 {
				end++
			}
			slices.SortStableFunc(marks[at:end], func(a, b mark) int { return int(a.ccc) - int(b.ccc) })
		}
		at = end
	}
	out := marks
	if f.compose {
		out = out[:0:0]
		starter, last := -1, -1 // in out; the class of the last rune after it, -1 for none
		for _, m := range marks {
			if starter >= 0 && last < int(m.ccc) {
				if c, ok := composed(out[starter].r, m.r); ok {
					out[starter].r = c
					continue
				}
			}
			if m.ccc == 0 {
				starter, last = len(out), -1
			} else {
				last = int(m.ccc)
			}
			out = append(out, m)
		}
	}
	var b strings.Builder
	for _, m := range out {
		b.WriteRune(m.r)
	}
	return b.String()
}

func composed(a, b rune) (rune, bool) {
	s := norm.NFC.String(string(a) + string(b))
	r, n := utf8.DecodeRuneInString(s)
	return r, n == len(s)
}
