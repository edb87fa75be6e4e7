package launch

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// outcome is the exit status of the attempt.
func (t *attempt) outcome(ctx context.Context) (code int, stopped bool, err error) {
	switch {
	case t.err != nil:
		return ExitFailed, false, t.err
	case t.forced && len(t.failures) > 0:
		return ExitInterrupted, false, nil
	case t.ended && len(t.failures) > 0:
		if err = context.Cause(ctx); err == nil {
			err = errEnded
		}
		return ExitFailed, false, err
	case len(t.failures) > 0:
		return ExitFailed, false, nil
	case slices.ContainsFunc(t.children, func(c *child) bool { return c.seen.finished == EventStopped }):
		return ExitStopped, true, nil
	}
	return ExitDone, false, nil
}

// rank lists the failures of the attempt, the cause of the others first.
func (t *attempt) rank() []Failure {
	var fs []ranked
	for _, c := range t.children {
		v := judge(c.seen)
		if !c.ended {
			v = verdict{classOurs, "does not end after SIGKILL: it hangs in the kernel", "ps -o stat,wchan shows where; it may still hold memory and devices"}
		}
		if v.class == classNone {
			continue
		}
		f := Failure{
			Rank: c.rank, LocalRank: c.localRank, Host: t.host, PID: c.pid,
			ExitCode: c.seen.exit.code, Signal: c.seen.exit.signal,
			Cause: v.cause, Hint: v.hint, Log: c.log,
			Remote: v.class == classRemote || v.class == classOurs,
			// Only some ranks tell their steps; the others were at about the same one.
			Step: cmp.Or(c.lastStep, t.maxStep),
		}
		if r := c.seen.report; r != nil {
			f.Phase, f.Step = r.Phase, cmp.Or(r.Step, f.Step)
		}
		if c.seen.startErr != nil {
			f.ExitCode = -1
		}
		fs = append(fs, ranked{f, v.class, c.seen.order})
	}
	return rankFailures(fs)
}

// report says how the attempt ended. Of a failure, the block about the first rank comes last.
func (t *attempt) report(code int) {
	switch {
	case code == ExitStopped:
		t.notice("stopped after a checkpoint; the same command goes on from there")
	case t.err != nil:
		t.say(fmt.Sprintf("cprun: %v\n", t.err))
	case code == ExitInterrupted:
		if !t.failures[0].Remote {
			t.say(t.lastLines() + t.failures[0].Report())
		}
		t.say("cprun: interrupted twice: all workers were ended at once\n")
	case t.ended:
		t.notice("ended by its caller")
	case code == ExitFailed:
		t.say(t.others() + t.lastLines() + t.failures[0].Report())
	}
}

// others are one line for each rank that failed by itself as well, and one for all the rest.
func (t *attempt) others() string {
	var b strings.Builder
	var victims []int
	for _, f := range t.failures[1:] {
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

// lastLines is the end of the first failing rank's output, unless it was shown as it came.
func (t *attempt) lastLines() string {
	var b strings.Builder
	for _, c := range t.children {
		if c.rank != t.failures[0].Rank || c.relay.show {
			continue
		}
		tail, _ := c.relay.ended()
		for _, line := range tail {
			fmt.Fprintf(&b, "[%s] %s\n", c.relay.prefix, line)
		}
	}
	return b.String()
}
