package progress

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/cprun/cprun/internal/base/readable"
)

// Meter shows how much of a number of bytes is done: one bar on a terminal, a line now and then
// elsewhere. Its methods may be called from any goroutine.
type Meter struct {
	mu    sync.Mutex
	w     io.Writer
	opts  Options
	what  string
	total int64
	done  int64     // guarded by mu
	start time.Time // guarded by mu, like next
	next  time.Time
	bar   *progressbar.ProgressBar
}

// meterEvery is the time between two lines where there is no terminal.
const meterEvery = 10 * time.Second

// NewMeter shows that what is being done, to total bytes.
func NewMeter(w io.Writer, opts Options, what string, total int64) *Meter {
	m := &Meter{w: w, opts: opts, what: what, total: total, start: time.Now()}
	m.next = m.start.Add(meterEvery)
	if opts.Terminal && !opts.Quiet {
		m.bar = progressbar.NewOptions64(total,
			progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(what), progressbar.OptionShowBytes(true),
			progressbar.OptionUseANSICodes(true), progressbar.OptionSetWidth(barWidth),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish(),
		)
	}
	return m
}

// Add notes that n more bytes are done.
func (m *Meter) Add(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done += n
	switch now := time.Now(); {
	case m.opts.Quiet:
	case m.bar != nil:
		m.bar.Set64(min(m.done, m.total))
	case now.After(m.next):
		m.next = now.Add(meterEvery)
		fmt.Fprintln(m.w, MeterLine(m.what, m.done, m.total, now.Sub(m.start)))
	}
}

// MeterLine returns how much is done as one line.
func MeterLine(what string, done, total int64, took time.Duration) string {
	line := fmt.Sprintf("%s %.0f%%  %.1f of %.1f MB", what, 100*float64(done)/float64(max(total, 1)), float64(done)/1e6,
		float64(total)/1e6)
	if s := took.Seconds(); s > 0 && done > 0 {
		line += fmt.Sprintf("  %.1f MB/s  eta %s", float64(done)/1e6/s,
			readable.Duration(time.Duration(float64(took)*float64(max(total-done, 0))/float64(done))))
	}
	return line
}

// Close takes the bar away.
func (m *Meter) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bar != nil {
		m.bar.Clear()
	}
}
