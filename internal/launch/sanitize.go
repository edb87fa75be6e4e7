package launch

import (
	"unicode"
	"unicode/utf8"
)

// sanitize is a line of a worker's output made safe for a terminal: escape sequences and
// control characters are left out, so are the characters that reverse the reading order, and
// bytes that are not UTF-8 become U+FFFD. Tabs stay.
func sanitize(line []byte) []byte {
	out := make([]byte, 0, len(line))
	for len(line) > 0 {
		if line[0] == 0x1b {
			line = line[escapeLength(line):]
			continue
		}
		r, n := utf8.DecodeRune(line)
		switch {
		case r == '\t':
			out = append(out, '\t')
		case r == utf8.RuneError && n == 1:
			out = utf8.AppendRune(out, utf8.RuneError)
		case unicode.IsControl(r), reverses(r):
		default:
			out = append(out, line[:n]...)
		}
		line = line[n:]
	}
	return out
}

// reverses reports the bidirectional overrides and isolates (CVE-2021-42574).
func reverses(r rune) bool {
	return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 || r == 0x200e || r == 0x200f
}

// escapeLength is the length of the escape sequence at the start of b (ECMA-48): a control
// sequence, an operating system command or other string, or a short one. An unfinished
// sequence ends with the line.
func escapeLength(b []byte) int {
	if len(b) < 2 {
		return len(b)
	}
	switch b[1] {
	case '[':
		for i := 2; i < len(b); i++ {
			if b[i] >= 0x40 && b[i] <= 0x7e {
				return i + 1
			}
			if b[i] < 0x20 || b[i] > 0x7e {
				return i // not a control sequence after all: keep what follows
			}
		}
		return len(b)
	case ']', 'P', '_', '^', 'X':
		for i := 2; i < len(b); i++ {
			if b[i] == 0x07 {
				return i + 1
			}
			if b[i] == 0x1b && i+1 < len(b) && b[i+1] == '\\' {
				return i + 2
			}
		}
		return len(b)
	}
	if b[1] >= 0x20 && b[1] <= 0x2f && len(b) > 2 {
		return 3 // an intermediate byte and a final one, as in the choice of a character set
	}
	if b[1] < 0x80 {
		return 2
	}
	return 1
}
