package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
)

// An agent runs one job on this node, over all its attempts.
type agent struct {
	job     Job
	program string
	cohort  Cohort
	dir     *jobDir
	con     *console
	mail    *mailbox
	spawn   *spawner
	signals *Signals
	policy  stopPolicy
	asked   string // the signal that asked the workers to stop; "": none
	maxStep int64  // that any worker has reached
}

func newAgent(job Job) (*agent, error) {
	if err := job.resolve(); err != nil {
		return nil, err
	}
	if job.RunID == "" {
		job.RunID = NewRunID(time.Now())
	}
	path, err := program()
	if err != nil {
		return nil, fmt.Errorf("path of this program: %w", err)
	}
	dir, err := newJobDir(runtimeBases()...)
	if err != nil {
		return nil, err
	}
	a := &agent{job: job, program: path, cohort: job.Cohort, dir: dir, policy: stopPolicy{patient: job.Patient}}
	if a.cohort == nil {
		a.cohort = newAlone(&a.job)
	}
	a.con = newConsole(job.Stderr)
	a.mail = newMailbox()
	a.spawn = newSpawner()
	if a.signals = job.Signals; a.signals == nil {
		a.signals = CatchSignals()
	}
	signal.Notify(a.signals.c, syscall.SIGQUIT)
	return a, nil
}

// close ends what newAgent has started, when no worker is left. It has the private directory
// removed before the console is waited for, and signals no longer taken for requests, so that a
// terminal that takes no more output holds up neither.
func (a *agent) close(status int) {
	a.spawn.close()
	if a.job.Signals == nil {
		a.signals.Release()
	} else {
		a.signals.Conclude(status, os.Exit)
	}
	if err := a.dir.close(); err != nil {
		a.notice("private directory %s: %v", a.dir.path, err)
	}
	a.mail.close()
	a.con.close()
}

// say queues text for the console, after earlier events.
func (a *agent) say(text string) {
	a.mail.put(false, func() { a.con.printf("%s", text) })
}

// notice prints a line that --quiet leaves out.
func (a *agent) notice(format string, args ...any) {
	if a.job.Show != ShowNone {
		a.say(fmt.Sprintf("cprun: "+format+"\n", args...))
	}
}

func (a *agent) run(ctx context.Context) Result {
	var v Verdict
	for {
		start, err := a.next(ctx, v.After)
		if err != nil {
			return a.notBegun(v, err)
		}
		a.warnCrowded(&start)
		t := a.attempt(ctx, start)
		v = a.cohort.End(ctx, t.ending(ctx))
		t.report(v)
		if !v.Again {
			return v.Result
		}
		if err := a.renew(); err != nil {
			a.say(fmt.Sprintf("cprun: %v\n", err))
			v.Err = err
			return v.Result
		}
	}
}

// errStop ends the wait for a start on request.
var errStop = errors.New("asked to stop")

// next waits for the next start, and looks at signals meanwhile. One that comes together with a start
// is for the workers of it.
func (a *agent) next(ctx context.Context, after time.Duration) (Start, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type next struct {
		Start
		err error
	}
	got := make(chan next, 1)
	go func() { // ended by cancel
		if !pause(ctx, after) {
			got <- next{err: context.Cause(ctx)}
			return
		}
		s, err := a.cohort.Next(ctx)
		got <- next{s, err}
	}()
	for {
		select {
		case n := <-got:
			if n.err == nil && a.job.OnStart != nil {
				n.err = a.job.OnStart(&n.Start)
			}
			if n.err == nil {
				n.err = a.job.fits(&n.Start)
			}
			return n.Start, n.err
		case sig := <-a.signals.c:
			switch a.policy.on(sig, time.Now()) {
			case actStop:
				a.asked = signalName(sig.(syscall.Signal))
				cancel(fmt.Errorf("%s: %w", a.asked, errStop))
			case actKill:
				cancel(errStop)
			case actTell:
				a.say("cprun: SIGQUIT: no worker runs yet\n")
			case actNone:
			}
		}
	}
}

// pause waits for d, and reports whether ctx has not ended before.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// notBegun returns the result of a job that does not come to its next start. v ended the start before.
func (a *agent) notBegun(v Verdict, err error) Result {
	r := v.Result
	if a.asked != "" && errors.Is(err, errStop) {
		a.notice("%v before the next start", err)
		r.ExitCode, r.Stopped, r.First = ExitStopped, true, nil
		return r
	}
	if over := (*Over)(nil); errors.As(err, &over) {
		if over.Why != "" {
			a.say(fmt.Sprintf("cprun: %s\n", over.Why))
		}
		return over.Result
	}
	r.ExitCode, r.Err = ExitFailed, err
	return r
}

// renew makes the directory of the next attempt. The old one has the old sockets in it, or is gone,
// as the one under XDG_RUNTIME_DIR when the user has logged out.
func (a *agent) renew() error {
	dir, err := newJobDir(runtimeBases()...)
	if err != nil {
		return err
	}
	old := a.dir
	a.dir = dir
	return old.close()
}

// newChild prepares a worker that has not been started; an error is the launcher's own.
func (a *agent) newChild(local int, s *Start) (*child, []byte, error) {
	h := hello{
		RunID: cmp.Or(s.RunID, a.job.RunID), Rank: s.Place.FirstRank + local, WorldSize: s.Place.WorldSize,
		LocalRank: local, LocalWorldSize: a.job.NProc, NodeRank: s.Place.NodeRank, Node: a.job.Node,
		Device: a.job.Device + local, Interface: a.job.Interface,
		Restart: s.Number, SocketDir: a.dir.path, Listen: s.Listen, Hosts: s.Hosts, Secret: s.Secret,
		Payload: s.Payload,
	}
	h.Core = h.core(os.Getenv(envMaxProcs) != "")
	greeting, err := encodeFrame(command{Kind: commandHello, Hello: &h})
	if err != nil {
		return nil, nil, err
	}
	log, err := openLog(s.Logs, h.Rank)
	if err != nil {
		return nil, nil, err
	}
	if info, err := log.Stat(); err == nil && info.Size() > 0 {
		fmt.Fprintf(log, "\n--- run %s, restart %d, %s ---\n", h.RunID, s.Number, time.Now().UTC().Format(time.RFC3339))
	}
	cmd := exec.Command(a.program, a.job.Argv...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = workerEnv(os.Environ(), h)
	return &child{
		rank: h.Rank, localRank: local, cmd: cmd, shares: h.Core != nil,
		log: terminal.Name(filepath.Join(s.Logs.Name(), logName(h.Rank))),
		relay: &relay{
			log: log, con: a.con, prefix: fmt.Sprintf("rank %d", h.Rank),
			show:    a.job.Show == ShowAll || a.job.Show == ShowFirst && h.Rank == 0,
			abandon: make(chan struct{}), done: make(chan struct{}),
		},
	}, greeting, nil
}
