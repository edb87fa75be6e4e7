package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model/machine"
)

// If actAsProgram is set, the test binary runs as cprun, so that tests need no other binary. Workers inherit it.
const actAsProgram = "CPRUN_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(actAsProgram) != "" {
		badDisk()
		main()
	}
	os.Exit(testAll(m))
}

// testAll runs the tests without a cost table of this machine, so that auto resolves equally everywhere. On GPUs it
// keeps the user's cache, which has compiled kernels.
func testAll(m *testing.M) int {
	if !machine.Built {
		dir, err := os.MkdirTemp("", "cprun-test-cache-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		if err := os.Setenv("XDG_CACHE_HOME", dir); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

// process returns a command that runs cprun.
func process(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, args...)
	c.Env = append(os.Environ(), actAsProgram+"=1", "GOGC=") // Go's default
	return c
}

// cprun runs cprun and returns its exit status, stdout and stderr.
func cprun(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	c := process(t, args...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	if exit, ok := err.(*exec.ExitError); ok {
		code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return code, out.String(), errs.String()
}

// must runs cprun, and fails unless the exit status is 0.
func must(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	code, stdout, stderr := cprun(t, args...)
	if code != 0 {
		t.Fatalf("cprun %v: exit status %d\n%s%s", args, code, stdout, stderr)
	}
	return stdout, stderr
}

// small writes a config with fast training, but with steps long enough to interrupt.
func small(t *testing.T, steps int) string {
	t.Helper()
	text, err := filepath.Abs("../../examples/data/gettysburg.txt")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "train.yaml")
	yaml := fmt.Sprintf(`
model: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2}
data: {path: %s, seq_len: 200}
train: {steps: %d, deterministic: true}
optimizer: {lr: 1.0e-3}
lr_schedule: {name: constant}
`, text, steps)
	if err := os.WriteFile(path, []byte(yaml), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// metricsOf reads metrics.jsonl. Values stay text, so that a comparison is bit for bit.
func metricsOf(t *testing.T, dir string) []map[string]json.RawMessage {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []map[string]json.RawMessage
	for s := bufio.NewScanner(f); s.Scan(); {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			t.Fatalf("line %d: %v", len(out)+1, err)
		}
		out = append(out, m)
	}
	return out
}

// curve returns the step, loss and gradient norm of every line.
func curve(ms []map[string]json.RawMessage) string {
	var b strings.Builder
	for _, m := range ms {
		fmt.Fprintf(&b, "%s %s %s\n", m["step"], m["loss"], m["grad_norm"])
	}
	return b.String()
}

// A started is a running cprun.
type started struct {
	*exec.Cmd
	t      *testing.T
	dir    string
	stderr lockedBuffer
}

// A lockedBuffer can be read while the process writes.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// said returns the stderr of the run so far.
func (s *started) said() string { return s.stderr.String() }

func start(t *testing.T, dir string, args ...string) *started {
	t.Helper()
	s := &started{Cmd: process(t, append([]string{"--run-dir", dir}, args...)...), t: t, dir: dir}
	s.Stderr = &s.stderr
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Process.Kill() })
	return s
}

// watchdog limits waits that take seconds on an idle machine.
const watchdog = 2 * time.Minute

// until waits for a condition.
func (s *started) until(what string, ok func() bool) {
	s.t.Helper()
	for end := time.Now().Add(watchdog); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.Process.Kill()
			s.t.Fatalf("no %s after %v; stderr:\n%s", what, watchdog, s.stderr.String())
		}
	}
}

func (s *started) afterStep(n int) {
	s.t.Helper()
	s.until(fmt.Sprintf("step %d", n), func() bool {
		text, err := os.ReadFile(filepath.Join(s.dir, "metrics.jsonl"))
		return err == nil && bytes.Count(text, []byte("\n")) >= n
	})
}

// workers returns the pids of the children.
func (s *started) workers() []int {
	s.t.Helper()
	return children(s.t, s.Process.Pid)
}

func children(t *testing.T, pid int) []int {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, f := range tasks {
		text, _ := os.ReadFile(f)
		for _, w := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(w); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// rankOf returns the rank of a worker from its environment.
func rankOf(t *testing.T, pid int) int {
	t.Helper()
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range strings.Split(string(env), "\x00") {
		if r, ok := strings.CutPrefix(v, "RANK="); ok {
			n, err := strconv.Atoi(r)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("process %d has no RANK", pid)
	return 0
}

func (s *started) wait() int {
	s.t.Helper()
	err := s.Wait()
	if exit, ok := err.(*exec.ExitError); ok {
		return exit.ExitCode()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return 0
}

// gone waits until all processes have ended.
func gone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		for end := time.Now().Add(watchdog); running(pid); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("process %d still runs", pid)
			}
		}
	}
}

// running returns false for zombies, which a killed parent leaves to init.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return !bytes.HasPrefix(rest, []byte("Z"))
}

func signal(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}
