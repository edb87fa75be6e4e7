package top

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch/waits"
	"github.com/cprun/cprun/internal/model/metrics"
)

var update = flag.Bool("update", false, "write the expected pictures anew")

func TestMain(m *testing.M) {
	os.Setenv("TERM", "xterm-256color")
	os.Setenv("LC_ALL", "C.UTF-8")
	goleak.VerifyTestMain(m)
}

// noon is the time of all readings in tests.
var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// A run is a run directory of a test.
type run struct {
	testing.TB
	dir string
}

func newRun(t testing.TB) run {
	t.Helper()
	r := run{t, filepath.Join(t.TempDir(), "opticks-20261122-115800")}
	must.Do(t, os.MkdirAll(filepath.Join(r.dir, "logs"), 0o700))
	return r
}

// write writes a file of the run.
func (r run) write(name, text string) {
	r.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
		r.Fatal(err)
	}
}

// add appends to a file of the run.
func (r run) add(name, text string) {
	r.Helper()
	f, err := os.OpenFile(filepath.Join(r.dir, name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		r.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		r.Fatal(err)
	}
}

// tell writes a node's status.
func (r run) tell(n status.Node) {
	r.Helper()
	logs, err := os.OpenRoot(filepath.Join(r.dir, "logs"))
	if err != nil {
		r.Fatal(err)
	}
	defer logs.Close()
	n.Version = status.Version
	if err := status.Write(logs, &n); err != nil {
		r.Fatal(err)
	}
}

// source opens the run.
func (r run) source() *Source {
	r.Helper()
	s, err := Open(r.dir)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { s.Close() })
	s.host = "here"
	return s
}

const trainYAML = `
model: {vocab_size: 256, hidden_size: 128, intermediate_size: 344, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2}
data: {path: x.txt, seq_len: 1K}
train: {steps: 300}
`

// line returns a line of metrics.jsonl.
func line(step int64) string {
	x := float64(step)
	s := metrics.Step{
		Time: metrics.Time(noon.Add(time.Duration(step-150) * 200 * time.Millisecond)), Step: step,
		Epoch: metrics.Float(x / 420), Loss: metrics.Float(2 + 3.5*math.Exp(-x/25) + 0.1*math.Sin(x)),
		GradNorm: 0.81, LR: 3e-4, Tokens: 1024 * step, StepSeconds: 0.25, TokensPerSecond: metrics.Float(4000 +
			100*math.Cos(x)), TokensPerSecondPerDevice: 1000,
		TFLOPsPerDevice: 0.0036, MFU: metrics.Absent, MemoryBytes: 46 << 20, CommWaitSeconds: 0.05,
		AttentionImbalance: 1, AttentionBytes: 2e6,
	}
	if step%100 == 0 {
		v := metrics.Float(2.5)
		s.ValLoss = &v
	}
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(text) + "\n"
}

// node returns the status of a node with two ranks.
func node(rank int) status.Node {
	n := status.Node{
		RunID: "a", Host: fmt.Sprintf("node-%c", 'a'+rank), PID: 4711 + rank, Rank: rank, FirstRank: 2 * rank, Ranks: 2,
		WorldSize: 4, Every: 1,
		Begun: noon.Add(-2 * time.Minute), Written: noon.Add(-time.Second), State: status.Running, Start: 1,
	}
	for i := range 2 {
		r := status.Row{Resident: int64(38+i) << 20, WaitState: waits.WaitState{Rank: 2*rank + i, Host: n.Host,
			PID: 5000 + 2*rank + i, Step: 150, Phase: "step"}}
		if r.Rank == 2 {
			r.State = "is stopped by a signal or a debugger"
		} else {
			peer := 2
			if r.Rank == 0 {
				peer = 1
			}
			r.Waits = []waits.Wait{{
				Op: "exchange", Label: "step 151/backward/layer 1/hop 2 owner 1", Bytes: 3200, Stalled: 3 * time.Second,
				Open: []waits.Open{{Peer: peer, Bytes: 3200}},
			}}
		}
		n.Rows = append(n.Rows, r)
	}
	return n
}

// example creates a half-done run on two nodes, with one rank stopped.
func example(t *testing.T) run {
	r := newRun(t)
	r.write("config.yaml", trainYAML)
	for step := range int64(150) {
		r.add("metrics.jsonl", line(step+1))
	}
	for i := range 2 {
		r.tell(node(i))
	}
	must.Do(t, os.Mkdir(filepath.Join(r.dir, "checkpoints"), 0o755))
	r.write("checkpoints/latest", "step-00000100\n")
	r.write("logs/launcher.log", `--- 2026-11-22T11:58:00.000Z cprun v1: cprun --nnodes 2 --nproc 2 `+
		`examples/opticks.yaml
2026-11-22T11:58:00.100Z run directory runs/opticks-20261122-115800
2026-11-22T11:58:10.000Z step 10/300  loss 3.1234  grad_norm 0.81  lr 3.0e-04  4,012 tok/s  eta 1m23s
2026-11-22T11:58:50.000Z cprun: rank 3 failed on host node-b (pid 77): killed by SIGKILL
  at:    step 98, backward
2026-11-22T11:58:50.100Z cprun: restart 1 of 3
2026-11-22T11:59:20.000Z checkpoint of step 100: saved in 0.1 s (training paused for 0.1 s)
`)
	r.write("logs/launcher-0001.log", "--- 2026-11-22T11:58:00.050Z cprun v1: cprun --nnodes 2 --nproc 2 "+
		"examples/opticks.yaml\n2026-11-22T11:59:00.000Z \x1b[31mred\x1b[0m text of a rank\n")
	return r
}

// Pictures at four widths, on terminals of the picture's height or less.
func TestLayout(t *testing.T) {
	for _, size := range [][2]int{{60, 34}, {80, 24}, {120, 40}, {200, 50}} {
		t.Run(fmt.Sprint(size[0]), func(t *testing.T) {
			v := example(t).source().Look(noon)
			var b bytes.Buffer
			lines := Layout(v, size[0], size[1], Look{Zone: time.UTC, Keys: true})
			for _, l := range lines {
				fmt.Fprintln(&b, l)
				if w := l.width(); w > size[0] {
					t.Errorf("%d columns: %s", w, l)
				}
			}
			if len(lines) != size[1] {
				t.Errorf("%d lines, want %d", len(lines), size[1])
			}
			golden(t, fmt.Sprintf("layout-%d.txt", size[0]), b.Bytes())
		})
	}
}

// golden compares a picture with a file.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		must.Do(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v; with -update %s becomes\n%s", err, path, got)
	}
}

// At all sizes, no picture exceeds its terminal, and none contains control characters.
func TestLayoutFitsAnySize(t *testing.T) {
	t.Parallel()
	v := example(t).source().Look(noon)
	v.Faults = []string{strings.Repeat("wide 中文 ", 40)}
	for w := minWidth; w <= 200; w += 3 {
		for _, h := range []int{1, 2, 5, 10, 17, 24, 33, 80} {
			for _, look := range []Look{{Keys: true}, {Plain: true, Scroll: 99}} {
				lines := Layout(v, w, h, look)
				if len(lines) > h {
					t.Errorf("%d by %d: %d lines", w, h, len(lines))
				}
				for _, l := range lines {
					if l.width() > w || strings.ContainsAny(l.String(), "\x1b\n\t\r") {
						t.Errorf("%d by %d: %q", w, h, l)
					}
				}
			}
		}
	}
}

func TestManyRanksAreScrolled(t *testing.T) {
	r := newRun(t)
	r.write("config.yaml", trainYAML)
	n := status.Node{RunID: "a", Host: "x", Ranks: 64, WorldSize: 64, Every: 1, Written: noon, State: status.Running}
	for i := range 64 {
		n.Rows = append(n.Rows, status.Row{WaitState: waits.WaitState{Rank: i, Step: 1, Phase: "step"}})
	}
	r.tell(n)
	v := r.source().Look(noon)
	text := ""
	for _, l := range Layout(v, 80, 24, Look{Scroll: 50, Keys: true}) {
		text += l.String() + "\n"
	}
	if !strings.Contains(text, "64 ranks, ") || !strings.Contains(text, " to 63\n") || !strings.Contains(text,
		"\n  63  ") || strings.Contains(text, "\n   0  ") {
		t.Errorf("\n%s", text)
	}
}

// The state of a run follows from the status of its launchers, written with the clocks of other hosts.
func TestStates(t *testing.T) {
	at := func(change func(n *status.Node)) func(r run) {
		return func(r run) {
			r.write("config.yaml", trainYAML)
			n := node(0)
			n.Start = 0
			change(&n)
			r.tell(n)
		}
	}
	for name, c := range map[string]struct {
		make func(r run)
		want State
		text string
	}{
		"empty":    {func(run) {}, NotStarted, "no run"},
		"no word":  {func(r run) { r.write("config.yaml", trainYAML) }, Unknown, "logs"},
		"metrics":  {func(r run) { r.write("metrics.jsonl", line(3)) }, Unknown, "state unknown"},
		"running":  {at(func(n *status.Node) {}), Running, "running"},
		"starting": {at(func(n *status.Node) { n.Rows = nil }), Starting, "starting"},
		"on its way": {at(func(n *status.Node) { n.Rows[0].State, n.Rows[1].State = "starts", "starts" }), Starting,
			"starting"},
		"between":    {at(func(n *status.Node) { n.Rows, n.Start = nil, 2 }), Between, "restarts 2"},
		"silent":     {at(func(n *status.Node) { n.Written = noon.Add(-time.Minute) }), Silent, "silent for 1m00s"},
		"late":       {at(func(n *status.Node) { n.Written = noon.Add(-10 * time.Second) }), Running, ""},
		"fast clock": {at(func(n *status.Node) { n.Written = noon.Add(time.Hour) }), Running, ""},
		"dead": {at(func(n *status.Node) {
			n.Host, n.PID, n.Written = "here", 1<<22+1,
				noon.Add(-5*time.Second)
		}), Dead, "for 5s"},
		"alive": {at(func(n *status.Node) {
			n.Host, n.PID, n.Written = "here", os.Getpid(),
				noon.Add(-5*time.Second)
		}), Running, ""},
		"done":    {at(func(n *status.Node) { n.State = status.Ended }), Done, "done"},
		"stopped": {at(func(n *status.Node) { n.State, n.ExitCode = status.Ended, 75 }), Stopped, "stopped"},
		"interrupted": {at(func(n *status.Node) { n.State, n.ExitCode = status.Ended, 130 }), Interrupted,
			"interrupted"},
		"failed": {at(func(n *status.Node) { n.State, n.ExitCode, n.Why = status.Ended, 1, "rank 1 failed" }),
			Failed, "rank 1 failed"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRun(t)
			c.make(r)
			v := r.source().Look(noon)
			var b strings.Builder
			for _, l := range Layout(v, 120, 0, Look{Zone: time.UTC}) {
				fmt.Fprintln(&b, l)
			}
			if v.State != c.want || !strings.Contains(b.String(), c.text) {
				t.Errorf("state %v, want %v, with %q in\n%s", states[v.State].text, states[c.want].text, c.text,
					b.String())
			}
		})
	}
}

// A launcher with a slow clock is alive while its status changes, and silent afterwards.
func TestAgeGoesByThisClock(t *testing.T) {
	r := newRun(t)
	r.write("config.yaml", trainYAML)
	s, n := r.source(), node(0)
	n.Written = noon.Add(-time.Hour)
	for i, want := range []State{Silent, Running, Running, Running} {
		n.Written = n.Written.Add(time.Second)
		r.tell(n)
		if v := s.Look(noon.Add(time.Duration(i) * time.Second)); v.State != want {
			t.Errorf("look %d: %v", i, states[v.State].text)
		}
	}
	if v := s.Look(noon.Add(time.Minute)); v.State != Silent {
		t.Errorf("after a minute: %v", states[v.State].text)
	}
}

func TestTimeLeftGoesByTheLastSteps(t *testing.T) {
	v := example(t).source().Look(noon)
	if v.At != 150 || !v.Timed || v.Left.Round(time.Second) != 30*time.Second { // 150 steps of 0.2 s
		t.Errorf("at %d, %v left (known: %v)", v.At, v.Left, v.Timed)
	}
}

// BenchmarkPicture measures the reading and the picture of a run on 128 nodes with 8 ranks each, which top makes once a
// second.
func BenchmarkPicture(b *testing.B) {
	r := newRun(b)
	for i := range 128 {
		n := node(0)
		n.Rank, n.FirstRank, n.Ranks, n.WorldSize = i, 8*i, 8, 1024
		like := n.Rows[0]
		n.Rows = nil
		for j := range 8 {
			like.Rank = 8*i + j
			n.Rows = append(n.Rows, like)
		}
		r.tell(n)
	}
	s := r.source()
	for b.Loop() {
		if lines := Layout(s.Look(noon), 120, 40, Look{}); len(lines) == 0 {
			b.Fatal("no picture")
		}
	}
}
