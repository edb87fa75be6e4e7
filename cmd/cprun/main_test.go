package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// process returns a command that runs cprun, without the variables of TransformerEngine.
func process(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, args...)
	c.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "NVTE_") }),
		actAsProgram+"=1")
	return c
}

// within makes a shell run commands, then the program in its own process.
func within(c *exec.Cmd, commands string) *exec.Cmd {
	c.Args = append([]string{"sh", "-c", commands + ` && exec "$0" "$@"`, c.Path}, c.Args[1:]...)
	c.Path = "/bin/sh"
	return c
}

// with runs cprun with more variables of the environment. It returns the exit status, stdout and stderr.
func with(t *testing.T, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	c := process(t, args...)
	c.Env = append(c.Env, env...)
	var out, errs strings.Builder
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return c.ProcessState.ExitCode(), out.String(), errs.String()
}

// cprun runs cprun and returns its exit status, stdout and stderr.
func cprun(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return with(t, nil, args...)
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

// trains runs cprun in a new run directory, which it returns with stderr.
func trains(t *testing.T, args ...string) (dir, stderr string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "run")
	_, stderr = must(t, append([]string{"--run-dir", dir}, args...)...)
	return dir, stderr
}

// invalid runs cprun, and fails unless the exit status is 2 and stderr has all texts.
func invalid(t *testing.T, args []string, want ...string) {
	t.Helper()
	code, stdout, stderr := cprun(t, args...)
	if code != exitUsage {
		t.Errorf("cprun %q: exit status %d, want 2\n%s%s", args, code, stdout, stderr)
	}
	contains(t, fmt.Sprintf("cprun %q", args), stderr, want...)
}

// contains fails unless a text has all parts.
func contains(t *testing.T, name, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s: no %q in\n%s", name, w, text)
		}
	}
}

// write puts a file into a directory, which it makes, and returns its path.
func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte(text), 0o666)); err != nil {
		t.Fatal(err)
	}
	return path
}

// content returns the text of a file.
func content(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// decode parses JSON.
func decode(t *testing.T, text string, to any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), to); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
}

// absolute returns the path of a file of the tree, for configs elsewhere.
func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../..", path))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func gettysburg(t *testing.T) string { return absolute(t, "examples/data/gettysburg.txt") }

// small writes a config with fast training, but with steps long enough to interrupt.
func small(t *testing.T, steps int) string {
	t.Helper()
	return write(t, t.TempDir(), "train.yaml", fmt.Sprintf(`
model: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2}
data: {path: %s, seq_len: 200}
train: {steps: %d, deterministic: true}
optimizer: {lr: 1.0e-3}
lr_schedule: {name: constant}
`, gettysburg(t), steps))
}

// metricsOf reads metrics.jsonl. Values stay text, so that a comparison is bit for bit.
func metricsOf(t *testing.T, dir string) (all []map[string]json.RawMessage) {
	t.Helper()
	for line := range strings.Lines(content(t, dir, "metrics.jsonl")) {
		var m map[string]json.RawMessage
		decode(t, line, &m)
		all = append(all, m)
	}
	return all
}

// number parses a value of metricsOf.
func number(t *testing.T, value json.RawMessage) (x float64) {
	t.Helper()
	decode(t, string(value), &x)
	return x
}

// curve returns the step, loss and gradient norm of every line of metrics.jsonl.
func curve(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	for _, m := range metricsOf(t, dir) {
		fmt.Fprintf(&b, "%s %s %s\n", m["step"], m["loss"], m["grad_norm"])
	}
	return b.String()
}

// alike fails unless two runs have the same losses and gradient norms, bit for bit.
func alike(t *testing.T, what, dir, other string) {
	t.Helper()
	if got, want := curve(t, dir), curve(t, other); got != want {
		t.Errorf("%s:\n%swant\n%s", what, got, want)
	}
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

// launched starts a command of process, and kills it at the end of the test.
func launched(t *testing.T, c *exec.Cmd) *started {
	t.Helper()
	s := &started{Cmd: c, t: t}
	s.Stderr = &s.stderr
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Process.Kill() })
	return s
}

// start starts cprun in a run directory.
func start(t *testing.T, dir string, args ...string) *started {
	t.Helper()
	s := launched(t, process(t, append([]string{"--run-dir", dir}, args...)...))
	s.dir = dir
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
			s.t.Fatalf("no %s after %v; stderr:\n%s", what, watchdog, s.said())
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
	for v := range strings.SplitSeq(content(t, "/proc", strconv.Itoa(pid), "environ"), "\x00") {
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
	if err := s.Wait(); err != nil && s.ProcessState == nil {
		s.t.Fatal(err)
	}
	return s.ProcessState.ExitCode()
}

// ends fails unless a run ends with an exit status.
func (s *started) ends(want int) {
	s.t.Helper()
	if code := s.wait(); code != want {
		s.t.Fatalf("exit status %d, want %d\n%s", code, want, s.said())
	}
}

// stop asks a run to stop, which it does with status 75.
func (s *started) stop() {
	s.t.Helper()
	signal(s.t, syscall.SIGTERM, s.Process.Pid)
	s.ends(75)
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

func signal(t *testing.T, sig syscall.Signal, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
	}
}
