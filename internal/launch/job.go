package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

// Exit statuses of a job; Result.ExitCode is one of them.
const (
	ExitDone        = 0   // every worker said that it was done
	ExitFailed      = 1   // a rank failed
	ExitStopped     = 75  // stopped on request after a checkpoint; running again goes on (EX_TEMPFAIL)
	ExitInterrupted = 130 // interrupted twice: ended at once
)

// Show says which workers' output goes to the terminal. The log files hold all of it in any case.
type Show int

// What of the workers' output is shown.
const (
	ShowFirst Show = iota // rank 0 of the world
	ShowAll
	ShowNone // and no notices: errors only
)

// Place numbers the processes of this node among the processes of all nodes. The zero Place
// is the only node.
type RankRange struct {
	NodeRank  int
	FirstRank int // rank of the first process of this node
	WorldSize int // over all nodes; 0: the processes of this node are all
}

// Job is one set of workers on this node.
type Job struct {
	RunID string // names the job in messages and in the environment; "": a random one
	NProc int    // processes on this node
	Ranks RankRange
	Argv  []string // of the worker, without the program: []string{"worker", "train"}
	// Payload is handed to every worker as it is; at most 512 KiB.
	Payload []byte
	// Logs is the directory of rank-0003.log and so on. It stays the caller's, and open.
	Logs   *os.Root
	Stderr io.Writer
	Show   Show
	// OnEvent is called for each event of each worker, in the order of each worker, never
	// twice at once; nil: none. While it is slow, progress events may be left out.
	OnEvent func(rank int, e Event)
	// OnStanding is called every Watch with the state of the workers of this node, without waiting for silent
	// workers, and with nothing when a start has ended. It is called as OnEvent is; nil: never.
	OnStatus    func(rows []waits.WaitState)
	Watch       time.Duration
	MaxRestarts int
	// Node names this node in messages; "": the name of the host.
	Node string
	// Cohort is the nodes of the job; nil: this one is all, and MaxRestarts its own. With a Cohort,
	// Place and Payload come with each start.
	Membership Membership
	// Device is the number of the first worker's GPU among the GPUs that this process sees.
	Device int
	// Interface is the network interface towards the other nodes; "": there are none.
	Interface string
	// OnStart is called before each start, and may complete it; nil: none. Its error ends the job.
	OnStart func(*Start) error
	// Patient: a second SIGTERM is no demand to end at once. Batch systems send several.
	Patient bool
	// Signals were caught before the job, and stay caught: one that comes when Run
	// has ended ends the program, with the status that Run returned. nil: Run catches them.
	Signals *Signals
	// Settle is how long the other ranks get to end by themselves, and to give their reasons,
	// after the first failure; 0: 2 s.
	Settle time.Duration
	// Grace is how long they get between SIGTERM and SIGKILL after that; 0: 5 s.
	Grace time.Duration
	// Last bounds the wait for the other workers after the first is done; 0: LastTime.
	Last time.Duration
}

// Result is how a job ended.
type Result struct {
	ExitCode int
	// First is the failure that the others followed from, nil where no rank failed.
	First *Failure
	// Failures are all of the last attempt, First first.
	Failures []Failure
	// Stopped: ended after a checkpoint, on request.
	Stopped bool
	// Restarts is how often all workers were started again.
	Restarts int
	// Err is a fault of the launcher itself (no directory, no socket); no rank is to blame.
	Err error
}

// Failure is how one rank failed.
type Failure struct {
	Rank, LocalRank int
	// Ranks counts the ranks from Rank that have failed together, with their node; 0: Rank alone.
	Ranks    int
	Host     string
	PID      int            // 0: it was never started
	ExitCode int            // -1: ended by a signal, or not started
	Signal   syscall.Signal // 0: none
	Cause    string         // one line or several
	Hint     string         // the fix; may be empty
	Phase    string         // of the step; may be empty
	Step     int64          // 0: not known
	Log      string         // path of its log
	Remote   bool           // it is a victim: the cause came from another rank
	Class    Class          // likely causes of the others first
	Order    int            // of the first signs of failure, from 1; 0: not known
	TimedOut bool           // it, or one that it has heard of, has waited for too long
	// Standing is its work and its waits at that time; nil: not known.
	WaitState *waits.WaitState `json:"Standing"`
	Tail      []string         // the last lines of its output, unless they were shown as they came
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

// Report returns the block that ends a failed run on stderr.
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

// resolve fills defaults and refuses a job that cannot run.
func (j *Job) resolve() error {
	if j.Stderr == nil {
		j.Stderr = io.Discard
	}
	j.Settle = cmp.Or(j.Settle, 2*time.Second)
	j.Grace = cmp.Or(j.Grace, 5*time.Second)
	j.Last = cmp.Or(j.Last, LastTime)
	if j.Ranks.WorldSize == 0 {
		j.Ranks.WorldSize = j.Ranks.FirstRank + j.NProc
	}
	if j.Node == "" {
		var err error
		if j.Node, err = os.Hostname(); err != nil {
			j.Node = "localhost"
		}
	}
	switch {
	case j.NProc < 1:
		return fmt.Errorf("number of processes %d: at least 1 is needed", j.NProc)
	case len(j.Argv) == 0:
		return errors.New("arguments of the worker: none given")
	case j.Membership != nil: // it brings the rest
		return nil
	}
	return j.fits(&Start{Ranks: j.Ranks, Payload: j.Payload, Logs: j.Logs})
}

// fits refuses a start that this node has no place in.
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

// Run starts the workers of a job, waits until none is left, and says how it went. The
// report of a failure is the last thing that it writes to Job.Stderr. SIGINT, SIGTERM,
// SIGUSR1, SIGHUP and SIGQUIT belong to it while it runs; the end of ctx kills the workers.
func Run(ctx context.Context, job Job) Result {
	followParent()
	a, err := newNodeLauncher(job)
	if err != nil {
		if job.Stderr != nil {
			fmt.Fprintf(job.Stderr, "cprun: %s\n", terminal.Message(err))
		}
		return Result{ExitCode: ExitFailed, Err: err}
	}
	r := a.run(ctx)
	a.close(r.ExitCode)
	return r
}
