package metrics

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/must"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rootAt opens a directory until the end of the test.
func rootAt(t testing.TB, dir string) *os.Root {
	t.Helper()
	root := must.Have(files.Make(dir))
	t.Cleanup(func() { root.Close() })
	return root
}

func step(n int64) Step {
	return Step{
		Time: Time(time.Unix(1700000000, 250000000)), Step: n, Epoch: Absent, Loss: 5.5 - Float(n)/8, GradNorm: 1.25,
		LR: 3e-4, Tokens: 4096 * n, StepSeconds: 0.5,
		TokensPerSecond: 8192, TokensPerSecondPerDevice: 2048, TFLOPsPerDevice: 0.125, MFU: Absent,
		MemoryBytes: 3 << 30, CommWaitSeconds: 0.0625, AttentionImbalance: 1.25, AttentionBytes: 1 << 20,
	}
}

func TestStepJSON(t *testing.T) {
	val := Float(2.5)
	nan := Absent
	full := step(3)
	full.ValLoss, full.Epoch = &val, 0.75
	full.ValLosses = map[string]Float{"prose": 2, "code/go": Float(math.NaN())}
	diverged := step(4)
	diverged.Loss, diverged.GradNorm, diverged.ValLoss = Float(math.NaN()), Float(math.Inf(1)), &nan
	tiny := step(5)
	tiny.LR, tiny.MFU = 1e-9, 0.5
	for _, c := range []struct {
		name string
		step Step
		want string
	}{
		{"plain", step(1), `{"time":"2023-11-14T22:13:20.250Z","step":1,"epoch":null,"loss":5.375,"grad_norm":1.25,"lr":0.0003,"tokens":4096,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"attention_imbalance":1.25,"attention_bytes":1048576}`},
		{"validation", full,
			`{"time":"2023-11-14T22:13:20.250Z","step":3,"epoch":0.75,"loss":5.125,"grad_norm":1.25,"lr":0.0003,"tokens":12288,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"attention_imbalance":1.25,"attention_bytes":1048576,"val_loss":2.5,"val_loss/code/go":null,"val_loss/prose":2}`},
		{"diverged", diverged,
			`{"time":"2023-11-14T22:13:20.250Z","step":4,"epoch":null,"loss":null,"grad_norm":null,"lr":0.0003,"tokens":16384,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"attention_imbalance":1.25,"attention_bytes":1048576,"val_loss":null}`},
		{"tiny", tiny, `{"time":"2023-11-14T22:13:20.250Z","step":5,"epoch":null,"loss":4.875,"grad_norm":1.25,"lr":1e-09,"tokens":20480,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":0.5,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"attention_imbalance":1.25,"attention_bytes":1048576}`},
		{"before the first step", Untrained(time.Unix(1700000000, 0), 5.5, 7),
			`{"time":"2023-11-14T22:13:20.000Z","step":0,"epoch":0,"loss":null,"grad_norm":null,"lr":null,"tokens":0,"step_seconds":null,"tokens_per_second":null,"tokens_per_second_per_device":null,"tflops_per_device":null,"mfu":null,"memory_bytes":7,"comm_wait_seconds":null,"attention_imbalance":null,"attention_bytes":null,"val_loss":5.5}`},
	} {
		got, err := json.Marshal(c.step)
		if err != nil || string(got) != c.want {
			t.Errorf("%s: Marshal = %s, %v, want %s", c.name, got, err, c.want)
		}
	}
}

func FuzzFloat(f *testing.F) {
	for _, x := range []float64{0, 1, -1.5, 1e-7, 1e21, math.MaxFloat64, math.SmallestNonzeroFloat64, math.NaN(),
		math.Inf(-1)} {
		f.Add(x)
	}
	f.Fuzz(func(t *testing.T, x float64) {
		data, err := json.Marshal(Float(x))
		if err != nil {
			t.Fatalf("Marshal(%v): %v", x, err)
		}
		var back Float
		if err := json.Unmarshal(data, &back); err != nil {
			t.Fatalf("Unmarshal(%s): %v", data, err)
		}
		finite := !math.IsNaN(x) && !math.IsInf(x, 0)
		if finite && float64(back) != x || !finite && back.Known() {
			t.Errorf("%v became %s, then %v", x, data, back)
		}
	})
}

func readSteps(t *testing.T, path string) []int64 {
	t.Helper()
	data := must.Have(os.ReadFile(path))
	var steps []int64
	for line := range strings.Lines(string(data)) {
		var s Step
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		steps = append(steps, s.Step)
	}
	return steps
}

func TestJSONLResume(t *testing.T) {
	for _, c := range []struct {
		name    string
		tail    string // torn or foreign text at the end of the first run's file
		resumed int64
		want    []int64
	}{
		{"new run in an old directory", `{"step":0,"loss":2}` + "\n", 0, []int64{1, 2}},
		{"back to a checkpoint", "", 3, []int64{1, 2, 3, 4, 5}},
		{"at the end", "", 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"torn line", `{"step":6,"loss":1.`, 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"torn line that is whole JSON", `{"step":4}`, 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"zeros after a power cut", "\x00\x00\x00\n", 4, []int64{1, 2, 3, 4, 5, 6}},
	} {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		write := func(resumed int64, n int64) {
			j, err := OpenJSONL(rootAt(t, filepath.Dir(path)), filepath.Base(path), resumed, nil)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for k := range n {
				if err := j.Write(step(resumed + 1 + k)); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				if got := readSteps(t, path); got[len(got)-1] != resumed+1+k {
					t.Fatalf("%s: the file ends with step %d after the write of step %d", c.name, got[len(got)-1],
						resumed+1+k)
				}
			}
			if err := j.Close(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		write(0, 5)
		old := must.Have(os.ReadFile(path))
		must.Do(t, os.WriteFile(path, append(old, c.tail...), 0o644))
		write(c.resumed, 2)
		if got := readSteps(t, path); !slices.Equal(got, c.want) {
			t.Errorf("%s: steps %v, want %v", c.name, got, c.want)
		}
		if left, _ := filepath.Glob(path + ".*"); len(left) > 0 {
			t.Errorf("%s: left behind %v", c.name, left)
		}
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	w := must.Have(Open(Options{Dir: rootAt(t, dir), TensorBoard: true, Prometheus: ":0"}))
	must.Do(t, w.Write(step(1)))
	must.Do(t, w.Close())
	if got := readSteps(t, filepath.Join(dir, "metrics.jsonl")); !slices.Equal(got, []int64{1}) {
		t.Errorf("metrics.jsonl holds steps %v, want 1", got)
	}
	if events, _ := filepath.Glob(filepath.Join(dir, "*tfevents*")); len(events) != 1 {
		t.Errorf("event files %v, want one", events)
	}
	if _, err := Open(Options{Dir: rootAt(t, dir), Prometheus: "nowhere:port:"}); err == nil ||
		!strings.Contains(err.Error(), "log.prometheus") {
		t.Errorf("Open with a bad address = %v, want an error that names log.prometheus", err)
	}
	gone := rootAt(t, filepath.Join(dir, "gone"))
	must.Do(t, os.RemoveAll(filepath.Join(dir, "gone")))
	if _, err := Open(Options{Dir: gone}); err == nil {
		t.Error("Open of a directory that is not there any more gave no error")
	}
}

func TestThroughput(t *testing.T) {
	for _, c := range []struct {
		name string
		got  Float
		want float64
	}{
		{"tokens per second", PerSecond(4096, 0.5), 8192},
		{"no time", PerSecond(4096, 0), math.NaN()},
		{"time that is not a number", PerSecond(4096, math.NaN()), math.NaN()},
		{"TFLOP/s", TFLOPs(8e12, 2, 4), 1},
		{"MFU", MFU(250, 1000), 0.25},
		{"MFU of a device whose peak is not known", MFU(250, 0), math.NaN()},
	} {
		if float64(c.got) != c.want && !(math.IsNaN(c.want) && !c.got.Known()) {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
}

func TestETA(t *testing.T) {
	var e ETA
	if _, ok := e.Left(10); ok {
		t.Error("Left before the first step is known")
	}
	e = e.Add(2)
	if left, ok := e.Left(10); !ok || left.Seconds() != 20 {
		t.Errorf("Left(10) after one step of 2 s = %v, %v, want 20s", left, ok)
	}
	e = e.Add(math.NaN()).Add(-1).Add(math.Inf(1))
	if left, _ := e.Left(10); left.Seconds() != 20 {
		t.Errorf("Left(10) after steps without a time = %v, want 20s", left)
	}
	for range 200 {
		e = e.Add(1)
	}
	if s := float64(e.StepSeconds()); math.Abs(s-1) > 1e-3 {
		t.Errorf("StepSeconds after 200 steps of 1 s = %v, want about 1", s)
	}
	if left, _ := e.Left(-5); left != 0 {
		t.Errorf("Left(-5) = %v, want 0", left)
	}
	if left, _ := e.Left(math.MaxInt64); left <= 0 {
		t.Errorf("Left of very many steps = %v, want a positive time", left)
	}
}

// A run directory may contain files of others.
func TestJSONLOfSomebodyElse(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	must.Do(t, os.WriteFile(outside, []byte("{\"step\":1}\nprecious"), 0o600))
	for what, make := range map[string]func(path string) error{
		"a link":        func(path string) error { return os.Symlink(outside, path) },
		"a hard link":   func(path string) error { return os.Link(outside, path) },
		"a directory":   func(path string) error { return os.Mkdir(path, 0o700) },
		"a pipe":        func(path string) error { return unix.Mkfifo(path, 0o600) },
		"one long line": func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("{"), 1<<20), 0o600) },
		"another file": func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte("{}\n"), 2000),
				0o600)
		},
		"a huge file": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, MaxJSONL+1))
		},
	} {
		dir := t.TempDir()
		must.Do(t, make(filepath.Join(dir, "metrics.jsonl")))
		j, err := OpenJSONL(rootAt(t, dir), "metrics.jsonl", 5, nil)
		good := what == "a hard link" || what == "one long line" // the name gets a file of its own
		if good != (err == nil) {
			t.Errorf("%s: %v", what, err)
		}
		if err == nil {
			j.Close()
		}
	}
	if text, err := os.ReadFile(outside); err != nil || string(text) != "{\"step\":1}\nprecious" {
		t.Errorf("the file outside holds %q, %v", text, err)
	}
}

// A run resumes from the complete lines of steps up to its checkpoint. If the file is removed during a run, JSONL
// writes it again, whole, also after the last step. JSONL leaves a file that has taken its place alone, and warns.
func TestRemovedJSONLIsWrittenAgain(t *testing.T) {
	for _, after := range []int64{1, 2, 3} { // steps
		dir := t.TempDir()
		path, told := filepath.Join(dir, "metrics.jsonl"), 0
		j := must.Have(OpenJSONL(rootAt(t, dir), "metrics.jsonl", 0, func(string) { told++ }))
		for n := int64(1); n <= 3; n++ {
			must.Do(t, j.Write(step(n)))
			if n == after {
				must.Do(t, os.Remove(path))
			}
		}
		must.Do(t, j.Close())
		if got := readSteps(t, path); !slices.Equal(got, []int64{1, 2, 3}) || told != 1 {
			t.Errorf("removed after step %d: the file has %v, told %d times", after, got, told)
		}
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "metrics.jsonl")
	j := must.Have(OpenJSONL(rootAt(t, dir), "metrics.jsonl", 0, nil))
	must.Do(t, errors.Join(os.Remove(path), os.WriteFile(path, []byte("mine"), 0o644)))
	if err := j.Write(step(1)); err == nil || !strings.Contains(err.Error(), "another file") {
		t.Errorf("Write = %v", err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "mine" {
		t.Errorf("the other file is %q, %v", text, err)
	}
	must.Do(t, errors.Join(os.RemoveAll(dir)))
	if err := j.Close(); err == nil {
		t.Error("the directory is gone, and nobody hears of it")
	}
}

func FuzzOpenJSONL(f *testing.F) {
	f.Add([]byte("{\"step\":1}\n{\"step\":9}\n{\"step\":"), int64(3))
	f.Add([]byte("\n\x00{}\n{\"step\":null}\n{\"step\":2} x\n"), int64(2))
	f.Fuzz(func(t *testing.T, text []byte, last int64) {
		var out bytes.Buffer
		if err := copyLines(&out, bytes.NewReader(text), last); err != nil {
			return
		}
		for line := range bytes.Lines(out.Bytes()) {
			if s, ok := wholeStep(line); !ok || s.Step > last || !bytes.Contains(text, line) {
				t.Errorf("%q keeps %q", text, line)
			}
		}
	})
}
