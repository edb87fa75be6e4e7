package gossip

import (
	"bytes"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/terminal"
)

const (
	freeLines = 20 // lines that are logged at once, and again after a pause
	linePause = 10 * time.Second
	maxLine   = 500
)

// seldom logs lines that others can cause as many of as they like.
type seldom struct {
	log func(format string, args ...any)

	mu    sync.Mutex
	since time.Time // guarded by mu; of the first of these lines
	lines int       // guarded by mu
}

// say logs a line, or counts it where there have been too many.
func (s *seldom) say(format string, args ...any) {
	if !s.turn() {
		return
	}
	s.log("gossip: "+format, args...)
}

// turn reports whether a line may be logged, and tells of those that were not.
func (s *seldom) turn() bool {
	s.mu.Lock()
	now, hidden := time.Now(), 0
	if now.Sub(s.since) > linePause {
		hidden = max(0, s.lines-freeLines)
		s.since, s.lines = now, 0
	}
	s.lines++
	free := s.lines <= freeLines
	s.mu.Unlock()
	if hidden > 0 {
		s.log("gossip: %d more lines were left out", hidden)
	}
	return free
}

// logger takes what memberlist logs, a line a call: "[WARN] memberlist: Refuting ...". What it calls
// debugging is left out; names and addresses in a line may be a stranger's.
type logger struct{ to *seldom }

func (l logger) Write(line []byte) (int, error) {
	text := bytes.TrimSpace(line)
	level, rest, ok := bytes.Cut(text, []byte(" "))
	if !ok || bytes.Equal(level, []byte("[DEBUG]")) {
		return len(line), nil
	}
	rest = bytes.TrimPrefix(rest, []byte("memberlist: "))
	if len(rest) > maxLine {
		rest = rest[:maxLine]
	}
	l.to.say("%s", terminal.Line(rest))
	return len(line), nil
}
