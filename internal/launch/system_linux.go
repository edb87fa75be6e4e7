//go:build !portable

package launch

import (
	"errors"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/cores"
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

func ownCores() []int { return cores.Own() }

func pin(core int) error { return cores.Pin(core) }

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
