package progress

import (
	"fmt"
	"io"
	"sync"

	"github.com/cprun/cprun/internal/terminal"
)

// Tally shows how many of a number of things are done, and what is at work: one line that is drawn again
// in place on a terminal, and lines that stay. Its methods may be called from any goroutine.
type Tally struct {
	w    io.Writer
	opts Options

	mu   sync.Mutex
	line line // guarded by mu
}

// NewTally prints to w.
func NewTally(w io.Writer, opts Options) *Tally { return &Tally{w: w, opts: opts, line: line{w: w}} }

// Show draws the line: text, and how many of all are done. Elsewhere than on a terminal it does nothing.
func (t *Tally) Show(done, all int, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.opts.Quiet && t.opts.Terminal {
		t.line.draw(terminal.Text(text), int64(done), int64(all))
	}
}

// Note prints a line that stays, unless it is quiet.
func (t *Tally) Note(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.opts.Quiet {
		t.line.clear()
		fmt.Fprintln(t.w, terminal.Text(text))
	}
}

// Close takes the line away.
func (t *Tally) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line.clear()
}
