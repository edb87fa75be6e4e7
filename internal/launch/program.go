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

// Program is this program, started again with arguments of its own, such as one run of an experiment. It ends when
// this process dies for any reason, and its own child processes end with it.
type Program struct {
	cmd   *exec.Cmd
	spawn *spawner
	ended chan struct{} // closed when it has ended

	mu     sync.Mutex
	reaped bool // guarded by mu: the system may have given its pid to another process
	code   int  // once it has ended; -1: a signal ended it
}

// StartProgram starts it, with its output going to out. It is in a process group of its own, so that Ctrl-C
// reaches this process only. before begins the command line, such as srun with flags.
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

// reap waits for its end.
func (p *Program) reap() {
	_ = p.cmd.Wait() // the status tells; an output that could not be copied is not missed
	p.mu.Lock()
	p.reaped, p.code = true, p.cmd.ProcessState.ExitCode()
	p.mu.Unlock()
	p.spawn.close()
	close(p.ended)
}

// signal sends one, unless it has ended.
func (p *Program) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = p.cmd.Process.Signal(sig) // it may have ended just now
	}
}

// Ask asks it to end by itself.
func (p *Program) Terminate() { p.signal(syscall.SIGTERM) }

// Hurry has it end its workers at once, and wait until they have given back their devices, once it was asked.
func (p *Program) Interrupt() { p.signal(syscall.SIGINT) }

// Wait returns the exit status of the ended program, -1 if a signal ended it. After limit it asks the program to end,
// and reports it late; after grace more it hurries it, after grace more kills it, and after grace more leaves it
// behind, since it hangs in the kernel. A limit of 0 is none.
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

// A spawner is a goroutine that keeps one OS thread. The kernel sends the parent death signal
// when the THREAD that forked ends, not the process, so all workers are forked from a thread
// that lives as long as they do.
type spawner struct {
	calls chan func()
	done  chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{make(chan func()), make(chan struct{})}
	go func() { // ended and awaited by close
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
