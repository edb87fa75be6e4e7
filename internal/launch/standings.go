package launch

import (
	"bytes"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/launch/standing"
)

// What is said of ranks that say nothing themselves.
const (
	stateStopped = "is stopped by a signal or a debugger"
	stateKernel  = "does not answer, and waits in the kernel"
	stateSilent  = "does not answer"
	stateEnded   = "has ended"
)

// row returns a worker's own account, or the launcher's observations.
func (t *attempt) row(c *child) standing.Standing {
	s := standing.Standing{Step: c.lastStep, State: c.state}
	switch {
	case c.seen.report != nil && c.seen.report.Standing != nil:
		s = *c.seen.report.Standing
	case c.told != nil:
		s = *c.told
	case s.State != "":
	case c.ended:
		s.State = stateEnded
	default:
		s.State = silence(c.pid)
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}

// silence returns why a process may not answer.
func silence(pid int) string {
	switch state(pid) {
	case 'T', 't':
		return stateStopped
	case 'D':
		return stateKernel
	case 'Z', 'X':
		return stateEnded
	}
	return stateSilent
}

// waited returns the table of a start in which a rank has waited for too long; "" if none has.
func waited(fs []Failure) string {
	var rows []standing.Standing
	timedOut := false
	for i := range fs {
		timedOut = timedOut || fs[i].TimedOut
		if s := fs[i].Standing; s != nil {
			s.Clean() // it may come from another node
			rows = append(rows, *s)
		}
	}
	if !timedOut || len(rows) == 0 {
		return ""
	}
	return "cprun: what each rank waited for\n" + standing.Table(rows)
}

// stoppedEvery separates two checks for stopped workers.
const stoppedEvery = 50 * time.Millisecond

// killStopped ends the workers that are stopped, since they cannot end by themselves, and looks again while there
// are workers, since one may be stopped only after another has failed.
func (t *attempt) killStopped() {
	t.stopped = time.After(stoppedEvery)
	for _, c := range t.children {
		if !c.ended && c.state != stateStopped && silence(c.pid) == stateStopped {
			c.state = stateStopped
			c.signal(unix.SIGKILL, true)
		}
	}
}

// state returns the kernel's state of a process, such as 'T' for stopped; 0: unknown.
func state(pid int) byte {
	stat, err := files.Read(fmt.Sprintf("/proc/%d/stat", pid), maxKernelFile)
	_, state, ok := bytes.Cut(stat, []byte(") ")) // behind its name, which may hold anything
	if err != nil || !ok || len(state) == 0 {
		return 0
	}
	return state[0]
}

// What is said of a worker that has said nothing yet, since it is on its way.
const stateStarts = "starts"

// glimpses is how many times Job.Watch an answer is good for: a worker that has much to do may be late.
const glimpses = 3

// watch begins to look at the workers, where somebody wants to know. Its second result ends that, and tells that there
// is nothing to see any more.
func (t *attempt) watch() (look <-chan time.Time, end func()) {
	if t.job.OnStanding == nil || t.job.Watch <= 0 {
		return nil, func() {}
	}
	ticker := time.NewTicker(t.job.Watch)
	return ticker.C, func() {
		ticker.Stop()
		t.mail.put(false, func() { t.job.OnStanding(nil) })
	}
}

// look passes on the answers so far if some are missing, and asks the workers anew, except the silent ones, so that
// nothing piles up at a stopped worker.
func (t *attempt) look() {
	if t.looking {
		t.passOn()
	}
	t.looking = true
	frame, err := encodeFrame(command{Kind: commandTell})
	for _, c := range t.children {
		if err == nil && !c.ended && !c.asked && len(c.commands) == 0 {
			c.asked = true
			c.commands <- frame
		}
	}
}

// passOnWhenWhole passes on what the workers have said when no one is left who might answer.
func (t *attempt) passOnWhenWhole() {
	for _, c := range t.children {
		if !c.ended && c.asked {
			return
		}
	}
	if t.looking {
		t.passOn()
	}
}

func (t *attempt) passOn() {
	t.looking = false
	rows := make([]standing.Standing, 0, len(t.children))
	for _, c := range t.children {
		rows = append(rows, t.glance(c))
	}
	t.mail.put(true, func() { t.job.OnStanding(rows) })
}

// glance returns a worker's last answer, or what can be seen of it from here.
func (t *attempt) glance(c *child) standing.Standing {
	s := standing.Standing{Step: c.lastStep, State: c.state}
	switch {
	case c.ended:
		s.State = stateEnded
	case c.glimpse != nil && time.Since(c.glimpsed) <= glimpses*t.job.Watch:
		s = *c.glimpse
	case s.State != "":
	default:
		if s.State = silence(c.pid); s.State == stateSilent && c.glimpse == nil {
			s.State = stateStarts
		}
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}
