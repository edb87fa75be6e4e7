package terminal

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	maxName  = 512  // bytes of a name that are shown: the longest path that is still read
	maxWide  = 2000 // bytes of a line of a message
	maxLines = 120  // of a message
)

// Name returns the name of a file, or another word of a user's, as it is shown: as it is where it
// prints as it is, and else in quotes with its control characters, line breaks and bytes that are
// no UTF-8 spelled out. Of a long one the middle is left out.
func Name(s string) string {
	if len(s) > maxName {
		s = Clip(s[:maxName/2], maxName/2) + "..." + strings.ToValidUTF8(s[len(s)-maxName/2:], "")
	}
	if !utf8.ValidString(s) {
		return strconv.Quote(s)
	}
	for _, r := range s {
		if unsafe(r) {
			return strconv.Quote(s)
		}
	}
	return s
}

// Clip returns at most n bytes of s, the last of them "..." where it is longer.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:max(n-3, 0)], "") + "..."
}

// Message returns an error for a terminal: clean, no line longer than is read, and not more lines
// than a table of all keys of a config would take.
func Message(err error) string {
	lines := strings.SplitN(Text(err.Error()), "\n", maxLines+1)
	if len(lines) > maxLines {
		more := 1 + strings.Count(lines[maxLines], "\n")
		lines[maxLines] = fmt.Sprintf("(%d lines more)", more)
	}
	for i, line := range lines {
		lines[i] = Clip(line, maxWide)
	}
	return strings.Join(lines, "\n")
}
