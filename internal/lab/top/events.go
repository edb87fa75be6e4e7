package top

import (
	"io"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/progress"
)

const (
	maxLogTail = 64 << 10 // bytes of the end of a log that are read
	maxLogs    = 64       // launchers whose logs are read
	maxEvents  = 200
	maxText    = 1000 // bytes of an event that are kept
)

// Event is a line that a launcher has printed.
type Event struct {
	At   time.Time // zero: the line belongs to the one before
	Text string
}

// stepLine are the lines of steps, which the curves show.
var stepLine = regexp.MustCompile(`^step \d+(/\d+)?  loss `)

// startLine begins what one start has printed: "--- 2026-11-22T23:43:42.434Z cprun VERSION: COMMAND".
var startLine = regexp.MustCompile(`^--- (\S+) cprun (.*)$`)

// events returns the last lines of the launchers' logs, in order of time, without those of steps.
func events(logs *os.Root) []Event {
	names, err := launcherLogs(logs)
	if err != nil {
		return nil
	}
	var all []Event
	for _, name := range names {
		all = append(all, parseLog(tail(logs, name))...)
	}
	if len(names) > 1 {
		all = inOrder(all)
	}
	return all[max(0, len(all)-maxEvents):]
}

// launcherLogs returns the names of the logs.
func launcherLogs(logs *os.Root) ([]string, error) {
	dir, err := logs.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(s string) bool {
		ok, _ := path.Match("launcher*.log", s)
		return !ok
	})
	slices.Sort(names)
	return names[:min(len(names), maxLogs)], nil
}

// inOrder sorts events by time, with the lines that belong to one behind it.
func inOrder(all []Event) []Event {
	type block struct{ from, to int }
	var blocks []block
	for i, e := range all {
		if i == 0 || !e.At.IsZero() {
			blocks = append(blocks, block{i, i})
		}
		blocks[len(blocks)-1].to = i + 1
	}
	slices.SortStableFunc(blocks, func(a, b block) int { return all[a.from].At.Compare(all[b.from].At) })
	out := make([]Event, 0, len(all))
	for _, b := range blocks {
		out = append(out, all[b.from:b.to]...)
	}
	return out
}

// tail returns the end of a log, from the beginning of a line.
func tail(logs *os.Root, name string) string {
	f, err := files.OpenIn(logs, name)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	from := max(0, st.Size()-maxLogTail)
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return ""
	}
	text, err := io.ReadAll(io.LimitReader(f, maxLogTail))
	if err != nil {
		return ""
	}
	if s := string(text); from == 0 {
		return s
	} else if _, rest, ok := strings.Cut(s, "\n"); ok {
		return rest
	}
	return ""
}

// parseLog reads the lines of a log that have an end, and makes them fit to be shown.
func parseLog(text string) (all []Event) {
	for line := range strings.Lines(text) {
		line, ended := strings.CutSuffix(line, "\n")
		if line = terminal.Clip(string(terminal.Line([]byte(line))), maxText); !ended || strings.TrimSpace(line) == "" {
			continue
		}
		if m := startLine.FindStringSubmatch(line); m != nil {
			if at, err := time.Parse(progress.Stamp, m[1]); err == nil {
				all = append(all, Event{at, "started: " + m[2]})
				continue
			}
		}
		stamp, rest, _ := strings.Cut(line, " ")
		at, err := time.Parse(progress.Stamp, stamp)
		switch {
		case err != nil:
			all = append(all, Event{Text: line})
		case !stepLine.MatchString(rest):
			all = append(all, Event{at, strings.TrimPrefix(rest, "cprun: ")})
		}
	}
	return all
}
