package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch/waits"
)

// Exit statuses of a job; Result.ExitCode is one of them.
const (
	ExitDone        = 0   // every worker reported that it was done
	ExitFailed      = 1   // a rank failed
	ExitInput       = 2   // wrong input, on any node
	ExitStopped     = 75  // stopped on request after a checkpoint; the same command resumes (EX_TEMPFAIL)
	ExitInterrupted = 130 // interrupted twice: ended at once
)

// Show selects the workers' output for the terminal. The log files contain all of it.
type Show int

// The values of Show.
const (
	ShowFirst Show = iota // rank 0 of the world
	ShowAll
	ShowNone // and no notices: errors only
)

// RankRange numbers the processes of this node among those of all nodes.
type RankRange struct {
	NodeRank  int
	FirstRank int // rank of the first process of this node
	WorldSize int // over all nodes
}

// Job describes the workers on this node.
type Job struct {
	RunID string   // names the job in messages and in the environment; "": a random name
	NProc int      // processes on this node
	Argv  []string // of the worker, without the program: []string{"worker", "train"}
	// Payload is passed to every worker unchanged; at most 512 KiB.
	Payload []byte
	// Logs is the directory for rank-0003.log and so on. The caller keeps it open.
	Logs   *os.Root
	Stderr io.Writer
	Show   Show
	// OnEvent is called for each event of each worker, in the worker's order, never concurrently; nil: no call. While
	// it is slow, progress events may be dropped.
	OnEvent func(rank int, e Event)
	// OnStatus is called every Watch with the wait states of this node's workers, without waiting for silent ones, and
	// without rows before and after each start. It is called like OnEvent; nil: never.
	OnStatus    func(s *Start, rows []waits.WaitState)
	Watch       time.Duration
	MaxRestarts int
	// Node names this node in messages; "": the host name.
	Node string
	// Membership connects the nodes of the job; nil: there is one node, with MaxRestarts. With a Membership, each start
	// brings Logs and Payload.
	Membership Membership
	// Device is the number of the first worker's GPU among the visible GPUs.
	Device int
	// Interface is the network interface towards the other nodes; "": there is one node.
	Interface string
	// Patient ignores a second SIGTERM, since batch systems send several.
	Patient bool
	// Stateless ends the workers at the first request to stop: they have no state to save.
	Stateless bool
	// Signals were caught before the job and stay caught: a signal after Run's return ends the program, with the status
	// that Run returned. nil: Run catches them.
	Signals *Signals

	times times
}

// LastTime bounds the wait for the other workers after the first is done. The last collective is complete by then, so
// no peer reports a worker that hangs in a disk or a driver.
const LastTime = 5 * time.Minute

// A times value bounds the waits for workers that end; 0: the default. Tests change it.
type times struct {
	settle time.Duration // for the other ranks to end and to report reasons, after the first failure
	grace  time.Duration // between SIGTERM and SIGKILL, after that
	last   time.Duration // until all are done, after the first
	exit   time.Duration // until all exit, after the last is done
}

// Result is how a job ended.
type Result struct {
	ExitCode int
	// First is the failure that caused the others; nil: no rank failed.
	First *Failure
	// Failures are those of the last attempt, First first.
	Failures []Failure
	// Stopped: ended on request, after a checkpoint.
	Stopped bool
	// Restarts counts the restarts of all workers.
	Restarts int
	// Err is an error of the launcher itself (no directory, no socket), for the caller to print; no rank is to blame.
	Err error
}

// Failure is how one rank failed.
type Failure struct {
	Rank int
	// Ranks counts the ranks, starting with Rank, that failed together with their node; 0: only Rank.
	Ranks    int
	Host     string
	PID      int    // 0: never started
	Cause    string // one line or several
	Hint     string // the fix; may be empty
	Phase    string // of the step; may be empty
	Step     int64  // 0: unknown
	Log      string // path of its log
	Remote   bool   // it is a victim: the cause was in another rank
	Class    Class  // likely causes first
	Order    int    // of the first signs of failure, from 1; 0: unknown
	TimedOut bool   // it, or a rank that it has heard of, waited for too long
	// WaitState is its work and its waits at that time; nil: unknown.
	WaitState *waits.WaitState `json:"Standing"`
	Tail      []string         // the last lines of its output, unless already printed
}

// Error returns the first line of the report.
func (f *Failure) Error() string {
	line, _, _ := strings.Cut(f.Cause, "\n")
	if f.Ranks > 0 {
		return fmt.Sprintf("node %s with %s: %s", f.Host, RanksOf(f.Rank, f.Ranks), line)
	}
	pid := ""
	if f.PID != 0 {
		pid = fmt.Sprintf(" (pid %d)", f.PID)
	}
	return fmt.Sprintf("rank %d failed on host %s%s: %s", f.Rank, f.Host, pid, line)
}

// RanksOf returns "rank 3" or "ranks 4 to 7": count ranks from the first.
func RanksOf(first, count int) string {
	if count == 1 {
		return fmt.Sprintf("rank %d", first)
	}
	return fmt.Sprintf("ranks %d to %d", first, first+count-1)
}

// Report returns the final block of a failed run on stderr.
func (f *Failure) Report() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cprun: %s\n", f.Error())
	if _, rest, ok := strings.Cut(f.Cause, "\n"); ok {
		for line := range strings.Lines(rest) {
			fmt.Fprintf(&b, "         %s\n", strings.TrimRight(line, "\n"))
		}
	}
	var at []string
	if f.Step > 0 {
		at = append(at, fmt.Sprintf("step %d", f.Step))
	}
	if f.Phase != "" {
		at = append(at, f.Phase)
	}
	if len(at) > 0 {
		fmt.Fprintf(&b, "  at:    %s\n", strings.Join(at, ", "))
	}
	if f.Log != "" {
		fmt.Fprintf(&b, "  log:   %s\n", f.Log)
	}
	if f.Hint != "" {
		fmt.Fprintf(&b, "  hint:  %s\n", f.Hint)
	}
	return b.String()
}

// maxPayload leaves room for base64 and the rest of the hello within one frame.
const maxPayload = 512 << 10

func (j *Job) resolve() error {
	if j.Stderr == nil {
		j.Stderr = io.Discard
	}
	t := &j.times
	t.settle, t.grace = cmp.Or(t.settle, 2*time.Second), cmp.Or(t.grace, time.Second)
	t.last, t.exit = cmp.Or(t.last, LastTime), cmp.Or(t.exit, 30*time.Second)
	j.RunID, j.Node = cmp.Or(j.RunID, NewRunID(time.Now())), cmp.Or(j.Node, Hostname())
	switch {
	case j.NProc < 1:
		return fmt.Errorf("number of processes %d: at least 1 is needed", j.NProc)
	case len(j.Argv) == 0:
		return errors.New("arguments of the worker: none given")
	}
	return nil
}

// fits refuses a start in which this node has no valid ranks.
func (j *Job) fits(s *Start) error {
	p := s.Ranks
	switch {
	case p.FirstRank < 0 || p.FirstRank+j.NProc > p.WorldSize:
		return fmt.Errorf("ranks %d to %d of this node: outside a world of %d", p.FirstRank, p.FirstRank+j.NProc-1,
			p.WorldSize)
	case len(s.Payload) > maxPayload:
		return fmt.Errorf("payload for the workers: %d bytes, at most %d are allowed", len(s.Payload), maxPayload)
	case s.Logs == nil:
		return errors.New("log directory: none given")
	}
	return nil
}

// Run starts the workers of a job, waits until none is left, and returns the result. The report of a failure is its
// last output on Job.Stderr. While it runs, it handles SIGINT, SIGTERM, SIGUSR1, SIGHUP and SIGQUIT; the end of ctx
// kills the workers.
func Run(ctx context.Context, job Job) Result {
	followParent()
	runtime.LockOSThread() // the kernel sends the parent death signal when the thread that forked a worker ends
	defer runtime.UnlockOSThread()
	l, err := newNodeLauncher(job)
	if err != nil {
		return Result{ExitCode: ExitFailed, Err: err}
	}
	r := l.run(ctx)
	l.close(r.ExitCode)
	return r
}
