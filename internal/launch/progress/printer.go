package progress

import (
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// Options say how to print.
type Options struct {
	Quiet bool // no progress and no notes; what is written with Write still appears
	// Terminal draws one line in place. It needs a writer that is a terminal; launch.Terminal
	// tells.
	Terminal bool
}

// barWidth is what the bar itself takes where there is room for it.
const barWidth = 20

// Printer shows steps. It is an io.Writer for all else that goes to the same place, which
// then stands above the line that is drawn again. Its methods may be called from any
// goroutine.
type Printer struct {
	w    io.Writer
	opts Options

	mu      sync.Mutex
	bar     *progressbar.ProgressBar // guarded by mu; nil before the first step
	steps   int64                    // guarded by mu: of bar
	drawn   bool                     // guarded by mu: the line stands on the terminal
	partial bool                     // guarded by mu: the last Write did not end its line
}

// New prints to w.
func New(w io.Writer, opts Options) *Printer { return &Printer{w: w, opts: opts} }

// Step shows one.
func (p *Printer) Step(s Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.opts.Quiet:
	case !p.opts.Terminal:
		fmt.Fprintln(p.w, Line(s))
	case s.ValLoss != nil: // it comes seldom and is worth keeping
		p.clear()
		fmt.Fprintln(p.w, Line(s))
		p.draw(s)
	default:
		p.draw(s)
	}
}

// Note is a line that stays, such as where a checkpoint was written.
func (p *Printer) Note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.opts.Quiet {
		p.clear()
		fmt.Fprintln(p.w, text)
	}
}

// Write puts b above the progress line, which comes back with the next step only, so that
// what is written last stays last.
func (p *Printer) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	if len(b) > 0 {
		p.partial = b[len(b)-1] != '\n'
	}
	return p.w.Write(b)
}

// Close leaves the last progress line on the terminal and goes to the next.
func (p *Printer) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.drawn {
		fmt.Fprintln(p.w)
		p.drawn = false
	}
}

func (p *Printer) draw(s Step) {
	text, width := bar(s), p.width()
	if width > 0 && len(text) >= width { // a line that wraps cannot be drawn again in place
		text = text[:max(width-1, 0)]
	}
	if p.partial {
		fmt.Fprintln(p.w)
		p.partial = false
	}
	p.drawn = true
	if s.Steps <= 0 || width < len(text)+barWidth+10 {
		fmt.Fprintf(p.w, "\r\x1b[2K%s", text)
		return
	}
	if p.bar == nil || p.steps != s.Steps {
		p.steps = s.Steps
		p.bar = progressbar.NewOptions64(s.Steps,
			progressbar.OptionSetWriter(p.w),
			progressbar.OptionUseANSICodes(true),
			progressbar.OptionSetWidth(barWidth),
			progressbar.OptionSetPredictTime(false), // the ETA of the step is the better one
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionSetRenderBlankState(false),
		)
	}
	p.bar.Describe(text)
	p.bar.Set64(min(s.Step, s.Steps))
}

// clear takes the progress line away.
func (p *Printer) clear() {
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[2K")
		p.drawn = false
	}
}

// width is that of the terminal, 80 where it cannot be asked.
func (p *Printer) width() int {
	if f, ok := p.w.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return 80
}
