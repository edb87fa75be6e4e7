package launch

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A batch system may send one request twice: to the launcher, and to its process group. Copies
// within these times are one.
const (
	sameTerm = 100 * time.Millisecond
	// A program such as timeout signals the process and then its group, microseconds apart.
	// No two key presses of a person are that close.
	sameInt = 20 * time.Millisecond
)

type action int

const (
	actNone   action = iota
	actStop          // ask the workers for a checkpoint and a clean end
	actKill          // end at once
	actStatus        // print the workers' waits and go on
)

// stopPolicy decides what a signal at the launcher means. It is told the time, so that it can
// be tested without any.
type stopPolicy struct {
	patient   bool // SIGTERM never ends at once
	asked     bool
	first     os.Signal // of SIGINT and SIGTERM
	forceable time.Time // when it came
}

func (p *stopPolicy) on(sig os.Signal, now time.Time) action {
	if sig == syscall.SIGQUIT {
		return actStatus
	}
	again := p.asked
	p.asked = true
	if sig == syscall.SIGINT || sig == syscall.SIGTERM && !p.patient {
		same := sameTerm
		switch {
		case p.first == nil:
			p.first, p.forceable = sig, now
			same = time.Duration(math.MaxInt64)
		case sig == syscall.SIGINT && p.first == syscall.SIGTERM:
			same = 0 // no copy: somebody has lost patience
		case sig == syscall.SIGINT:
			same = sameInt
		}
		if now.Sub(p.forceable) >= same {
			return actKill
		}
	}
	if again {
		return actNone
	}
	return actStop
}

// signalName returns the name of a signal, or its number where it has none.
func signalName(sig syscall.Signal) string {
	return cmp.Or(unix.SignalName(sig), fmt.Sprintf("signal %d", int(sig)))
}

// Signals are the requests to stop that a launcher gets: SIGINT, SIGTERM, SIGUSR1, SIGHUP.
type Signals struct {
	c        chan os.Signal
	released chan struct{}
	release  sync.Once
}

// CatchSignals keeps later requests to stop, for Before and for the Job that gets them. SIGHUP stays ignored if it was
// ignored at the start (nohup).
func CatchSignals() *Signals {
	s := &Signals{c: make(chan os.Signal, 16), released: make(chan struct{})}
	sigs := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGUSR1}
	if !signal.Ignored(syscall.SIGHUP) {
		sigs = append(sigs, syscall.SIGHUP)
	}
	signal.Notify(s.c, sigs...)
	// Where stderr is a pipe whose reader has gone (Ctrl-C ends the tee of "cprun | tee" as
	// well), SIGPIPE would kill the launcher in the middle of the checkpoint. Once a signal
	// has been asked for, the write only fails. This is never taken back, for the same reason.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return s
}

// Release gives the signals their default effects back.
func (s *Signals) Release() {
	s.release.Do(func() {
		signal.Stop(s.c)
		close(s.released)
	})
}

// concludeTime bounds the end of a finished program after a signal.
const concludeTime = 2 * time.Second

// Conclude says that all is done and the program is about to end with that status. A signal that
// still comes does not make it another one: it hurries what is left, such as a terminal that takes
// no more output, and a second one ends the program at once. Release takes it back.
func (s *Signals) Conclude(status int, exit func(status int)) {
	go func() { // ended by Release, or the end of the program
		var late <-chan time.Time
		for signals := 0; ; {
			select {
			case <-s.c:
				if signals++; signals == 1 {
					late = time.After(concludeTime)
					continue
				}
			case <-late:
			case <-s.released:
				return
			}
			exit(status)
			return
		}
	}()
}

// Before runs check, and waits for it unless a request to stop comes first: then asked names
// it. The caller is to end the process, since check goes on.
func (s *Signals) Before(check func() error) (asked string, err error) {
	done := make(chan error, 1)
	go func() { done <- check() }() // ended by its end or the process's
	select {
	case err := <-done:
		return "", err
	case sig := <-s.c:
		return signalName(sig.(syscall.Signal)), nil
	}
}
