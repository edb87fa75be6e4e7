// Package progress prints the progress of a run: one line that is redrawn in place on a terminal, plain lines
// elsewhere. Printer is the type to know.
//
//	p := progress.New(os.Stderr, progress.Options{Terminal: launch.Terminal(os.Stderr)})
//	defer p.Close()
//	p.Step(progress.Step{Step: 1, Steps: 100, Loss: 5.4})
package progress

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Options select the output.
type Options struct {
	Quiet bool // neither progress nor notes; Write still prints
	// Terminal redraws one line in place. The writer must be a terminal; see launch.Terminal.
	Terminal bool
}

// Printer prints steps. It is an io.Writer for all other output to the same terminal, which appears above the redrawn
// line. Its methods may be called from any goroutine.
type Printer struct {
	w    io.Writer
	opts Options

	mu      sync.Mutex
	line    line // guarded by mu
	last    Step // guarded by mu: the newest drawn step
	partial bool // guarded by mu: the last Write did not end its line

	log     io.Writer // guarded by mu; nil until Log
	before  []byte    // guarded by mu: output before Log
	midLine bool      // guarded by mu: the log's last line has no newline
	logErr  error     // guarded by mu: why the log is incomplete
}

// New returns a printer to w.
func New(w io.Writer, opts Options) *Printer { return &Printer{w: w, opts: opts, line: line{w: w}} }

// Step prints a step.
func (p *Printer) Step(s Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.Line {
		p.note(s.text(true))
	}
	if p.opts.Terminal && !p.opts.Quiet {
		p.draw(s)
	}
}

// Note prints a permanent line, such as the path of a checkpoint, without terminal control characters.
func (p *Printer) Note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.note(terminal.Text(text))
}

// note prints a permanent line. p.mu is held.
func (p *Printer) note(text string) {
	p.record(text + "\n")
	if !p.opts.Quiet {
		p.line.clear()
		fmt.Fprintln(p.w, text)
	}
}

// Write prints b, without terminal control characters, above the progress line. The line returns only with the next
// step, so that the last output stays last.
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

// Close leaves the last step on the terminal, as a line of its own.
func (p *Printer) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last.Line {
		p.line.clear()
	}
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
	p.last = s
	p.line.draw(s.text(false), s.Step, s.Steps)
}

// The bar takes the available width, at most barWidth. besideBar is the width of its frame and percentage.
const (
	barWidth  = 20
	minBar    = 5
	besideBar = 10
)

// A line is a text, and a bar if there is room for one, that is redrawn in place on a terminal.
type line struct {
	w     io.Writer
	drawn bool // the line is on the terminal
}

// draw shows the text and the bar, done of all; all 0: no bar.
func (l *line) draw(text string, done, all int64) {
	width := l.width()
	if len(text) >= width { // a wrapped line cannot be redrawn in place
		text = terminal.Clip(text, max(width-1, 0))
	}
	if wide := min(barWidth, width-len(text)-besideBar); all > 0 && wide >= minBar {
		part := float64(min(done, all)) / float64(all)
		full := int(part * float64(wide))
		text += fmt.Sprintf(" %3d%% |%s%s|", int(100*part), strings.Repeat("█", full), strings.Repeat(" ", wide-full))
	}
	l.drawn = true
	fmt.Fprintf(l.w, "\r\x1b[2K%s", text)
}

func (l *line) clear() {
	if l.drawn {
		fmt.Fprint(l.w, "\r\x1b[2K")
		l.drawn = false
	}
}

// width returns the width of the terminal, 80 if unknown.
func (l *line) width() int {
	if f, ok := l.w.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return 80
}

// Stamp is the time format of a log.
const Stamp = "2006-01-02T15:04:05.000Z"

// maxBefore bounds the output kept for a later log.
const maxBefore = 1 << 20

// Log also writes all output to w, earlier output and Quiet's omissions included: steps as plain lines, each line with
// its time in UTC.
func (p *Printer) Log(w io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.log = w
	_, p.logErr = w.Write(p.before)
	p.before = nil
}

// LogErr returns why the log is incomplete, or nil.
func (p *Printer) LogErr() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.logErr
}

// record writes text to the log. p.mu is held.
func (p *Printer) record(text string) {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !p.midLine {
			b.WriteString(time.Now().UTC().Format(Stamp + " "))
		}
		b.WriteString(line)
		p.midLine = !strings.HasSuffix(line, "\n")
	}
	if p.log == nil {
		if len(p.before)+b.Len() <= maxBefore {
			p.before = append(p.before, b.String()...)
		}
		return
	}
	_, err := io.WriteString(p.log, b.String())
	p.logErr = cmp.Or(p.logErr, err)
}

// Step is the data of a progress event, which a worker sends after an optimizer step.
type Step struct {
	Step            int64   `json:"step"` // counted from 1
	Steps           int64   `json:"steps"`
	Loss            Number  `json:"loss"` // mean over the valid target tokens of the step
	GradNorm        Number  `json:"grad_norm"`
	LR              Number  `json:"lr"`
	TokensPerSecond Number  `json:"tokens_per_second"`  // over all ranks
	ValLoss         *Number `json:"val_loss,omitempty"` // nil without a validation after this step

	Line bool          `json:"line,omitempty"` // print a line that stays
	ETA  time.Duration `json:"eta"`            // until the last step; negative: unknown
}

// Number is a float64 with a JSON form for NaN and infinities, which occur in the loss of a diverging run: a string.
type Number float64

// MarshalText returns the shortest form that reads back as the same number.
func (n Number) MarshalText() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(n), 'g', -1, 64), nil
}

// UnmarshalText parses MarshalText's output.
func (n *Number) UnmarshalText(b []byte) error {
	f, err := strconv.ParseFloat(string(b), 64)
	*n = Number(f)
	return err
}

// text returns a step as one plain line, whose fields are separated by two spaces. The bar leaves room for few of them.
func (s *Step) text(all bool) string {
	parts := []string{"step " + s.count(), "loss " + s.loss(), fmt.Sprintf("grad_norm %.3g", float64(s.GradNorm))}
	if all {
		parts = append(parts, fmt.Sprintf("lr %.1e", float64(s.LR)))
	}
	parts = append(parts, readable.Rate(float64(s.TokensPerSecond)))
	if all && s.ValLoss != nil {
		parts = append(parts, "val_loss "+loss(*s.ValLoss))
	}
	if s.ETA >= 0 {
		parts = append(parts, "eta "+readable.Duration(s.ETA))
	}
	return strings.Join(parts, "  ")
}

func (s *Step) count() string {
	if s.Steps <= 0 {
		return strconv.FormatInt(s.Step, 10)
	}
	return fmt.Sprintf("%d/%d", s.Step, s.Steps)
}

// loss returns the step's loss. A step without targets has no loss and no gradient.
func (s *Step) loss() string {
	if math.IsNaN(float64(s.Loss)) && s.GradNorm == 0 {
		return "none"
	}
	return loss(s.Loss)
}

func loss(n Number) string { return strconv.FormatFloat(float64(n), 'f', 4, 64) }

// Meter prints the progress of a task in bytes: one bar on a terminal, a line from time to time elsewhere. Its methods
// may be called from any goroutine.
type Meter struct {
	mu    sync.Mutex
	line  line // guarded by mu
	opts  Options
	what  string
	total int64
	done  int64 // guarded by mu
	start time.Time
	every time.Duration // least time between two outputs
	next  time.Time     // guarded by mu; of the next output
}

// NewMeter returns a meter for the task named what, of total bytes.
func NewMeter(w io.Writer, opts Options, what string, total int64) *Meter {
	m := &Meter{line: line{w: w}, opts: opts, what: what, total: total, start: time.Now()}
	if m.every = 100 * time.Millisecond; !opts.Terminal {
		m.every = 10 * time.Second
		m.next = m.start.Add(m.every)
	}
	return m
}

// Add reports n more bytes.
func (m *Meter) Add(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done += n
	now := time.Now()
	if m.opts.Quiet || now.Before(m.next) {
		return
	}
	m.next = now.Add(m.every)
	if text := meterLine(m.what, m.done, m.total, now.Sub(m.start)); m.opts.Terminal {
		m.line.draw(text, m.done, m.total)
	} else {
		fmt.Fprintln(m.line.w, text)
	}
}

func meterLine(what string, done, total int64, took time.Duration) string {
	line := fmt.Sprintf("%s %.0f%%  %.1f of %.1f MB", what, 100*float64(done)/float64(max(total, 1)), float64(done)/1e6,
		float64(total)/1e6)
	if s := took.Seconds(); s > 0 && done > 0 {
		line += fmt.Sprintf("  %.1f MB/s  eta %s", float64(done)/1e6/s,
			readable.Duration(time.Duration(float64(took)*float64(max(total-done, 0))/float64(done))))
	}
	return line
}

// Close removes the line from a terminal.
func (m *Meter) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.line.clear()
}
