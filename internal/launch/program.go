package launch

import (
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Program is a second process of this program, such as one run of an experiment. It ends when this process dies for any
// reason, together with its own workers.
type Program struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed after its end
}

// StartProgram starts it with its output going to out. It has its own process group, so that Ctrl-C reaches this
// process only. before is the start of the command line, such as srun with flags.
func StartProgram(before, args []string, out io.Writer) (*Program, error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	line := append(append(append([]string{}, before...), path), args...)
	p := &Program{cmd: exec.Command(line[0], line[1:]...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.WaitDelay = flushTime
	p.cmd.SysProcAttr = grouped()
	if err := tie(p.cmd); err != nil {
		return nil, err
	}
	if len(before) == 0 {
		p.cmd.Args[0] = os.Args[0]
	}
	started := make(chan error)
	go func() { // ends with the program
		runtime.LockOSThread() // see Run
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // the status is enough; a lost part of the output is no error
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Terminate asks the program to end.
func (p *Program) Terminate() { p.signal(syscall.SIGTERM) }

// Interrupt makes the program, after Terminate, end its workers at once and wait until they have released their
// devices.
func (p *Program) Interrupt() { p.signal(syscall.SIGINT) }

func (p *Program) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) } // it may have ended

// Wait returns the exit status of the ended program, -1 after a signal. After limit it calls Terminate and reports
// late; after each further grace it calls Interrupt, then kills, then returns, since the process hangs in the kernel. A
// limit of 0 is none.
func (p *Program) Wait(limit, grace time.Duration) (status int, late bool) {
	var over <-chan time.Time
	if limit > 0 {
		over = time.After(limit)
	}
	for _, do := range []func(){p.Terminate, p.Interrupt, func() { p.signal(syscall.SIGKILL) }, func() {}} {
		select {
		case <-p.ended:
			return p.cmd.ProcessState.ExitCode(), late
		case <-over:
			late = true
			do()
			over = time.After(grace)
		}
	}
	return -1, late
}
