package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cprun/cprun/internal/launch/waits"
)

// Cohort is the nodes of a job: what an agent agrees on with the agents of the others. alone is that
// of a job of one node. Its methods are called by loop alone.
type Membership interface {
	// Next waits until the nodes agree on the next start of all workers, or cannot: an error ends
	// the job. The end of ctx ends the wait.
	Next(ctx context.Context) (Start, error)
	// News returns what other nodes say of the present start. It is made anew by Next.
	News() <-chan News
	// Say tells the other nodes something about the present start. It never blocks.
	Publish(News)
	// End tells how the start has ended on this node, when none of its workers is left, and returns
	// how it ended for the job.
	End(ctx context.Context, e Ending) Verdict
}

// Start is one start of all workers of a job, as its nodes have agreed on it.
type Start struct {
	Number int    // of the starts of this job, from 0
	RunID  string // as Job.RunID, which it is if ""
	Ranks  RankRange
	// Hosts says by rank on which host it is: ranks with the same text share one. nil: all share one.
	Hosts   []string
	Secret  []byte   // for the workers of this start to know each other by, 32 bytes
	Payload []byte   // for every worker, as it is; at most 512 KiB
	Logs    *os.Root // as Job.Logs, which it is if nil
	// Listen is the address of this host at which workers of other nodes reach those of this one;
	// "": this node is all, and nothing listens.
	Listen string
}

// News passes between the agents of a job during a start. One field is set.
type News struct {
	// Addrs are where workers listen: told by a node, of its own, by local rank; told to a node, of
	// all, by rank.
	Addrs []string `json:"addrs,omitempty"`
	// Failed is a rank that has failed, and with which the start has.
	Failed *int `json:"failed,omitempty"`
	// Stop asks all workers for a checkpoint and a clean end: by which signal, at which node.
	Stop string `json:"stop,omitempty"`
	// Kill asks for the end of all workers at once: the user has lost patience.
	Kill bool `json:"kill,omitempty"`
	// Ask asks the agents what their ranks wait for; each says it in Standings.
	Ask        bool              `json:"ask,omitempty"`
	WaitStates []waits.WaitState `json:"standings,omitempty"`
	// Lost says that the start cannot go on, and why: a node is gone, or cannot be reached.
	Lost string `json:"lost,omitempty"`
}

// Ending is how a start has ended on one node, or, of all their endings in one, for the job.
type Ending struct {
	Failures []Failure `json:"failures,omitempty"` // the cause of the others first
	Stopped  bool      `json:"stopped,omitempty"`  // a worker has ended after a checkpoint, on request
	Asked    bool      `json:"asked,omitempty"`    // the workers were asked to stop
	Forced   bool      `json:"forced,omitempty"`   // interrupted twice
	Hung     bool      `json:"hung,omitempty"`     // a worker does not end
	Step     int64     `json:"step,omitempty"`     // the furthest that a rank has reached, over all starts
	// Err is a fault of an agent itself, or the end of its context; no rank is to blame.
	Err error `json:"-"`
	// Quiet says that Err is the caller's own, who knows it.
	Quiet bool `json:"-"`
}

// Verdict is how a start has ended for the job, and whether there is another.
type Verdict struct {
	Result
	Again bool
	After time.Duration // before the next start
	// Notes are printed before the report, Last after it.
	Notes, Last []string
	// Told says that another node tells the user of the failures.
	ReportedElsewhere bool
}

// errEnded is the fault of a run if its context ended without a cause.
var errContextEnded = errors.New("ended by its caller")

// Merge makes one ending of those of all nodes.
func Merge(all ...Ending) Ending {
	var e Ending
	for _, one := range all {
		e.Failures = append(e.Failures, one.Failures...)
		e.Stopped = e.Stopped || one.Stopped
		e.Asked = e.Asked || one.Asked
		e.Forced = e.Forced || one.Forced
		e.Hung = e.Hung || one.Hung
		e.Step = max(e.Step, one.Step)
		if e.Err == nil {
			e.Err, e.Quiet = one.Err, one.Quiet
		}
	}
	sortFailures(e.Failures)
	return e
}

// Over is the error of a Cohort's Next where the job has ended, or was ended elsewhere.
type Over struct {
	Result
	Why string // for the user; "": the user knows
}

func (o *Over) Error() string { return cmp.Or(o.Why, "the job has ended") }

// Retries decides what follows a start of a job, over all its starts. It goes from node to node as JSON.
type Retries struct {
	Max     int   `json:"max"`     // starts after the first
	Done    int   `json:"done"`    // of them
	Reached int64 `json:"reached"` // the furthest step when the last one began; meaningful if Done > 0
	Rank    int   `json:"rank"`    // that failed first before the last one; meaningful if Done > 0
	Row     int   `json:"row"`     // of failures of that rank, one after the other, behind its first
}

// Verdict says how a start that has ended so has ended for the job.
func (r *Retries) Verdict(e Ending) Verdict {
	v := Verdict{Result: e.result()}
	v.Restarts = r.Done
	if v.ExitCode != ExitFailed || v.Err != nil || e.Asked || e.Hung || r.Done >= r.Max {
		return v
	}
	if r.Done > 0 && e.Step <= r.Reached {
		v.Notes = append(v.Notes, fmt.Sprintf("not started again: no step beyond %d was reached since the last restart",
			r.Reached))
		return v
	}
	if r.Row++; r.Done == 0 || v.First.Rank != r.Rank {
		r.Row = 0
	}
	v.Again, v.After = true, backOff(r.Row)
	r.Done++
	r.Reached, r.Rank = e.Step, v.First.Rank
	v.Restarts = r.Done
	v.Last = append(v.Last, fmt.Sprintf("restart %d of %d", r.Done, r.Max))
	return v
}

// backOff returns the wait before a restart where the same rank has failed so often in a row before: none, then
// 1 s, 2 s, and up to 30 s.
func backOff(row int) time.Duration {
	if row == 0 {
		return 0
	}
	return min(30*time.Second, time.Second<<min(row-1, 5))
}

// result returns how a job ends that ends so.
func (e *Ending) result() Result {
	r := Result{ExitCode: ExitFailed, Failures: e.Failures}
	switch {
	case e.Err != nil && !e.Forced:
		r.Err = e.Err
		return r
	case e.Forced && len(e.Failures) > 0:
		r.ExitCode = ExitInterrupted
	case len(e.Failures) > 0:
	case e.Stopped:
		r.ExitCode, r.Stopped = ExitStopped, true
	default:
		r.ExitCode = ExitDone
	}
	if len(e.Failures) > 0 {
		r.First = &e.Failures[0]
	}
	return r
}

// An alone is the cohort of a job of one node.
type singleNode struct {
	job     *Job
	starts  int
	retries Retries
}

func newSingleNode(job *Job) *singleNode {
	return &singleNode{job: job, retries: Retries{Max: job.MaxRestarts}}
}

func (a *singleNode) Next(context.Context) (Start, error) {
	a.starts++
	return Start{Number: a.starts - 1, Ranks: a.job.Ranks, Secret: newSecret(), Payload: a.job.Payload,
		Logs: a.job.Logs}, nil
}

func (a *singleNode) News() <-chan News { return nil }

func (a *singleNode) Publish(News) {}

func (a *singleNode) End(_ context.Context, e Ending) Verdict { return a.retries.Verdict(e) }
