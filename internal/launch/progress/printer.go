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

// Options say how to print.
type Options struct {
	Quiet bool // no progress and no notes; what is written with Write still appears
	// Terminal draws one line in place. It needs a writer that is a terminal; launch.Terminal
	// tells.
	Terminal bool
}

// The bar itself is as wide as there is room for, in steps, so that it is seldom made anew; besideBar
// is what its frame and percentage take.
const (
	barWidth  = 20
	barStep   = 5
	besideBar = 10
)

// Printer shows steps. It is an io.Writer for all else that goes to the same place, which
// then stands above the line that is drawn again. Its methods may be called from any
// goroutine.
type Printer struct {
	w    io.Writer
	opts Options

	mu      sync.Mutex
	bar     *progressbar.ProgressBar // guarded by mu; nil before the first step
	steps   int64                    // guarded by mu: of bar
	wide    int                      // guarded by mu: its width
	drawn   bool                     // guarded by mu: the line stands on the terminal
	partial bool                     // guarded by mu: the last Write did not end its line

	log     io.Writer // guarded by mu; nil until Log
	before  []byte    // guarded by mu: what belongs into it and came before it
	midLine bool      // guarded by mu: the log's last line has not ended
	logErr  error     // guarded by mu: why the log is incomplete
}

// New prints to w.
func New(w io.Writer, opts Options) *Printer { return &Printer{w: w, opts: opts} }

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
		p.clear()
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
		p.clear()
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
	p.clear()
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
	wide := min(barWidth, (width-len(text)-besideBar)/barStep*barStep)
	if s.Steps <= 0 || wide < barStep {
		fmt.Fprintf(p.w, "\r\x1b[2K%s", text)
		return
	}
	if p.bar == nil || p.steps != s.Steps || p.wide != wide {
		p.steps, p.wide = s.Steps, wide
		p.bar = progressbar.NewOptions64(s.Steps,
			progressbar.OptionSetWriter(p.w),
			progressbar.OptionUseANSICodes(true),
			progressbar.OptionSetWidth(wide),
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
