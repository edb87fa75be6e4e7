package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// A rank keeps to a core where each core gets as many ranks as any other.
func TestShareOf(t *testing.T) {
	for name, c := range map[string]struct {
		cores        []int
		procs, ranks int
		want         []int // nil: all of them
	}{
		"two each":         {[]int{0, 1}, 2, 4, []int{0, 0, 1, 1}},
		"cores of a mask":  {[]int{3, 7, 9}, 3, 6, []int{3, 3, 7, 7, 9, 9}},
		"one each":         {[]int{4, 7}, 2, 2, []int{4, 7}},
		"more cores":       {[]int{0, 1, 2, 3}, 4, 2, nil},
		"not even":         {[]int{0, 1}, 2, 3, nil},
		"one core":         {[]int{5}, 1, 4, nil},
		"not known":        {nil, 2, 4, nil},
		"limited in cores": {[]int{0, 1, 2, 3}, 2, 8, nil}, // a cgroup's processor time, of any cores
	} {
		for r := range c.ranks {
			got := shareOf(c.cores, c.procs, r, c.ranks)
			switch {
			case c.want == nil && got != nil:
				t.Errorf("%s: rank %d of %d keeps to core %d", name, r, c.ranks, *got)
			case c.want != nil && (got == nil || *got != c.want[r]):
				t.Errorf("%s: rank %d of %d keeps to %v, want %d", name, r, c.ranks, got, c.want[r])
			}
		}
	}
}

// TestCoreIsLeftAlone checks who has placed ranks already: the user, and who has started one launcher a rank.
func TestCoreIsLeftAlone(t *testing.T) {
	n := len(ownCores())
	ranks := &hello{LocalWorldSize: 2 * n}
	if core := ranks.core(true); core != nil {
		t.Errorf("with GOMAXPROCS of the user a rank keeps to core %d", *core)
	}
	if core := ranks.core(false); (core != nil) != (n > 1 && runtime.GOMAXPROCS(0) == n) {
		t.Errorf("the first of %d ranks on %d cores keeps to %v", 2*n, n, core)
	}
	one := &hello{LocalWorldSize: 1, Hosts: slices.Repeat([]string{"a"}, 2*n)}
	if core := one.core(false); core != nil {
		t.Errorf("the rank of a launcher of its own keeps to core %d", *core)
	}
}

// TestKeepToCore has a worker keep to one core, with threads that it has and that it makes later. One that has the core for itself runs
// as many goroutines at once as before, and one that shares it with other ranks one.
func TestKeepToCore(t *testing.T) {
	if r := play(t, "keep", 1); r.ExitCode != ExitDone {
		t.Errorf("%+v, stderr %q", r.Result, r.stderr)
	}
}

// A process that is started while its launcher asks for it is woken rarely, and its threads and the launcher's
// own thread are as they were.
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
	back := rarelyWoken()
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
	if got := strings.TrimSpace(string(text)); err != nil && !errors.Is(err, os.ErrPermission) || err == nil && got != fmt.Sprint(int(timerSlack)) {
		t.Errorf("the child has %q ns (%v), want %d", got, err, timerSlack)
	}
	if got := slack(); got != was {
		t.Errorf("a slack of %d ns is left, it was %d", got, was)
	}
}

// keep has a worker keep to a core, and looks where its threads may run: those that there were, and new ones.
func keep(w *Worker) int {
	own, procs := ownCores(), runtime.GOMAXPROCS(0)
	w.core = &own[len(own)-1]
	for range 2 {
		go func() { // ends with the process
			for i := 0; ; i++ {
				_ = i
			}
		}()
	}
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
	var threads, checked sync.WaitGroup
	checked.Add(1)
	for range 4 {
		threads.Add(1)
		go func() {
			runtime.LockOSThread()
			threads.Done()
			checked.Wait()
		}()
	}
	threads.Wait()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil || len(entries) < 5 {
		fmt.Fprintln(os.Stderr, len(entries), "threads", err)
		return 5
	}
	for _, e := range entries {
		id, _ := strconv.Atoi(e.Name())
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(id, &set); err != nil || set.Count() != 1 || !set.IsSet(core) {
			fmt.Fprintln(os.Stderr, "thread", id, "may run on", set.Count(), "cores", err)
			return 5
		}
	}
	checked.Done()
	return done(w)
}
