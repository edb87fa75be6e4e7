package progress

import (
	"fmt"
	"io"
	"sync"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Options say how to print.
type Options struct {
	Quiet bool // no progress and no notes; what is written with Write still appears
	// Terminal draws one line in place. It needs a writer that is a terminal; launch.Terminal
	// tells.
	Terminal bool
}

// Printer shows steps. It is an io.Writer for all else that goes to the same place, which
// then stands above the line that is drawn again. Its methods may be called from any
// goroutine.
type Printer struct {
	w    io.Writer
	opts Options

	mu      sync.Mutex
	line    line // guarded by mu
	partial bool // guarded by mu: the last Write did not end its line

	log     io.Writer // guarded by mu; nil until Log
	before  []byte    // guarded by mu: what belongs into it and came before it
	midLine bool      // guarded by mu: the log's last line has not ended
	logErr  error     // guarded by mu: why the log is incomplete
}

// New prints to w.
func New(w io.Writer, opts Options) *Printer { return &Printer{w: w, opts: opts, line: line{w: w}} }

// Step shows one.
func (p *Printer) Step(s Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record(Line(s) + "\n")
	switch {
	case p.opts.Quiet:
	case !p.opts.Terminal:
		fmt.Fprintln(p.w, Line(s))
	case s.ValLoss != nil: // it comes seldom and is worth keeping
		p.line.clear()
		fmt.Fprintln(p.w, Line(s))
		p.draw(s)
	default:
		p.draw(s)
	}
}

// Note prints a line that stays, such as where a checkpoint was written, without what a terminal obeys.
func (p *Printer) Note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text = terminal.Text(text)
	p.record(text + "\n")
	if !p.opts.Quiet {
		p.line.clear()
		fmt.Fprintln(p.w, text)
	}
}

// Write puts b, without what a terminal obeys, above the progress line, which comes back with the
// next step only, so that what is written last stays last.
func (p *Printer) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := terminal.Text(string(b))
	p.record(text)
	p.line.clear()
	if len(b) > 0 {
		p.partial = b[len(b)-1] != '\n'
	}
	_, err := io.WriteString(p.w, text)
	return len(b), err
}

// Close leaves the last progress line on the terminal and goes to the next.
func (p *Printer) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.line.drawn {
		fmt.Fprintln(p.w)
		p.line.drawn = false
	}
}

func (p *Printer) draw(s Step) {
	if p.partial {
		fmt.Fprintln(p.w)
		p.partial = false
	}
	p.line.draw(bar(s), s.Step, s.Steps)
}
