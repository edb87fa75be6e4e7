//go:build !portable

package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKeepToCore checks that a worker is pinned. A rank with its own core keeps its number of concurrent goroutines; a
// rank that shares its core runs one at a time.
func TestKeepToCore(t *testing.T) {
	if r := play(t, "keep", 1); r.ExitCode != ExitDone {
		t.Errorf("%+v, stderr %q", r.Result, r.stderr)
	}
}

// TestRarelyWoken checks that only processes started inside withTimerSlack have the timer slack, not the launcher's
// other threads.
func TestRarelyWoken(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	slack := func() int {
		n, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	was := slack()
	back := withTimerSlack()
	if got := slack(); got != int(timerSlack) {
		t.Errorf("a slack of %d ns, want %d", got, timerSlack)
	}
	child := exec.Command("/proc/self/exe", "sleep", "now")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	back()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", child.Process.Pid))
	child.Process.Kill()
	child.Wait()
	if got := strings.TrimSpace(string(text)); err != nil && !errors.Is(err, os.ErrPermission) ||
		err == nil && got != fmt.Sprint(int(timerSlack)) {
		t.Errorf("the child has %q ns (%v), want %d", got, err, timerSlack)
	}
	if got := slack(); got != was {
		t.Errorf("a slack of %d ns is left, it was %d", got, was)
	}
}

// keep pins a worker, and checks its cores.
func keep(w *Worker) int {
	own, procs := ownCores(), runtime.GOMAXPROCS(0)
	w.core = &own[len(own)-1]
	core, err := w.KeepToCore()
	if err != nil || core != own[len(own)-1] {
		fmt.Fprintln(os.Stderr, "keeps to", core, err)
		return 5
	}
	if n := runtime.GOMAXPROCS(0); n != procs && w.LocalWorldSize <= len(own) {
		fmt.Fprintln(os.Stderr, "runs", n, "goroutines at once, before", procs)
		return 5
	}
	w.LocalWorldSize = 2*len(own) + 1
	if _, err := w.KeepToCore(); err != nil || runtime.GOMAXPROCS(0) != 1 {
		fmt.Fprintln(os.Stderr, "runs", runtime.GOMAXPROCS(0), "goroutines at once on a core that it shares", err)
		return 5
	}
	if left := ownCores(); !slices.Equal(left, []int{core}) {
		fmt.Fprintln(os.Stderr, "may run on", left)
		return 5
	}
	return done(w)
}

func init() { scenarios["keep"] = keep }
