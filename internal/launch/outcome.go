package launch

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// ending is how the start has ended here.
func (t *attempt) ending(ctx context.Context) Ending {
	e := Ending{
		Failures: t.failures(), Asked: t.asked != "", Forced: t.forced, Hung: t.live > 0, Step: t.maxStep, Err: t.err,
		Stopped: slices.ContainsFunc(t.children, func(c *child) bool { return c.seen.finished == EventStopped }),
	}
	if t.err == nil && t.ended && len(e.Failures) > 0 {
		e.Err, e.Quiet = cmp.Or(context.Cause(ctx), errEnded), true
	}
	return e
}

// failures lists the failures of this node's workers, the cause of the others first.
func (t *attempt) failures() []Failure {
	var fs []Failure
	for _, c := range t.children {
		v := judge(c.seen)
		if !c.ended {
			v = verdict{classOurs, "does not end after SIGKILL: it hangs in the kernel",
				"ps -o stat,wchan shows where; it may still hold memory and devices"}
		}
		if v.class == classNone {
			continue
		}
		f := Failure{
			Rank: c.rank, LocalRank: c.localRank, Host: t.job.Node, PID: c.pid,
			ExitCode: c.seen.exit.code, Signal: c.seen.exit.signal,
			Cause: v.cause, Hint: v.hint, Log: c.log,
			Remote: v.class == classRemote || v.class == classOurs,
			Class:  v.class, Order: c.seen.order, Tail: c.lastLines(),
			// Only some ranks tell their steps; the others were at about the same one.
			Step: cmp.Or(c.lastStep, t.maxStep),
		}
		s := t.row(c)
		f.Standing = &s
		if r := c.seen.report; r != nil {
			f.TimedOut = r.TimedOut
			f.Phase, f.Step = r.Phase, cmp.Or(r.Step, f.Step)
		}
		if c.seen.startErr != nil {
			f.ExitCode = -1
		}
		fs = append(fs, f)
	}
	rank(fs)
	return fs
}

// lastLines are the end of the worker's output, unless it was shown as it came.
func (c *child) lastLines() (lines []string) {
	if c.relay.show {
		return nil
	}
	tail, _ := c.relay.ended()
	for _, line := range tail {
		lines = append(lines, string(line))
	}
	return lines
}

// report says how a start has ended. Of a failure, the block about the first rank comes last.
func (t *attempt) report(v Verdict) {
	for _, note := range v.Notes {
		t.say("cprun: " + note + "\n")
	}
	switch {
	case v.Told && v.ExitCode == ExitFailed && v.First != nil:
		t.notice("%s; the node of rank 0 tells more", v.First.Error())
	case v.Told:
	case v.ExitCode == ExitStopped:
		t.notice("all workers have ended after a checkpoint")
	case v.Err != nil && t.ended:
		t.notice("ended by its caller")
	case v.Err != nil:
		t.say(fmt.Sprintf("cprun: %v\n", v.Err))
	case v.ExitCode == ExitInterrupted:
		if !v.First.Remote {
			t.say(v.First.lastLines() + v.First.Report())
		}
		t.say("cprun: interrupted twice: all workers were ended at once\n")
	case v.ExitCode == ExitFailed:
		t.say(waited(v.Failures) + others(v.Failures[1:]) + v.First.lastLines() + v.First.Report())
	}
	for _, note := range v.Last {
		t.say("cprun: " + note + "\n")
	}
}

// others are one line for each rank that failed by itself as well, and one for all the rest.
func others(fs []Failure) string {
	var b strings.Builder
	var victims []int
	for _, f := range fs {
		if f.Remote {
			victims = append(victims, f.Rank)
		} else {
			fmt.Fprintf(&b, "cprun: also %s\n", f.Error())
		}
	}
	if len(victims) > 0 {
		slices.Sort(victims)
		list := strings.Trim(strings.ReplaceAll(fmt.Sprint(victims), " ", ", "), "[]")
		fmt.Fprintf(&b, "cprun: ended because of it: rank %s\n", list)
	}
	return b.String()
}

// lastLines is the end of the rank's output, as its lines are shown.
func (f *Failure) lastLines() string {
	var b strings.Builder
	for _, line := range f.Tail {
		fmt.Fprintf(&b, "[rank %d] %s\n", f.Rank, line)
	}
	return b.String()
}
