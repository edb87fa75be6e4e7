package admission

import (
	"sync"
	"time"
)

const (
	freeLines = 20 // lines that are logged at once, and again after a pause
	linePause = 10 * time.Second
)

// Log limits the rate of lines that strangers cause.
type Log struct {
	print func(format string, args ...any)

	mu    sync.Mutex
	since time.Time // guarded by mu; of the first of these lines
	lines int       // guarded by mu
}

// NewLog returns a log that passes lines to print.
func NewLog(print func(format string, args ...any)) *Log { return &Log{print: print} }

// Printf logs a line, or counts it after too many.
func (l *Log) Printf(format string, args ...any) {
	l.mu.Lock()
	now, hidden := time.Now(), 0
	if now.Sub(l.since) > linePause {
		hidden = max(0, l.lines-freeLines)
		l.since, l.lines = now, 0
	}
	l.lines++
	free := l.lines <= freeLines
	l.mu.Unlock()
	if hidden > 0 {
		l.print("%d more lines were left out", hidden)
	}
	if free {
		l.print(format, args...)
	}
}
