package top

import (
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/clipperhouse/displaywidth"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/progress"
)

const (
	maxLogTail = 64 << 10 // bytes read from the end of a log
	maxLogs    = 64       // logs to read
	maxEvents  = 200
	maxText    = 1000 // bytes kept of an event
)

// Event is a line printed by a launcher.
type Event struct {
	At   time.Time
	Text string
	More bool // continues the previous line, and has its time
}

var stepLine = regexp.MustCompile(`^step \d+(/\d+)?  loss `)

// startLine matches the first line of a start: "--- 2026-11-22T23:43:42.434Z cprun VERSION: COMMAND".
var startLine = regexp.MustCompile(`^--- (\S+) cprun (.*)$`)

// events returns the last lines of the launchers' logs in order of time, without step lines.
func events(logs *os.Root) []Event {
	names, _ := fs.Glob(logs.FS(), "launcher*.log") // the pattern is right
	names = names[:min(len(names), maxLogs)]
	var all []Event
	for _, name := range names {
		all = append(all, parseLog(tail(logs, name))...)
	}
	slices.SortStableFunc(all, func(a, b Event) int { return a.At.Compare(b.At) })
	return all[max(0, len(all)-maxEvents):]
}

// tail returns the end of a log, from the beginning of a line.
func tail(logs *os.Root, name string) string {
	f, err := files.OpenIn(logs, name)
	if err != nil {
		return ""
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	from := max(0, size-maxLogTail)
	text, err := io.ReadAll(io.NewSectionReader(f, from, maxLogTail))
	if err != nil {
		return ""
	}
	s := string(text)
	if from > 0 {
		_, s, _ = strings.Cut(s, "\n")
	}
	return s
}

// parseLog reads the complete lines of a log, without control characters.
func parseLog(text string) (all []Event) {
	last := time.Time{}
	for line := range strings.Lines(text) {
		line, ended := strings.CutSuffix(line, "\n")
		if line = terminal.Clip(terminal.Line(line), maxText); !ended || strings.TrimSpace(line) == "" {
			continue
		}
		if m := startLine.FindStringSubmatch(line); m != nil {
			line = m[1] + " started: " + m[2]
		}
		stamp, rest, _ := strings.Cut(line, " ")
		at, err := time.Parse(progress.Stamp, stamp)
		if err != nil {
			all = append(all, Event{last, line, true})
			continue
		}
		if last = at; !stepLine.MatchString(rest) {
			all = append(all, Event{at, strings.TrimPrefix(rest, "cprun: "), false})
		}
	}
	return all
}

// Style is the style of a part of a line.
type Style int

// The styles. The text is clear without them, for terminals without colours.
const (
	Plain  Style = iota
	Dim          // labels
	Bold         // important figures
	Good         // a healthy run
	Warn         // needs attention
	Bad          // a failed run
	Accent       // curves
)

// Span is a part of a line: Text in one Style.
type Span struct {
	Text  string
	Style Style
}

// Line is one line of the picture.
type Line []Span

// String returns the line without its styles.
func (l Line) String() string {
	var b strings.Builder
	for _, s := range l {
		b.WriteString(s.Text)
	}
	return strings.TrimRight(b.String(), " ")
}

// width returns the number of columns of a text. Some characters take two or none.
func width(s string) int { return displaywidth.String(s) }

func (l Line) width() int {
	n := 0
	for _, s := range l {
		n += width(s.Text)
	}
	return n
}

func (l Line) clip(n int) Line {
	var out Line
	for _, s := range l {
		w := width(s.Text)
		if w > n {
			s.Text = clip(s.Text, n)
			return append(out, s)
		}
		out, n = append(out, s), n-w
	}
	return out
}

// clip shortens s to n columns, ending in ".." if it is longer.
func clip(s string, n int) string {
	if width(s) <= n {
		return s
	}
	tail := ".."
	if n < 6 {
		tail = ""
	}
	return displaywidth.TruncateString(s, max(n, 0), tail)
}

// fill pads or shortens s to n columns, aligned to the right or left.
func fill(s string, n int, right bool) string {
	s = clip(s, n)
	space := strings.Repeat(" ", max(0, n-width(s)))
	if right {
		return space + s
	}
	return s + space
}

type item struct {
	label, text string
	style       Style
}

type items []item

func (all *items) add(shown bool, label, text string, style Style) {
	if shown {
		*all = append(*all, item{label, text, style})
	}
}

// flow arranges items in lines of w columns. The first line begins with name. Without items there is none.
func (all items) flow(name string, w int) []Line {
	if len(all) == 0 {
		return nil
	}
	out := []Line{{{fill(name, nameWidth, false), Dim}}}
	for _, it := range all {
		var part Line
		if it.label != "" {
			part = append(part, Span{it.label + " ", Dim})
		}
		part = append(part, Span{it.text, it.style})
		line := &out[len(out)-1]
		if len(*line) > 1 && line.width()+2+part.width() > w {
			out = append(out, Line{{strings.Repeat(" ", nameWidth), Plain}})
			line = &out[len(out)-1]
		}
		if len(*line) > 1 {
			*line = append(*line, Span{"  ", Plain})
		}
		*line = append(*line, part...)
	}
	return out
}

const nameWidth = 8
