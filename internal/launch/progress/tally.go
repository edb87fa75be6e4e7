package progress

import (
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/cprun/cprun/internal/terminal"
)

// Tally shows how many of a number of things are done, and what is at work: one line that is drawn again
// in place on a terminal, and lines that stay. Its methods may be called from any goroutine.
type Tally struct {
	w    io.Writer
	opts Options

	mu    sync.Mutex
	bar   *progressbar.ProgressBar // guarded by mu; nil before it is drawn
	all   int                      // guarded by mu: of bar
	wide  int                      // guarded by mu: its width
	drawn bool                     // guarded by mu: the line stands on the terminal
}

// NewTally prints to w.
func NewTally(w io.Writer, opts Options) *Tally { return &Tally{w: w, opts: opts} }

// Show draws the line: text, and how many of all are done. Elsewhere than on a terminal it does nothing.
func (t *Tally) Show(done, all int, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.opts.Quiet || !t.opts.Terminal {
		return
	}
	text = terminal.Text(text)
	width := t.width()
	if len(text) >= width {
		text = terminal.Clip(text, max(width-1, 0))
	}
	t.drawn = true
	wide := min(barWidth, (width-len(text)-besideBar)/barStep*barStep)
	if wide < barStep {
		fmt.Fprintf(t.w, "\r\x1b[2K%s", text)
		return
	}
	if t.bar == nil || t.wide != wide || t.all != all {
		t.wide, t.all = wide, all
		t.bar = progressbar.NewOptions64(int64(all),
			progressbar.OptionSetWriter(t.w), progressbar.OptionUseANSICodes(true), progressbar.OptionSetWidth(wide),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(false), progressbar.OptionSetRenderBlankState(false),
		)
	}
	t.bar.Describe(text)
	t.bar.Set(min(done, all))
}

// Note prints a line that stays, unless it is quiet.
func (t *Tally) Note(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.opts.Quiet {
		t.clear()
		fmt.Fprintln(t.w, terminal.Text(text))
	}
}

// Close takes the line away.
func (t *Tally) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clear()
}

func (t *Tally) clear() {
	if t.drawn {
		fmt.Fprint(t.w, "\r\x1b[2K")
		t.drawn = false
	}
}

// width is that of the terminal, 80 where it cannot be asked.
func (t *Tally) width() int {
	if f, ok := t.w.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return 80
}
