package metrics

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func step(n int64) Step {
	return Step{
		Step: n, Loss: 5.5 - Float(n)/8, GradNorm: 1.25, LR: 3e-4, Tokens: 4096 * n, StepSeconds: 0.5,
		TokensPerSecond: 8192, TokensPerSecondPerDevice: 2048, TFLOPsPerDevice: 0.125, MFU: Absent,
		MemoryBytes: 3 << 30, CommWaitSeconds: 0.0625,
	}
}

func TestStepJSON(t *testing.T) {
	val := Float(2.5)
	nan := Absent
	full := step(3)
	full.ValLoss = &val
	diverged := step(4)
	diverged.Loss, diverged.GradNorm, diverged.ValLoss = Float(math.NaN()), Float(math.Inf(1)), &nan
	tiny := step(5)
	tiny.LR, tiny.MFU = 1e-9, 0.5
	for _, c := range []struct {
		name string
		step Step
		want string
	}{
		{"plain", step(1), `{"step":1,"loss":5.375,"grad_norm":1.25,"lr":0.0003,"tokens":4096,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625}`},
		{"validation", full, `{"step":3,"loss":5.125,"grad_norm":1.25,"lr":0.0003,"tokens":12288,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"val_loss":2.5}`},
		{"diverged", diverged, `{"step":4,"loss":null,"grad_norm":null,"lr":0.0003,"tokens":16384,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":null,"memory_bytes":3221225472,"comm_wait_seconds":0.0625,"val_loss":null}`},
		{"tiny", tiny, `{"step":5,"loss":4.875,"grad_norm":1.25,"lr":1e-09,"tokens":20480,"step_seconds":0.5,"tokens_per_second":8192,"tokens_per_second_per_device":2048,"tflops_per_device":0.125,"mfu":0.5,"memory_bytes":3221225472,"comm_wait_seconds":0.0625}`},
	} {
		got, err := json.Marshal(c.step)
		if err != nil || string(got) != c.want {
			t.Errorf("%s: Marshal = %s, %v, want %s", c.name, got, err, c.want)
		}
	}
}

func FuzzFloat(f *testing.F) {
	for _, x := range []float64{0, 1, -1.5, 1e-7, 1e21, math.MaxFloat64, math.SmallestNonzeroFloat64, math.NaN(), math.Inf(-1)} {
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
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
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
		tail    string // torn or strange text at the end of the first run's file
		resumed int64
		want    []int64
	}{
		{"new run in an old directory", "", 0, []int64{1, 2}},
		{"back to a checkpoint", "", 3, []int64{1, 2, 3, 4, 5}},
		{"at the end", "", 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"torn line", `{"step":6,"loss":1.`, 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"torn line that is whole JSON", `{"step":4}`, 5, []int64{1, 2, 3, 4, 5, 6, 7}},
		{"zeros after a power cut", "\x00\x00\x00\n", 4, []int64{1, 2, 3, 4, 5, 6}},
	} {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		write := func(resumed int64, n int64) {
			j, err := OpenJSONL(path, resumed)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for k := range n {
				if err := j.Write(step(resumed + 1 + k)); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				if got := readSteps(t, path); got[len(got)-1] != resumed+1+k {
					t.Fatalf("%s: the file ends with step %d after the write of step %d", c.name, got[len(got)-1], resumed+1+k)
				}
			}
			if err := j.Close(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		write(0, 5)
		old, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(old, c.tail...), 0o644); err != nil {
			t.Fatal(err)
		}
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
	w, err := Open(Options{Dir: dir, TensorBoard: true, Prometheus: ":0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(step(1)); err != nil {
		t.Error(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if got := readSteps(t, filepath.Join(dir, "metrics.jsonl")); !slices.Equal(got, []int64{1}) {
		t.Errorf("metrics.jsonl holds steps %v, want 1", got)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*tfevents*")); len(files) != 1 {
		t.Errorf("event files %v, want one", files)
	}
	if _, err := Open(Options{Dir: dir, Prometheus: "nowhere:port:"}); err == nil || !strings.Contains(err.Error(), "log.prometheus") {
		t.Errorf("Open with a bad address = %v, want an error that names log.prometheus", err)
	}
	if _, err := Open(Options{Dir: filepath.Join(dir, "none")}); err == nil {
		t.Error("Open of a directory that is not there gave no error")
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
		{"per device", PerDevice(8192, 4), 2048},
		{"no devices", PerDevice(8192, 0), math.NaN()},
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
