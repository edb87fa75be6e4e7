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
// quarter. It keeps a number with the next word, and does not break words. A continued line begins with indent spaces.
// If the line itself begins with at least indent spaces, a continued line begins with two more.
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

// breakOf returns the index of the space at which to break a line, after column from, or -1 if there is none.
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
	maxName  = 512  // bytes of a name
	maxWide  = 2000 // bytes of a line of a message
	maxLines = 120  // lines of a message
)

// Name returns the printable form of a file name, or of another word from a user. It quotes names with control
// characters, line breaks or invalid UTF-8, and escapes these. It cuts the middle of long names.
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

// Clip returns at most n bytes of s. If s is longer, the result ends in "...".
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:max(n-3, 0)], "") + "..."
}

// Message returns the safe text of an error, with limits on the lengths of lines and on their number.
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

// MaxFaults is the number of faults of one file or directory that an error lists. It counts the others.
const MaxFaults = 20

// Faults collects errors, up to MaxFaults.
type Faults struct {
	list []error
	more int
}

// Add adds a fault, unless it is nil, or only counts it.
func (f *Faults) Add(err error) {
	switch {
	case err == nil:
	case f.Full():
		f.more++
	default:
		f.list = append(f.list, err)
	}
}

// Addf formats a fault, and does what Add does.
func (f *Faults) Addf(format string, args ...any) { f.Add(fmt.Errorf(format, args...)) }

// Full reports whether Faults only counts further faults, so that an expensive search may stop.
func (f *Faults) Full() bool { return len(f.list) >= MaxFaults }

// Err returns all faults as one error, or nil.
func (f *Faults) Err() error {
	if f.more > 0 {
		return errors.Join(append(f.list[:len(f.list):len(f.list)], fmt.Errorf("and %d faults more of these kinds",
			f.more))...)
	}
	return errors.Join(f.list...)
}
