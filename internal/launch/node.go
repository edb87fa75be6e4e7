package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
)

// A nodeLauncher runs one job on this node, over all attempts.
type nodeLauncher struct {
	job        Job
	program    string
	membership Membership
	con        *console
	signals    *Signals
	policy     stopPolicy
	asked      string // the signal that asked the workers to stop; "": none
	maxStep    int64  // of any worker
}

func newNodeLauncher(job Job) (*nodeLauncher, error) {
	if err := job.resolve(); err != nil {
		return nil, err
	}
	path, err := program()
	if err != nil {
		return nil, fmt.Errorf("path of this program: %w", err)
	}
	l := &nodeLauncher{
		job: job, program: path, membership: job.Membership, policy: stopPolicy{patient: job.Patient},
		con: newConsole(job.Stderr), signals: job.Signals,
	}
	if l.membership == nil {
		l.membership = &singleNode{job: &l.job, retries: Retries{Max: job.MaxRestarts}}
	}
	if l.signals == nil {
		l.signals = CatchSignals()
	}
	return l, nil
}

// close ends newNodeLauncher's goroutines after the last worker. It releases the signals before it waits for the
// console, so that a blocked terminal does not delay that.
func (l *nodeLauncher) close(status int) {
	if l.job.Signals == nil {
		l.signals.Release()
	} else {
		l.signals.Conclude(status, os.Exit)
	}
	l.con.close()
}

// print queues text for the console, after earlier events, without terminal control characters.
func (l *nodeLauncher) print(text string) {
	l.con.put(false, func() { io.WriteString(l.con.w, terminal.Text(text)) })
}

// say prints a line.
func (l *nodeLauncher) say(format string, args ...any) {
	l.print(fmt.Sprintf("cprun: "+format+"\n", args...))
}

// notice prints a line, except with --quiet.
func (l *nodeLauncher) notice(format string, args ...any) {
	if l.job.Show != ShowNone {
		l.say(format, args...)
	}
}

func (l *nodeLauncher) run(ctx context.Context) Result {
	var v Verdict
	for {
		start, err := l.next(ctx)
		if err != nil {
			return l.notStarted(v, err)
		}
		l.warnOversubscribed(&start)
		t := l.attempt(ctx, start)
		v = l.membership.End(ctx, t.ending(ctx))
		t.report(v)
		if !v.Again {
			return v.Result
		}
	}
}

// errStop ends the wait for a start on request.
var errStop = errors.New("asked to stop")

// next waits for the next start and handles signals meanwhile. A signal that arrives together with a start goes to its
// workers.
func (l *nodeLauncher) next(ctx context.Context) (Start, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type next struct {
		Start
		err error
	}
	got := make(chan next, 1)
	go func() { // ended by cancel
		var n next
		n.Start, n.err = l.membership.Next(ctx)
		got <- n
	}()
	for {
		select {
		case n := <-got:
			if n.err == nil {
				n.err = l.job.fits(&n.Start)
			}
			return n.Start, n.err
		case sig := <-l.signals.c:
			switch l.policy.on(sig, time.Now()) {
			case actStop:
				l.asked = signalName(sig.(syscall.Signal))
				cancel(fmt.Errorf("%s: %w", l.asked, errStop))
			case actKill:
				cancel(errStop)
			case actStatus:
				l.say("SIGQUIT: no worker runs yet")
			case actNone:
			}
		}
	}
}

// notStarted returns the result of a job without a next start. v is the verdict of the start before.
func (l *nodeLauncher) notStarted(v Verdict, err error) Result {
	r := v.Result
	if l.asked != "" && errors.Is(err, errStop) {
		l.notice("%v before the next start", err)
		r.ExitCode, r.Stopped, r.First = ExitStopped, true, nil
		return r
	}
	if over := (*Over)(nil); errors.As(err, &over) {
		if over.Why != "" {
			l.say("%s", over.Why)
		}
		return over.Result
	}
	r.ExitCode, r.Err = ExitFailed, err
	return r
}
