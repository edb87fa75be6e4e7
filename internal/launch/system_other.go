//go:build !linux || portable

package launch

import (
	"io"
	"os"
	"os/exec"
	"syscall"
)

// grouped puts a child process into a group of its own, so that Ctrl-C reaches the launcher only. A worker ends
// by itself when the launcher dies, since the channel between them then ends: see Attach.
func grouped() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// tie gives a launcher that StartProgram starts a pipe whose other end this process holds; see followParent.
func tie(cmd *exec.Cmd) error {
	cmd.Env = append(cmd.Environ(), envTied+"=1")
	_, err := cmd.StdinPipe()
	return err
}

// followParent ends a launcher that StartProgram has started when the process that started it is gone.
func followParent() {
	if os.Getenv(envTied) != "" {
		go func() { // ends with the process
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(ExitFailed)
		}()
	}
}

// awaitExit waits for the end of a process. The system may give its id to another process before its group
// has been killed, which takes as many new processes as there are ids.
func awaitExit(cmd *exec.Cmd) { _ = cmd.Wait() }

// ownCores returns nil: the cores are not known, so no rank is pinned.
func ownCores() []int { return nil }

// pin does nothing, and nothing calls it, since ownCores returns nil.
func pin(int) error { return nil }

func rarelyWoken() (back func()) { return func() {} }
