//go:build !linux || portable

package launch

import (
	"io"
	"os"
	"os/exec"
	"syscall"
)

// grouped puts a child process into its own process group, so that Ctrl-C reaches the launcher only. A worker ends by
// itself when the launcher dies and their channel breaks: see Attach.
func grouped() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// tie gives a launcher started by StartProgram a pipe whose other end this process holds; see followParent.
func tie(cmd *exec.Cmd) error {
	cmd.Env = append(cmd.Environ(), envTied+"=1")
	_, err := cmd.StdinPipe()
	return err
}

// followParent ends a launcher started by StartProgram when its parent process dies.
func followParent() {
	if os.Getenv(envTied) != "" {
		go func() { // ends with the process
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(ExitFailed)
		}()
	}
}

// awaitExit waits for the end of a process. The system could reuse its id before its group is killed, but only after it
// used all other ids.
func awaitExit(cmd *exec.Cmd) { _ = cmd.Wait() }

// ownCores returns nil: the cores are unknown, so no rank is pinned.
func ownCores() []int { return nil }

// pin does nothing. It is not called, since ownCores returns nil.
func pin(int) error { return nil }

func withTimerSlack() (restore func()) { return func() {} }
