// Package progress shows how far a run has come: one line that is drawn again in place on a
// terminal, plain lines elsewhere.
package progress

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/cprun/cprun/internal/base/readable"
)

// Step is the data of a progress event, which a worker sends after an optimizer step.
type Step struct {
	Step            int64   `json:"step"` // counted from 1
	Steps           int64   `json:"steps"`
	Loss            Number  `json:"loss"` // mean over the valid target tokens of the step
	GradNorm        Number  `json:"grad_norm"`
	LR              Number  `json:"lr"`
	TokensPerSecond Number  `json:"tokens_per_second"`  // over all ranks
	ETASeconds      Number  `json:"eta_seconds"`        // until the last step; negative: not known
	ValLoss         *Number `json:"val_loss,omitempty"` // nil without a validation after this step
}

// Number is a float64 with a JSON form for NaN and infinities, which the loss of a diverging run has.
type Number float64

// MarshalJSON writes a number, or one of the strings "NaN", "+Inf" and "-Inf".
func (n Number) MarshalJSON() ([]byte, error) {
	f := float64(n)
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return json.Marshal(strconv.FormatFloat(f, 'g', -1, 64))
	}
	return json.Marshal(f)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (n *Number) UnmarshalJSON(b []byte) error {
	var f float64
	err := json.Unmarshal(b, &f)
	if err != nil {
		var s string
		if json.Unmarshal(b, &s) != nil || s != "NaN" && s != "+Inf" && s != "-Inf" {
			return fmt.Errorf("number %.40q: %w", b, err)
		}
		f, err = strconv.ParseFloat(s, 64)
	}
	*n = Number(f)
	return err
}

// Line returns a step as one plain line, which scripts can split at two spaces.
func Line(s Step) string {
	parts := []string{
		"step " + count(s), "loss " + s.loss(),
		fmt.Sprintf("grad_norm %.3g", float64(s.GradNorm)), fmt.Sprintf("lr %.1e", float64(s.LR)),
		readable.Rate(float64(s.TokensPerSecond)),
	}
	if s.ValLoss != nil {
		parts = append(parts, "val_loss "+loss(*s.ValLoss))
	}
	if s.ETASeconds >= 0 {
		parts = append(parts, "eta "+readable.Duration(seconds(s.ETASeconds)))
	}
	return strings.Join(parts, "  ")
}

// bar returns the text before the bar on a terminal; it is narrow.
func bar(s Step) string {
	text := fmt.Sprintf("step %s  loss %s  grad_norm %.3g  %s",
		count(s), s.loss(), float64(s.GradNorm), readable.Rate(float64(s.TokensPerSecond)))
	if s.ETASeconds >= 0 {
		text += "  eta " + readable.Duration(seconds(s.ETASeconds))
	}
	return text
}

func count(s Step) string {
	if s.Steps <= 0 {
		return strconv.FormatInt(s.Step, 10)
	}
	return fmt.Sprintf("%d/%d", s.Step, s.Steps)
}

// loss returns the step's loss. A step without targets has none, and no gradient.
func (s *Step) loss() string {
	if math.IsNaN(float64(s.Loss)) && s.GradNorm == 0 {
		return "none"
	}
	return loss(s.Loss)
}

func loss(n Number) string { return strconv.FormatFloat(float64(n), 'f', 4, 64) }

// seconds converts n to a duration, at most the longest one.
func seconds(n Number) time.Duration {
	const most = math.MaxInt64 / int64(time.Second)
	if !(float64(n) < float64(most)) { // NaN too
		return time.Duration(most) * time.Second
	}
	return time.Duration(float64(n) * float64(time.Second))
}

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
