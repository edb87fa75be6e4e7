package progress

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
)

func TestLine(t *testing.T) {
	val := Number(2.5)
	for _, c := range []struct {
		step Step
		want string
	}{
		{Step{Step: 20, Steps: 300, Loss: 3.12341, GradNorm: 0.8104, LR: 3e-4, TokensPerSecond: 5312.4, ETA: 83 * time.Second},
			"step 20/300  loss 3.1234  grad_norm 0.81  lr 3.0e-04  5,312 tok/s  eta 1m23s"},
		{Step{Step: 300, Steps: 300, Loss: 1, GradNorm: 12345, LR: 0, TokensPerSecond: 7.25, ETA: 0,
			ValLoss: &val},
			"step 300/300  loss 1.0000  grad_norm 1.23e+04  lr 0.0e+00  7.2 tok/s  val_loss 2.5000  eta 0s"},
		{Step{Step: 1, Loss: Number(math.NaN()), GradNorm: Number(math.Inf(1)),
			TokensPerSecond: Number(math.NaN()), ETA: -1},
			"step 1  loss NaN  grad_norm +Inf  lr 0.0e+00  ? tok/s"},
		// without targets
		{Step{Step: 1, Loss: Number(math.NaN()), ETA: -1},
			"step 1  loss none  grad_norm 0  lr 0.0e+00  0.0 tok/s"},
	} {
		if got := c.step.text(true); got != c.want {
			t.Errorf("%+v\n got %q\nwant %q", c.step, got, c.want)
		}
	}
}

func TestStepJSON(t *testing.T) {
	in := Step{Step: 3, Steps: 4, Loss: Number(math.NaN()), GradNorm: Number(math.Inf(-1)), LR: 0.1}
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out Step
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatal(err)
	}
	if !math.IsNaN(float64(out.Loss)) || out.GradNorm != in.GradNorm || out.LR != in.LR || out.Step != 3 {
		t.Errorf("%s became %+v", b, out)
	}
	for _, bad := range []string{`{"loss":"no"}`, `{"loss":"1.5 "}`, `{"loss":[]}`} {
		if err := json.Unmarshal([]byte(bad), &out); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func TestPrinterPlain(t *testing.T) {
	var b strings.Builder
	p := New(&b, Options{})
	p.Step(Step{Step: 1, Steps: 2, Loss: 1, Line: true, ETA: 4 * time.Second})
	p.Step(Step{Step: 2, Steps: 2, Loss: 1, ETA: 4 * time.Second})
	p.Note("checkpoint at step 1")
	p.Write([]byte("[rank 0] hello\n"))
	p.Close()
	want := "step 1/2  loss 1.0000  grad_norm 0  lr 0.0e+00  0.0 tok/s  eta 4s\ncheckpoint at step 1\n[rank 0] hello\n"
	if b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

func TestPrinterQuiet(t *testing.T) {
	var b strings.Builder
	p := New(&b, Options{Quiet: true, Terminal: true})
	p.Step(Step{Step: 1, Steps: 2, Line: true})
	p.Note("checkpoint")
	p.Write([]byte("cprun: rank 2 failed\n"))
	p.Close()
	if want := "cprun: rank 2 failed\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

// TestPrinterTerminal checks the screen after each call, so the test emulates the terminal.
func TestPrinterTerminal(t *testing.T) {
	var b strings.Builder
	p := New(&b, Options{Terminal: true})
	p.Step(Step{Step: 1, Steps: 2, Loss: 3, TokensPerSecond: 100, ETA: 9 * time.Second})
	p.Note("a checkpoint")
	p.Step(Step{Step: 2, Steps: 2, Loss: 2.5, TokensPerSecond: 100, ETA: 0})
	if got := screen(b.String()); len(got) != 2 || got[0] != "a checkpoint" ||
		!strings.HasPrefix(got[1], "step 2/2  loss 2.5000  grad_norm 0  100 tok/s  eta 0s") {
		t.Errorf("screen is %q", got)
	}
	p.Write([]byte("cprun: rank 1 failed\n"))
	p.Close()
	got := screen(b.String())
	if len(got) != 3 || got[1] != "cprun: rank 1 failed" || got[2] != "" {
		t.Errorf("screen is %q", got)
	}
}

func TestPrinterTerminalManySteps(t *testing.T) {
	var b strings.Builder
	p := New(&b, Options{Terminal: true})
	for i := range int64(3) { // all at the same percentage
		p.Step(Step{Step: 50001 + i, Steps: 100000, Loss: Number(i), ETA: -1})
	}
	got := screen(b.String())
	if len(got) != 1 || !strings.HasPrefix(got[0], "step 50003/100000  loss 2.0000") ||
		!strings.Contains(got[0], "50%") {
		t.Errorf("screen is %q", got)
	}
	p.Step(Step{Step: 2, Steps: 3, Loss: 1, ETA: -1}) // another run on the same printer
	if got := screen(b.String()); len(got) != 1 || !strings.HasPrefix(got[0], "step 2/3 ") ||
		!strings.Contains(got[0], "66%") {
		t.Errorf("screen is %q", got)
	}
}

// screen emulates carriage return, newline and "erase line", the only control characters that the printer uses.
func screen(s string) []string {
	lines, col := [][]rune{nil}, 0
	for len(s) > 0 {
		last := len(lines) - 1
		if rest, ok := strings.CutPrefix(s, "\x1b[2K"); ok {
			lines[last], s = nil, rest
			continue
		}
		r := []rune(s)[0]
		s = s[len(string(r)):]
		switch r {
		case '\r':
			col = 0
		case '\n':
			lines, col = append(lines, nil), 0
		default:
			for len(lines[last]) <= col {
				lines[last] = append(lines[last], ' ')
			}
			lines[last][col] = r
			col++
		}
	}
	var out []string
	for _, l := range lines {
		out = append(out, strings.TrimRight(string(l), " "))
	}
	return out
}

func TestMeterLines(t *testing.T) {
	for want, line := range map[string]string{
		"tokenize 25%  1.0 of 4.0 MB  0.5 MB/s  eta 6s": meterLine("tokenize", 1e6, 4e6, 2*time.Second),
		"tokenize 0%  0.0 of 0.0 MB":                    meterLine("tokenize", 0, 0, time.Second),
		"tokenize 100%  4.0 of 4.0 MB":                  meterLine("tokenize", 4e6, 4e6, 0),
	} {
		if line != want {
			t.Errorf("%q, want %q", line, want)
		}
	}
}

// TestMetersAreQuiet checks that a meter writes nothing if quiet or done at once, and removes its bar.
func TestMetersAreQuiet(t *testing.T) {
	var b strings.Builder
	for _, o := range []Options{{}, {Quiet: true}, {Quiet: true, Terminal: true}} {
		m := NewMeter(&b, o, "x", 10)
		m.Add(10)
		m.Close()
	}
	if b.Len() > 0 {
		t.Errorf("%q", b.String())
	}
	m := NewMeter(&b, Options{Terminal: true}, "x", 10)
	m.Add(4)
	m.Add(20) // the file has grown
	m.Close()
	if !strings.Contains(b.String(), "x") {
		t.Errorf("%q", b.String())
	}
}
