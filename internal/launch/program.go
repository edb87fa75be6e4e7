package launch

import (
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Program is a second process of this program, such as one run of an experiment. It ends when this process dies for any
// reason, together with its own workers.
type Program struct {
	cmd   *exec.Cmd
	spawn *spawner
	ended chan struct{} // closed after its end

	mu     sync.Mutex
	reaped bool // guarded by mu: the system may have reused its pid
	code   int  // after the end; -1: ended by a signal
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
	p.spawn = newSpawner()
	if err := p.spawn.do(p.cmd.Start); err != nil {
		p.spawn.close()
		return nil, err
	}
	go p.reap()
	return p, nil
}

func (p *Program) reap() {
	_ = p.cmd.Wait() // the status is enough; a lost part of the output is no error
	p.mu.Lock()
	p.reaped, p.code = true, p.cmd.ProcessState.ExitCode()
	p.mu.Unlock()
	p.spawn.close()
	close(p.ended)
}

// signal sends sig, unless the process has ended.
func (p *Program) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = p.cmd.Process.Signal(sig) // it may have ended just now
	}
}

// Terminate asks the program to end.
func (p *Program) Terminate() { p.signal(syscall.SIGTERM) }

// Interrupt makes the program, after Terminate, end its workers at once and wait until they have released their
// devices.
func (p *Program) Interrupt() { p.signal(syscall.SIGINT) }

// Wait returns the exit status of the ended program, -1 after a signal. After limit it calls Terminate and reports
// late; after each further grace it calls Interrupt, then kills, then returns, since the process hangs in the kernel. A
// limit of 0 is none.
func (p *Program) Wait(limit, grace time.Duration) (status int, late bool) {
	var over <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		over = timer.C
	}
	for _, do := range []func(){p.Terminate, p.Interrupt, func() { p.signal(syscall.SIGKILL) }, func() {}} {
		select {
		case <-p.ended:
			return p.code, late
		case <-over:
			late = true
			do()
			over = time.After(grace)
		}
	}
	return -1, late
}

// A spawner forks on one OS thread that it keeps. The kernel sends the parent death signal when the forking thread
// ends, not the process, so the thread must live as long as the workers.
type spawner struct {
	calls chan func()
	done  chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{make(chan func()), make(chan struct{})}
	go func() { // close ends it and waits for it
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for call := range s.calls {
			call()
		}
	}()
	return s
}

func (s *spawner) do(f func() error) error {
	result := make(chan error)
	s.calls <- func() { result <- f() }
	return <-result
}

func (s *spawner) close() {
	close(s.calls)
	<-s.done
}
