package progress

import (
	"io"
	"strings"
	"time"
)

// Stamp is how a log has the time.
const Stamp = "2006-01-02T15:04:05.000Z"

// maxBefore is how much is kept for a log that is not there yet.
const maxBefore = 1 << 20

// Log has everything that is printed, and what Quiet leaves out, written to w too, with what came
// before: steps as plain lines, each line with its time in UTC.
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

// record puts text into the log. p.mu is held.
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
	if _, err := io.WriteString(p.log, b.String()); err != nil && p.logErr == nil {
		p.logErr = err
	}
}
