package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cprun/cprun/internal/launch/waits"
)

// Membership connects the launchers of a job's nodes, which agree on each start. singleNode serves a job of one node.
// loop alone calls the methods.
type Membership interface {
	// Next waits until the nodes agree on the next start of all workers. An error ends the job; the end of ctx ends the
	// wait.
	Next(ctx context.Context) (Start, error)
	// News returns the channel of the other nodes' news about the current start. Next makes a new one.
	News() <-chan News
	// Publish sends news of the current start to the other nodes. It never blocks.
	Publish(News)
	// End reports how the start ended on this node, after its last worker, and returns the job's verdict.
	End(ctx context.Context, e Ending) Verdict
}

// Start is one start of all workers of a job.
type Start struct {
	Number int    // of the starts of this job, from 0
	RunID  string // "": Job.RunID
	Ranks  RankRange
	// Hosts contains the host of each rank. Ranks with equal values share a host; nil: all share one.
	Hosts   []string
	Secret  []byte   // authenticates the workers of this start, 32 bytes
	Payload []byte   // for every worker; at most 512 KiB
	Logs    *os.Root // nil: Job.Logs
	// Listen is the address of this host at which workers of other nodes connect to its workers; "": there is one node,
	// and nothing listens.
	Listen string
}

// News is sent between the launchers of a job during a start. Exactly one field is set.
type News struct {
	// Addrs are the workers' addresses: from a node, of its own workers by local rank; to a node, of all by rank.
	Addrs []string `json:"addrs,omitempty"`
	// Failed is a failed rank. The start fails with it.
	Failed *int `json:"failed,omitempty"`
	// Stop asks all workers for a checkpoint and a clean end. It names the signal and the node.
	Stop string `json:"stop,omitempty"`
	// Kill ends all workers at once, after a second interrupt.
	Kill bool `json:"kill,omitempty"`
	// Ask asks all launchers for the wait states of their ranks. Each answers with WaitStates.
	Ask        bool              `json:"ask,omitempty"`
	WaitStates []waits.WaitState `json:"standings,omitempty"`
	// Lost is the reason that the start cannot continue: a node is lost, or cannot be reached.
	Lost string `json:"lost,omitempty"`
}

// Ending is how a start ended on one node, or merged for the job.
type Ending struct {
	Failures []Failure `json:"failures,omitempty"` // the likely cause first
	Stopped  bool      `json:"stopped,omitempty"`  // a worker ended on request, after a checkpoint
	Asked    bool      `json:"asked,omitempty"`    // the workers were asked to stop
	Forced   bool      `json:"forced,omitempty"`   // interrupted twice
	Hung     bool      `json:"hung,omitempty"`     // a worker cannot be killed
	Step     int64     `json:"step,omitempty"`     // the last step of any rank, over all starts
	// Err is a launcher's own error, or the end of its context; no rank is to blame.
	Err error `json:"-"`
	// Quiet says that Err is the caller's own, so it is not printed.
	Quiet bool `json:"-"`
}

// Verdict is how a start ended for the job, and whether another follows.
type Verdict struct {
	Result
	Again bool
	// Notes are printed before the report, Last after it.
	Notes, Last []string
	// ReportedElsewhere says that another node prints the failures.
	ReportedElsewhere bool
}

// errContextEnded is the error of a run whose context ended without a cause.
var errContextEnded = errors.New("ended by its caller")

// Merge combines the endings of all nodes.
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

// Over is the error of Next after the job ended, here or elsewhere.
type Over struct {
	Result
	Why string // for the user; "": already printed
}

func (o *Over) Error() string { return cmp.Or(o.Why, "the job has ended") }

// Retries decides whether a start is followed by another, and counts them. Its JSON form moves between nodes.
type Retries struct {
	Max     int   `json:"max"`     // restarts allowed
	Done    int   `json:"done"`    // restarts so far
	Reached int64 `json:"reached"` // last step before the last restart; valid if Done > 0
}

// Verdict returns the verdict for an ended start. Each start must get beyond the last one, so restarts need no pause.
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
	r.Done++
	r.Reached = e.Step
	v.Again, v.Restarts = true, r.Done
	v.Last = append(v.Last, fmt.Sprintf("restart %d of %d", r.Done, r.Max))
	return v
}

// result returns the job's result if no start follows.
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

// A singleNode is the membership of a job of one node.
type singleNode struct {
	job     *Job
	starts  int
	retries Retries
}

func (a *singleNode) Next(context.Context) (Start, error) {
	a.starts++
	return Start{Number: a.starts - 1, Ranks: RankRange{WorldSize: a.job.NProc}, Secret: NewSecret(),
		Payload: a.job.Payload, Logs: a.job.Logs}, nil
}

func (a *singleNode) News() <-chan News { return nil }

func (a *singleNode) Publish(News) {}

func (a *singleNode) End(_ context.Context, e Ending) Verdict { return a.retries.Verdict(e) }
