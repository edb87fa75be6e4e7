package progress

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// unstamped removes the times of a log, and checks that each line has one.
func unstamped(t *testing.T, log string) string {
	t.Helper()
	stamp := regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z `)
	if n, lines := len(stamp.FindAllString(log, -1)), strings.Count(log, "\n"); n != lines {
		t.Errorf("%d times in %d lines: %q", n, lines, log)
	}
	return stamp.ReplaceAllString(log, "")
}

// TestLog checks that a log has all output, also that before it and what --quiet hides, and reports its first error.
func TestLog(t *testing.T) {
	var out, log strings.Builder
	p := New(&out, Options{Quiet: true})
	p.Note("a \x1b[2Jnote\nof two lines")
	p.Log(&log)
	p.Step(Step{Step: 1, Steps: 2, Loss: 1, Line: true, ETA: -1})
	p.Step(Step{Step: 2, Steps: 2, Loss: 1, ETA: -1})
	p.Write([]byte("half a "))
	p.Write([]byte("line\n"))
	p.Close()
	want := "a note\nof two lines\nstep 1/2  loss 1.0000  grad_norm 0  lr 0.0e+00  0.0 tok/s\nhalf a line\n"
	if got := unstamped(t, log.String()); got != want || out.String() != "half a line\n" || p.LogErr() != nil {
		t.Errorf("log %q, want %q; output %q, %v", got, want, out.String(), p.LogErr())
	}
	p = New(&out, Options{Quiet: true})
	p.Note(strings.Repeat("x", maxBefore-1-len(Stamp+" ")))
	p.Note("more than is kept")
	log.Reset()
	p.Log(&log)
	if got := log.Len(); got != maxBefore {
		t.Errorf("%d bytes of earlier output, want %d", got, maxBefore)
	}
	p = New(&out, Options{})
	p.Log(failing("first"))
	if err := p.LogErr(); err == nil || err.Error() != "first" {
		t.Errorf("error %v", err)
	}
	p.log = failing("second")
	if p.Note("x"); p.LogErr().Error() != "first" {
		t.Errorf("error %v", p.LogErr())
	}
	p.logErr = nil
	if p.Note("x"); p.LogErr() == nil {
		t.Error("a failed write is not reported")
	}
}

type failing string

func (f failing) Write([]byte) (int, error) { return 0, errors.New(string(f)) }

// TestLastStepIsOnTheTerminalOnce checks that Close leaves the last step, and does not repeat a line that stays.
func TestLastStepIsOnTheTerminalOnce(t *testing.T) {
	for _, stays := range []bool{true, false} {
		var b strings.Builder
		p := New(&b, Options{Terminal: true})
		p.Step(Step{Step: 1, Steps: 2, ETA: -1})
		p.Step(Step{Step: 2, Steps: 2, Line: stays, ETA: -1})
		p.Close()
		if got := screen(b.String()); len(got) != 2 || !strings.HasPrefix(got[0], "step 2/2") || got[1] != "" {
			t.Errorf("stays %v: the screen is %q", stays, got)
		}
	}
}

// TestTerminalLines checks the lines around the redrawn one.
func TestTerminalLines(t *testing.T) {
	var b strings.Builder
	p := New(&b, Options{Terminal: true})
	val := Number(2)
	p.Step(Step{Step: 1, Steps: 2, Loss: 3, ETA: -1})
	p.Step(Step{Step: 2, Steps: 2, Loss: 3, ValLoss: &val, Line: true, ETA: -1})
	bar := "step 2/2  loss 3.0000  grad_norm 0  0.0 tok/s 100%"
	if got := screen(b.String()); len(got) != 2 || !strings.HasPrefix(got[1], bar) {
		t.Errorf("the screen is %q", got)
	}
	p.Note("\x1b[31mred\x1b[0m")
	p.Write([]byte("no newline"))
	p.Write(nil)
	p.Step(Step{Step: 2, Loss: 1, ETA: -1})
	p.Step(Step{Step: 3, Loss: 1, ETA: -1})
	p.Close()
	p.Close()
	want := []string{"step 2/2  loss 3.0000  grad_norm 0  lr 0.0e+00  0.0 tok/s  val_loss 2.0000", "red", "no newline",
		"step 3  loss 1.0000  grad_norm 0  0.0 tok/s", ""}
	if got := screen(b.String()); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the screen is %q, want %q", got, want)
	}
}

// TestLinesFit checks that a redrawn line never wraps. The width is 80 if the output is no terminal.
func TestLinesFit(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := line{w: f}
	for n := range 100 {
		l.draw(strings.Repeat("x", n), 1, 2)
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		text = text[strings.LastIndex(string(text), "\r")+len("\r\x1b[2K"):]
		bar := strings.Contains(string(text), "| ") || strings.Contains(string(text), "█")
		if width := len([]rune(string(text))); width > 79 || bar != (n <= 80-besideBar-minBar) {
			t.Errorf("%d bytes: %d columns, bar %t: %s", n, width, bar, text)
		}
	}
}

// TestMeterReportsNowAndThen checks the output of a meter over time, outside a terminal and on one.
func TestMeterReportsNowAndThen(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var b strings.Builder
			m := NewMeter(&b, Options{Terminal: terminal}, "tokenize", 40e6)
			for range 30 {
				m.Add(1e6)
				time.Sleep(time.Second)
			}
			m.Close()
			got := strings.Join(screen(b.String()), "\n")
			want := "tokenize 28%  11.0 of 40.0 MB  1.1 MB/s  eta 26s\ntokenize 52%  21.0 of 40.0 MB  1.1 MB/s  eta 18s\n"
			if n := strings.Count(b.String(), "tokenize"); terminal && (n != 30 || got != "") || !terminal && got != want {
				t.Errorf("terminal %t: %d outputs, %q, want %q", terminal, n, got, want)
			}
		})
	}
}
