package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/checkpoint"
)

var (
	crashTrials = flag.Int("crash.trials", len(crashes), "faults that TestCrash puts into runs, kind by kind")
	crashSeed   = flag.Uint64("crash.seed", 1, "of their moments")
)

const (
	crashRanks = 3
	crashSteps = 10
)

// A crash is a kind of fault, injected into a run at a random moment.
type crash struct {
	name string
	// env holds variables for the workers; strike injects the fault.
	env    func(c *trial) string
	strike func(c *trial)
	after  func(c *trial) // changes the files that the run left
	want   []int          // exit statuses, in addition to 0 if the fault came too late
	says   func(c *trial) []string
}

// A trial is one injected fault.
type trial struct {
	*testing.T
	rng   *rand.Rand
	s     *started
	dir   string
	rank  int           // rank of the fault
	pids  []int         // pids of the workers, by rank
	spent time.Duration // from the fault to the end of the run
	back  time.Duration // from the next start to its first step
}

func names(cause string) func(*trial) []string {
	return func(c *trial) []string { return []string{fmt.Sprintf("cprun: rank %d failed on host", c.rank), cause} }
}

func kill(sig syscall.Signal) func(*trial) {
	return func(c *trial) { syscall.Kill(c.pids[c.rank], sig) }
}

func atLauncher(sig syscall.Signal) func(*trial) {
	return func(c *trial) { c.s.Process.Signal(sig) }
}

// atDisk lets the disk of a rank fail in a random checkpoint after a random number of bytes.
func atDisk(how string) func(*trial) string {
	return func(c *trial) string {
		return fmt.Sprintf("%d %s %d %d", c.rank, how, 1+c.rng.IntN(4), c.rng.IntN(40000))
	}
}

var crashes = []crash{
	{name: "a rank is killed", strike: kill(syscall.SIGKILL), want: []int{1}, says: names("killed by SIGKILL")},
	{name: "a rank crashes", strike: kill(syscall.SIGSEGV), want: []int{1}, says: names("SIGSEGV")},
	{name: "a rank stands still", strike: kill(syscall.SIGSTOP), want: []int{1}, says: func(c *trial) []string {
		return []string{fmt.Sprintf("rank %d (pid %d)", c.rank, c.pids[c.rank]), "no progress for 1s, the deadline"}
	}},
	{name: "the launcher is killed", strike: atLauncher(syscall.SIGKILL), want: []int{-1}},
	{name: "a request to stop", strike: atLauncher(syscall.SIGTERM), want: []int{75}},
	{name: "a rank's disk is full", env: atDisk("full"), want: []int{1}, says: names("no space left on device")},
	{name: "a rank's disk is full for one save", env: atDisk("once")},
	{name: "a rank's disk fails", env: atDisk("broken"), want: []int{1}, says: names("input/output error")},
	{name: "a rank panics in a save", env: atDisk("panic"), want: []int{1}, says: names("panic: ")},
	{name: "the run directory is removed", strike: func(c *trial) { os.RemoveAll(c.dir) }, want: []int{1},
		after: func(c *trial) { os.RemoveAll(c.dir) },
		says:  func(*trial) []string { return []string{"no such file or directory"} }},
	{name: "a bit of a checkpoint flips", strike: atLauncher(syscall.SIGKILL), after: flipBit, want: []int{-1}},
	{name: "a file of a checkpoint is gone", strike: atLauncher(syscall.SIGTERM), after: removeFile, want: []int{75}},
	{name: "a file of a checkpoint is cut short", strike: atLauncher(syscall.SIGKILL), after: cutFile, want: []int{-1}},
}

// newest lists the files of the newest checkpoint.
func newest(c *trial) []string {
	steps, _ := filepath.Glob(filepath.Join(c.dir, "checkpoints", "step-????????"))
	if len(steps) == 0 {
		return nil
	}
	files, _ := filepath.Glob(filepath.Join(slices.Max(steps), "*"))
	return append(files, filepath.Join(c.dir, "checkpoints", "latest"))
}

func damageOne(c *trial, how func(path string)) {
	if files := newest(c); len(files) > 0 {
		how(files[c.rng.IntN(len(files))])
	}
}

func flipBit(c *trial) {
	damageOne(c, func(path string) {
		if b, err := os.ReadFile(path); err == nil && len(b) > 0 {
			b[c.rng.IntN(len(b))] ^= 1 << c.rng.IntN(8)
			if err := os.WriteFile(path, b, 0o644); err != nil {
				c.Error(err)
			}
		}
	})
}

func removeFile(c *trial) { damageOne(c, func(path string) { os.Remove(path) }) }

func cutFile(c *trial) {
	damageOne(c, func(path string) {
		if info, err := os.Stat(path); err == nil {
			os.Truncate(path, c.rng.Int64N(info.Size()+1))
		}
	})
}

// diskEnv configures a worker's disk faults: "RANK full|broken|panic|once FILE BYTES" fails from shard FILE, or with
// once only there. "0 while 0 0 PATH" fills the disk of every rank while PATH exists.
const diskEnv = "CPRUN_TEST_DISK"

// badDisk installs the disk faults of the environment, if they are for this rank.
func badDisk() {
	var rank, file, after int
	var how string
	_, err := fmt.Sscan(os.Getenv(diskEnv), &rank, &how, &file, &after)
	if how == "while" {
		fields := strings.Fields(os.Getenv(diskEnv))
		checkpoint.Disk = func(w io.Writer) io.Writer { return &fullWhile{w, fields[len(fields)-1]} }
		return
	}
	if err != nil || os.Getenv("RANK") != strconv.Itoa(rank) {
		return
	}
	var mu sync.Mutex
	files := 0
	checkpoint.Disk = func(w io.Writer) io.Writer {
		mu.Lock()
		defer mu.Unlock()
		if files++; files < file || how == "once" && files > file {
			return w
		}
		return &badWriter{w, how, after}
	}
}

// A fullWhile is a disk that is full while a file exists.
type fullWhile struct {
	w    io.Writer
	path string
}

func (f *fullWhile) Write(p []byte) (int, error) {
	if _, err := os.Stat(f.path); err == nil {
		return 0, syscall.ENOSPC
	}
	return f.w.Write(p)
}

// A badWriter fails after a number of bytes.
type badWriter struct {
	w    io.Writer
	how  string
	left int
}

func (b *badWriter) Write(p []byte) (int, error) {
	if b.left -= len(p); b.left >= 0 {
		return b.w.Write(p)
	}
	switch b.how {
	case "full", "once":
		return 0, syscall.ENOSPC
	case "broken":
		return 0, syscall.EIO
	}
	panic("a test of a crash in a save")
}

// The last save of a run, and a save on SIGTERM, are tried twice. The status is 0 or 75 only if a checkpoint was
// written.
func TestStatusAfterFailedSaves(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, disk string
		stop       bool
		want       int
	}{
		{"the last save fails once", "1 once 1 100", false, 0},
		{"the last save fails", "1 full 1 100", false, 1},
		{"a save on request fails once", "1 once 1 100", true, 75},
		{"a save on request fails", "1 full 1 100", true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			steps := 4
			if c.stop {
				steps = endless
			}
			dir := filepath.Join(t.TempDir(), "run")
			p := process(t, "--nproc", "2", "--run-dir", dir, small(t, steps))
			p.Env = append(p.Env, diskEnv+"="+c.disk)
			s := launched(t, p)
			s.dir = dir
			if c.stop {
				s.afterStep(2)
				s.Process.Signal(syscall.SIGTERM)
			}
			if code := s.wait(); code != c.want || !strings.Contains(s.said(), "no space left on device") {
				t.Errorf("status %d, want %d\n%s", code, c.want, s.said())
			}
			_, err := os.Stat(filepath.Join(dir, "checkpoints", "latest"))
			if saved := err == nil; saved != (c.want != 1) {
				t.Errorf("there is a checkpoint: %t (%v)", saved, err)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "*.tmp-*")); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// After any fault at any moment, a run ends by itself with the right status and rank, and leaves no process. The same
// command then continues to the same losses, bit for bit.
func TestCrash(t *testing.T) {
	t.Parallel()
	config := small(t, crashSteps)
	whole, _ := trains(t, "--nproc", strconv.Itoa(crashRanks), config)
	want := curve(t, whole)
	var mu sync.Mutex
	times := map[string][]time.Duration{} // from a fault to the end of the run, by kind
	var back []time.Duration
	late, refused := 0, 0
	t.Run("trials", func(t *testing.T) {
		for i := range *crashTrials {
			kind := crashes[i%len(crashes)]
			t.Run(fmt.Sprintf("%d %s", i, kind.name), func(t *testing.T) {
				t.Parallel()
				rng := rand.New(rand.NewPCG(*crashSeed, uint64(i)))
				c := &trial{T: t, rng: rng, rank: rng.IntN(crashRanks), dir: filepath.Join(t.TempDir(), "run")}
				ended, goesOn := c.run(&kind, config, want)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case !ended:
					late++
				case !goesOn:
					refused++
				}
				if ended && goesOn {
					back = append(back, c.back)
				}
				if ended && kind.strike != nil {
					times[kind.name] = append(times[kind.name], c.spent)
				}
			})
		}
	})
	t.Logf("%d faults; %d came too late; %d left no whole checkpoint, and the run was refused", *crashTrials, late,
		refused)
	slices.Sort(back)
	t.Logf("from the next start to its first step: %v, at most %v", back[len(back)/2], back[len(back)-1])
	for _, k := range crashes {
		if ds := times[k.name]; len(ds) > 0 {
			slices.Sort(ds)
			t.Logf("%-36s %3d times; ended after %v, at most %v", k.name, len(ds),
				ds[len(ds)/2].Round(time.Millisecond), ds[len(ds)-1].Round(time.Millisecond))
		}
	}
}

// run injects a fault and runs the command again. ended reports that the fault came before the end, goesOn that the run
// resumed from its checkpoint, or without one, started over.
func (c *trial) run(kind *crash, config, want string) (ended, goesOn bool) {
	args := []string{
		"--nproc", strconv.Itoa(crashRanks), "--run-dir", c.dir, "--set",
		fmt.Sprintf("checkpoint.every=%d", 1+c.rng.IntN(4)),
		"--set", fmt.Sprintf("checkpoint.async=%t", c.rng.IntN(2) == 0), "--set", "parallel.deadline=1s", config,
	}
	p := process(c.T, args...)
	if kind.env != nil {
		p.Env = append(p.Env, diskEnv+"="+kind.env(c))
	}
	c.s = launched(c.T, p)
	c.s.dir = c.dir
	over := make(chan int, 1)
	c.pids = c.s.workers()
	if kind.strike != nil {
		c.s.afterStep(1 + c.rng.IntN(crashSteps/2))
		c.pids = c.s.workers()
		go func() { over <- c.s.wait() }()
		time.Sleep(time.Duration(c.rng.IntN(30)) * time.Millisecond)
		if len(c.pids) == crashRanks {
			kind.strike(c)
		}
	} else {
		go func() { over <- c.s.wait() }()
	}
	struck := time.Now()
	var code int
	select {
	case code = <-over:
	case <-time.After(watchdog):
		c.s.Process.Kill()
		c.Fatalf("it does not end:\n%s", c.s.said())
	}
	c.spent = time.Since(struck)
	gone(c.T, c.pids)
	said := c.s.said()
	if code != 0 && !slices.Contains(kind.want, code) {
		c.Errorf("status %d, want %v\n%s", code, kind.want, said)
	}
	if code == 1 {
		for _, text := range kind.says(c) {
			if !strings.Contains(said, text) {
				c.Errorf("it does not say %q:\n%s", text, said)
			}
		}
	}
	if kind.after != nil {
		kind.after(c)
	}
	again, _, stderr := cprun(c.T, args...)
	if again == 2 && kind.after != nil && strings.Contains(stderr, "all of them damaged") {
		return code != 0, false
	}
	if again != 0 {
		c.Errorf("going on: status %d\n%s\nafter\n%s", again, stderr, said)
		return code != 0, true
	}
	if got := curve(c.T, c.dir); got != want {
		c.Errorf("struck and gone on:\n%swant\n%s\n%s", got, want, stderr)
	}
	if code != 0 {
		c.back = firstStep(c)
	}
	if left, _ := filepath.Glob(filepath.Join(c.dir, "checkpoints", "*.tmp-*")); len(left) > 0 {
		c.Errorf("left behind: %q", left)
	}
	// A run without steps left writes no checkpoint.
	if text, err := os.ReadFile(filepath.Join(c.dir, "checkpoints", "latest")); string(text) !=
		fmt.Sprintf("step-%08d\n", crashSteps) && !strings.Contains(stderr, "no steps were left") {
		c.Errorf("latest is %q, %v", text, err)
	}
	return code != 0, true
}

// firstStep returns the time from the last start of a run to its first step, from the launcher's log.
func firstStep(c *trial) time.Duration {
	text, err := os.ReadFile(filepath.Join(c.dir, "logs", "launcher.log"))
	if err != nil {
		c.Error(err)
	}
	_, last, _ := strings.Cut(string(text[bytes.LastIndex(text, []byte("--- ")):]), "--- ")
	began, err := time.Parse(progress.Stamp, last[:len(progress.Stamp)])
	for line := range strings.Lines(last) {
		if at, what, ok := strings.Cut(line, " "); err == nil && ok && strings.HasPrefix(what, "step ") {
			var first time.Time
			first, err = time.Parse(progress.Stamp, at)
			return first.Sub(began)
		}
	}
	c.Errorf("launcher.log tells of no step (%v):\n%s", err, last)
	return 0
}
