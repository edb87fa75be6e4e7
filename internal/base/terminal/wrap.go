package terminal

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// Columns returns the width at which to wrap text on standard output: the terminal's, from 40 to 100, or 80 for a file
// or pipe.
func Columns() int {
	if n, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && n > 0 {
		return min(max(n, 40), 100)
	}
	return 80
}

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

// MaxFaults is how many faults of one file or directory are told, and the rest counted: what is
// wrong with a hundred thousand names is seen from the first.
const MaxFaults = 20

// Faults collects what is wrong, up to MaxFaults.
type Faults struct {
	list []error
	more int
}

// Add adds a fault; nil is none. It reports whether there is room for more: a search that costs
// much may end there.
func (f *Faults) Add(err error) (room bool) {
	switch {
	case err == nil:
	case f.Full():
		f.more++
	default:
		f.list = append(f.list, err)
	}
	return !f.Full()
}

// Addf adds a fault that is made only if it is kept.
func (f *Faults) Addf(format string, args ...any) {
	if f.Full() {
		f.more++
		return
	}
	f.Add(fmt.Errorf(format, args...))
}

// Full says that no more faults are told.
func (f *Faults) Full() bool { return len(f.list) >= MaxFaults }

// Err returns all of them as one error, nil if there is none.
func (f *Faults) Err() error {
	if f.more > 0 {
		return errors.Join(append(f.list[:len(f.list):len(f.list)], fmt.Errorf("and %d faults more of these kinds",
			f.more))...)
	}
	return errors.Join(f.list...)
}
