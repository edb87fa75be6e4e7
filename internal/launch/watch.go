package launch

import (
	"time"

	"github.com/cprun/cprun/internal/launch/standing"
)

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

// look asks the workers anew, and passes on what has come so far if some have not answered the last time. Whoever has
// not is not asked again, so that nothing piles up at one that is stopped.
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

// passOnWhenWhole passes on what the workers have said when nobody is left who might answer.
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

// passOn tells what can be seen of the workers.
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
