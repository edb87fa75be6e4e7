package launch

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sameSignal is the time in which copies of a signal count as one: a batch system, or a program such as timeout,
// signals the launcher and then its process group.
const sameSignal = 100 * time.Millisecond

type action int

const (
	actNone   action = iota
	actStop          // ask the workers for a checkpoint and a clean end
	actKill          // end at once
	actStatus        // print the workers' waits and continue
)

// A stopPolicy decides the meaning of a signal to the launcher. The caller passes the time, for tests.
type stopPolicy struct {
	patient   bool // SIGTERM never ends the job at once
	asked     bool
	first     os.Signal // of SIGINT and SIGTERM
	forceable time.Time // when first arrived
}

func (p *stopPolicy) on(sig os.Signal, now time.Time) action {
	if sig == syscall.SIGQUIT {
		return actStatus
	}
	again := p.asked
	p.asked = true
	if sig == syscall.SIGINT || sig == syscall.SIGTERM && !p.patient {
		impatient := sig == syscall.SIGINT && p.first == syscall.SIGTERM // no copy
		switch {
		case p.first == nil:
			p.first, p.forceable = sig, now
		case impatient || now.Sub(p.forceable) >= sameSignal:
			return actKill
		}
	}
	if again {
		return actNone
	}
	return actStop
}

// signalName returns the name of a signal, or its number.
func signalName(sig syscall.Signal) string {
	return cmp.Or(unix.SignalName(sig), fmt.Sprintf("signal %d", int(sig)))
}

// Signals are a launcher's requests to stop: SIGINT, SIGTERM, SIGUSR1, SIGHUP.
type Signals struct {
	c        chan os.Signal
	released context.Context
	release  func()
}

// stopSignals returns the requests to stop. SIGHUP stays ignored if it was ignored at the start (nohup).
func stopSignals(more ...os.Signal) []os.Signal {
	if !signal.Ignored(syscall.SIGHUP) {
		more = append(more, syscall.SIGHUP)
	}
	return append(more, syscall.SIGTERM, syscall.SIGUSR1)
}

// CatchSignals catches requests to stop, and SIGQUIT, for Before and for a Job.
func CatchSignals() *Signals {
	s := &Signals{c: make(chan os.Signal, 16)}
	s.released, s.release = context.WithCancel(context.Background())
	signal.Notify(s.c, stopSignals(syscall.SIGINT, syscall.SIGQUIT)...)
	// Ctrl-C also ends the tee of "cprun | tee". A write to the broken pipe would then kill the launcher by SIGPIPE in
	// the middle of the checkpoint. With this Notify the write only fails. It is never undone, for the same reason.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return s
}

// Release restores the signals' default effects.
func (s *Signals) Release() {
	signal.Stop(s.c)
	s.release()
}

// concludeTime bounds the end of a finished program after a signal.
const concludeTime = 2 * time.Second

// Conclude prepares the end of the program with that status. A later signal does not change the status: it limits the
// time for the remaining cleanup, such as output to a blocked terminal, and a second one ends the program at once.
// Release undoes it.
func (s *Signals) Conclude(status int, exit func(status int)) {
	go func() { // ended by Release, or with the process
		select {
		case <-s.c:
		case <-s.released.Done():
			return
		}
		select {
		case <-s.c:
		case <-time.After(concludeTime):
		case <-s.released.Done():
			return
		}
		exit(status)
	}()
}

// Before runs check and waits for it. If a request to stop comes first, asked names the signal, and the caller must end
// the process, since check continues. SIGQUIT prints a line.
func (s *Signals) Before(check func() error) (asked string, err error) {
	done := make(chan error, 1)
	go func() { done <- check() }() // ended by its end or the process's
	for {
		select {
		case err := <-done:
			return "", err
		case sig := <-s.c:
			if sig != syscall.SIGQUIT {
				return signalName(sig.(syscall.Signal)), nil
			}
			fmt.Fprintln(os.Stderr, "cprun: SIGQUIT: this process has no workers yet")
		}
	}
}
