//go:build !portable

package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// grouped puts a child process into its own process group, so that Ctrl-C reaches the launcher only. The kernel kills
// the child when the thread that forked it ends.
func grouped() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// tie does nothing: the kernel ends such a child with this process.
func tie(*exec.Cmd) error { return nil }

// followParent does nothing: the kernel kills a launcher started by StartProgram.
func followParent() {}

// awaitExit waits for the end of a process and leaves it a zombie, so that its process id and group are not reused
// before the group is killed.
func awaitExit(cmd *exec.Cmd) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// ownCores lists the cores that this process may use, or nil if unknown.
func ownCores() (cores []int) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil
	}
	for i := range maxCores {
		if set.IsSet(i) {
			cores = append(cores, i)
		}
	}
	return cores
}

// pin pins all threads of this process, present and future, to one core.
func pin(core int) error {
	var set unix.CPUSet
	set.Set(core)
	// A thread inherits the cores of its creator, so the first pass that finds no new thread is the last.
	seen := map[string]bool{}
	for fresh := true; fresh; {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		fresh = false
		for _, t := range threads {
			if seen[t.Name()] {
				continue
			}
			seen[t.Name()], fresh = true, true
			id, err := strconv.Atoi(t.Name())
			if err == nil {
				err = unix.SchedSetaffinity(id, &set)
			}
			if err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
				return fmt.Errorf("thread %s: %w", t.Name(), err)
			}
		}
	}
	return nil
}

// timerSlack bounds the kernel's delay of a sleep, to save wakeups, for ranks that share a core: twenty times the
// default. Go's monitor (sysmon) sleeps for 20 microseconds repeatedly while goroutines run, and each wakeup preempts
// another rank of the core. With this slack the ranks make a third fewer context switches. Waits for data use no timer
// and are not delayed.
const timerSlack = time.Millisecond

// withTimerSlack sets timerSlack for the processes that the calling thread starts, until restore is called. A thread or
// process inherits the slack of its creator, and an unprivileged process can set only its own.
func withTimerSlack() (restore func()) {
	was, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil || unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack), 0, 0, 0) != nil {
		return func() {} // which costs only speed
	}
	return func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(was), 0, 0, 0) }
}
