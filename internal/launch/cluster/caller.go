package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// A caller serves this agent's launcher. It keeps the state of the launcher's last start.
type caller struct {
	effects    effects
	host       string
	start      int           // index of its last start
	running    bool          // that start has not ended here
	ended      *ended        // how it ended
	endedAt    time.Time     // when it ended
	waiting    bool          // in Next
	ending     bool          // in End
	knowsError bool          // the error is the launcher's own
	pending    []launch.News // of a start that it has not begun
	fatal      *launch.Over  // the result of all later calls
	leaderLoss launch.Failure
	lossAt     int // index of the start whose leader was lost; 0: none
}

// serve gives the launcher the start, verdict or end that it waits for, if there is one. may says that this agent
// belongs to a world with a leader.
func (l *caller) serve(d *decision, self string, may bool) {
	switch {
	case l.ending && l.fatal != nil:
		v := launch.Verdict{Result: l.fatal.Result}
		switch {
		case v.ExitCode == launch.ExitInput:
			v.Notes = []string{l.fatal.Error()}
		case v.ExitCode != launch.ExitFailed || v.First != nil:
		case l.start == l.lossAt: // the cause first
			e := launch.Merge(l.ended.Ending, launch.Ending{Failures: []launch.Failure{l.leaderLoss}})
			v.Failures, v.First, v.Notes = e.Failures, &e.Failures[0], []string{l.fatal.Error()}
		default:
			v.Err = errors.New(l.fatal.Error())
		}
		l.answer(v)
	case l.ending && d != nil && d.Index > l.start && d.End == nil:
		l.again(d.Tally.Retries.Done)
	case l.waiting && l.fatal != nil:
		l.waiting = false
		l.effects.over(l.fatal)
	case l.waiting && d != nil && d.Index > l.start && d.Assignment.index(self) >= 0 && may:
		early := l.pending
		*l = caller{effects: l.effects, host: l.host, start: d.Index, running: true, endedAt: l.endedAt}
		l.effects.begin(d)
		for _, n := range early {
			l.effects.news(n)
		}
	}
}

// answer gives the launcher v if it is in End.
func (l *caller) answer(v launch.Verdict) {
	if l.ending {
		l.ending = false
		l.effects.verdict(v)
	}
}

// again answers that another start follows. Another node prints the failures.
func (l *caller) again(restarts int) {
	l.answer(launch.Verdict{
		Result: launch.Result{ExitCode: launch.ExitFailed, Restarts: restarts},
		Again:  true, ReportedElsewhere: true,
	})
}

// onAgain handles the leader's announcement of another start.
func (l *caller) onAgain(a *again) {
	if l.ending && l.start == a.Index {
		l.again(a.Tally.Retries.Done)
	} else {
		l.abort("the other nodes have ended this start", -1)
	}
}

// news gives the launcher news of the start with that index, once it has begun that start.
func (l *caller) news(index int, n launch.News) {
	const most = 8
	switch {
	case l.running && l.start == index:
		l.effects.news(n)
	case l.start < index && len(l.pending) < most:
		l.pending = append(l.pending, n)
	}
}

// abort ends the start that runs here, since this agent cannot report to the others, or they do not wait for it. rank
// is the one to blame, or -1.
func (l *caller) abort(why string, rank int) {
	if l.running {
		n := launch.News{Lost: why}
		if rank >= 0 {
			n.Failed = &rank
		}
		l.effects.news(n)
	}
}

// end records how the start ended here. It returns nil if none runs.
func (l *caller) end(e launch.Ending, now time.Time) *ended {
	if !l.running {
		return nil
	}
	l.running, l.ending, l.knowsError, l.endedAt = false, true, e.Quiet, now
	l.ended = &ended{Index: l.start, Ending: trim(e)}
	if e.Err != nil {
		l.ended.Fault = clip(fmt.Sprintf("node %s: %v", l.host, e.Err))
	}
	return l.ended
}

// ending returns how the start with that index ended here, or nil.
func (l *caller) endingOf(index int) *ended {
	if l.ended != nil && l.ended.Index == index {
		return l.ended
	}
	return nil
}

// trim cuts an ending to the size of a message. Likely causes come first; the first few keep their last lines.
func trim(e launch.Ending) launch.Ending {
	const most, tailed = 256, 16
	fs := make([]launch.Failure, min(len(e.Failures), most))
	copy(fs, e.Failures)
	for i := range fs {
		fs[i].Cause, fs[i].Hint = clip(fs[i].Cause), clip(fs[i].Hint)
		if i >= tailed || size(fs[i].Tail) > 4*maxText {
			fs[i].Tail = nil
		}
		if i >= tailed {
			truncateWaits(&fs[i])
		}
	}
	e.Failures = fs
	return e
}

func size(lines []string) (n int) {
	for _, l := range lines {
		n += len(l)
	}
	return n
}

// clip cuts a text to the length allowed in messages.
func clip(s string) string { return s[:min(len(s), maxText/2)] }

// truncateWaits cuts a rank's wait state to its first wait, with few peers.
func truncateWaits(f *launch.Failure) {
	const most = 8
	if f.WaitState == nil || len(f.WaitState.Waits) == 0 {
		return
	}
	s := *f.WaitState
	w := s.Waits[0]
	w.More += max(len(w.Open)-most, 0)
	w.Open = w.Open[:min(len(w.Open), most)]
	s.Waits = append(s.Waits[:0:0], w)
	f.WaitState = &s
}
