package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// agent is one job on this node, over all its attempts.
type agent struct {
	job     Job
	program string
	host    string
	secret  []byte
	dir     *jobDir
	con     *console
	mail    *mailbox
	spawn   *spawner
	signals *Signals
	policy  stopPolicy
	asked   os.Signal // that asked the workers to stop
	maxStep int64     // that any worker has reached
}

func newAgent(job Job) (*agent, error) {
	if err := job.resolve(); err != nil {
		return nil, err
	}
	if job.RunID == "" {
		job.RunID = newRunID(time.Now())
	}
	path, err := program()
	if err != nil {
		return nil, fmt.Errorf("path of this program: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	if err := os.MkdirAll(job.LogDir, 0o700); err != nil {
		return nil, fmt.Errorf("log directory: %w", err)
	}
	dir, err := newJobDir(runtimeBases()...)
	if err != nil {
		return nil, err
	}
	a := &agent{job: job, program: path, host: host, secret: newSecret(), dir: dir}
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
// removed and the signals back at their defaults before the console is waited for, so that a
// terminal that takes no more output cannot hold either.
func (a *agent) close() {
	a.spawn.close()
	a.signals.Release()
	if err := a.dir.close(); err != nil {
		a.notice("private directory %s: %v", a.dir.path, err)
	}
	a.mail.close()
	a.con.close()
}

// say queues text for the console behind the events that came before it.
func (a *agent) say(text string) {
	a.mail.put(false, func() { a.con.printf("%s", text) })
}

// notice is a line that --quiet leaves out.
func (a *agent) notice(format string, args ...any) {
	if a.job.Show != ShowNone {
		a.say(fmt.Sprintf("cprun: "+format+"\n", args...))
	}
}

func (a *agent) run(ctx context.Context) Result {
	var r Result
	started := int64(-1) // the furthest step when the last restart began; -1: there was none
	for {
		t := a.attempt(ctx, r.Restarts)
		r.ExitCode, r.Stopped, r.Err = t.outcome(ctx)
		r.First, r.Failures = nil, t.failures
		if len(t.failures) > 0 && r.Err == nil {
			r.First = &t.failures[0]
		}
		retry := r.ExitCode == ExitFailed && r.Err == nil && a.asked == nil && t.live == 0 && r.Restarts < a.job.MaxRestarts
		if retry && a.maxStep <= started {
			retry = false
			a.say(fmt.Sprintf("cprun: not started again: no step beyond %d was reached since the last restart\n", a.maxStep))
		}
		t.report(r.ExitCode)
		if !retry {
			return r
		}
		started = a.maxStep
		r.Restarts++
		a.say(fmt.Sprintf("cprun: restart %d of %d\n", r.Restarts, a.job.MaxRestarts))
		if err := a.renew(); err != nil {
			a.say(fmt.Sprintf("cprun: %v\n", err))
			r.Err = err
			return r
		}
	}
}

// renew makes the directory and the secret of the next attempt. The old directory has the
// old sockets in it, or is gone, as the one under XDG_RUNTIME_DIR when the user has logged out.
func (a *agent) renew() error {
	dir, err := newJobDir(runtimeBases()...)
	if err != nil {
		return err
	}
	old := a.dir
	a.dir, a.secret = dir, newSecret()
	return old.close()
}

// newChild prepares a worker that has not been started; an error is the launcher's own.
func (a *agent) newChild(local, restart int) (*child, []byte, error) {
	h := hello{
		RunID: a.job.RunID, Rank: a.job.Place.FirstRank + local, WorldSize: a.job.Place.WorldSize,
		LocalRank: local, LocalWorldSize: a.job.NProc, NodeRank: a.job.Place.NodeRank,
		Restart: restart, SocketDir: a.dir.path, Secret: a.secret, Payload: a.job.Payload,
	}
	greeting, err := encodeFrame(command{Kind: commandHello, Hello: &h})
	if err != nil {
		return nil, nil, err
	}
	log, err := openLog(a.job.LogDir, h.Rank)
	if err != nil {
		return nil, nil, err
	}
	if info, err := log.Stat(); err == nil && info.Size() > 0 {
		fmt.Fprintf(log, "\n--- run %s, restart %d, %s ---\n", h.RunID, restart, time.Now().UTC().Format(time.RFC3339))
	}
	cmd := exec.Command(a.program, a.job.Argv...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = workerEnv(os.Environ(), h)
	return &child{
		rank: h.Rank, localRank: local, cmd: cmd, log: filepath.Join(a.job.LogDir, filepath.Base(log.Name())),
		relay: &relay{
			log: log, con: a.con, prefix: fmt.Sprintf("rank %d", h.Rank),
			show:    a.job.Show == ShowAll || a.job.Show == ShowFirst && h.Rank == 0,
			abandon: make(chan struct{}), done: make(chan struct{}),
		},
	}, greeting, nil
}

// errEnded is the fault of a run whose context ended without a cause of its own.
var errEnded = errors.New("ended by its caller")
