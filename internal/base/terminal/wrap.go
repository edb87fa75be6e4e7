package terminal

import (
	"strings"
	"unicode/utf8"
)

// Wrap breaks lines of more than width columns at a space, if possible after a comma, semicolon or colon in the last
// quarter. A number stays with the word after it, and longer words stay whole. A continued line begins with indent
// spaces, or two more than the line, if the line begins with that many.
func Wrap(text string, width, indent int) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		begin := len(line) - len(strings.TrimLeft(line, " "))
		rest := strings.Repeat(" ", indent)
		if begin >= indent {
			rest = strings.Repeat(" ", begin+2)
		}
		for utf8.RuneCountInString(strings.TrimRight(line, "\n")) > width {
			at := breakOf(line, width, max(indent, begin+1))
			if at < 0 {
				break
			}
			b.WriteString(strings.TrimRight(line[:at], " ") + "\n")
			line, begin = rest+strings.TrimLeft(line[at:], " "), len(rest)
		}
		b.WriteString(line)
	}
	return b.String()
}

// breakOf returns the space of a line at which to break it, in column from or later; -1: there is none.
func breakOf(line string, width, from int) int {
	at, columns := -1, 0
	for i, r := range line {
		if columns > width && at >= 0 {
			break
		}
		if r == ' ' && columns > from {
			last := line[i-1]
			number, soft := last >= '0' && last <= '9', strings.IndexByte(",;:", last) >= 0
			held := at >= 0 && columns > width*3/4 && strings.IndexByte(",;:", line[at-1]) >= 0 &&
				utf8.RuneCountInString(line[:at]) > width*3/4
			if at < 0 || !number && (soft || !held) {
				at = i
			}
		}
		columns++
	}
	return at
}
