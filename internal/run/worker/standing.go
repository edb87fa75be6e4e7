package worker

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch/standing"
)

// whereabouts is what this rank is at, for reports of failures and for the launcher's table.
type whereabouts struct {
	mu    sync.Mutex
	phase string    // guarded by mu
	since time.Time // guarded by mu; of the phase
	step  int64     // guarded by mu; steps done
	// groups are those whose calls this rank makes; those that are split from them tell theirs, too.
	groups []waiter // guarded by mu
}

// waiter is a group that tells what it waits for.
type waiter interface{ Waits() []comm.Wait }

// enter notes that a phase begins.
func (w *whereabouts) enter(phase string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phase, w.since = phase, time.Now()
}

// reach notes how many steps are done.
func (w *whereabouts) reach(step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = step
}

// join notes a group.
func (w *whereabouts) join(g waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups = append(w.groups, g)
}

// at returns the phase and the steps done.
func (w *whereabouts) at() (phase string, step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.phase, w.step
}

// lookTime is how long a group may take to tell what it waits for. One of a GPU asks the driver, which
// may have stopped to answer.
const lookTime = 300 * time.Millisecond

// standing is what this rank is at, and waits for at this moment; after a failure, what it waited for then.
func (p *process) standing() standing.Standing {
	p.where.mu.Lock()
	s := standing.Standing{Rank: p.Rank, Step: p.where.step, Phase: p.where.phase, In: time.Since(p.where.since)}
	groups := slices.Clone(p.where.groups)
	p.where.mu.Unlock()
	if w, busy := p.stream.At(); busy && w.For == nil {
		s.Work = &standing.Work{Name: w.Name, Label: w.Label, For: time.Since(w.Since)}
	}
	var waits []comm.Wait
	for _, g := range groups {
		got := make(chan []comm.Wait, 1)
		go func() { got <- g.Waits() }() // ends when the driver answers, or with the process
		select {
		case all := <-got:
			waits = append(waits, all...)
		case <-time.After(lookTime):
			s.Work = &standing.Work{Name: "a call of the driver, which does not return", For: lookTime}
		}
	}
	for _, w := range standsFor(waits, s.Work != nil) {
		s.Waits = append(s.Waits, told(w))
	}
	s.Beside = len(waits) - len(s.Waits)
	s.Waits = s.Waits[:min(len(s.Waits), standing.MaxWaits)]
	return s
}

// way is a group and one of the ways in which its calls go, on which they follow each other.
type way struct {
	group uint64
	via   string
}

// standsFor lists the calls without which a rank does not go on, those that have stood for longest first.
// They are those that the compute stream stands for, or, where there are none and it is not at work, those
// that a caller does; for a call that has not begun, the one before it. Others go on beside the work.
func standsFor(all []comm.Wait, busy bool) (out []comm.Wait) {
	needed, called := map[way]bool{}, map[way]bool{}
	for _, w := range all {
		k := way{w.Group, w.Via}
		needed[k] = needed[k] || w.Needed
		called[k] = called[k] || w.Called
	}
	pick := func(by map[way]bool) {
		for _, w := range all {
			if w.Begun && by[way{w.Group, w.Via}] {
				out = append(out, w)
			}
		}
	}
	if pick(needed); len(out) == 0 && !busy {
		pick(called)
	}
	slices.SortStableFunc(out, func(a, b comm.Wait) int {
		if len(a.Open) == 0 || len(b.Open) == 0 {
			return cmp.Compare(len(b.Open), len(a.Open)) // at one without messages this rank itself is at work
		}
		return a.Since.Compare(b.Since)
	})
	return out
}

// told is a call as the launcher is told of it.
func told(w comm.Wait) standing.Wait {
	t := standing.Wait{
		Op: w.Op, Label: w.Label, Group: w.Group, Via: w.Via, Call: w.Call,
		More: w.More, Vague: w.Vague, Bytes: w.Bytes, Stood: stood(w.Since),
	}
	for _, o := range w.Open {
		t.Open = append(t.Open, standing.Open{Peer: o.Peer, Send: o.Send, Bytes: o.Bytes, Moved: o.Moved,
			Stood: stood(o.Since)})
	}
	return t
}

// stood is the time since then; 0 where that is not known.
func stood(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}

// long is for how long a rank that waits has stood if it tells so at its end.
const long = time.Second

// stoodLong reports whether the rank waits for others, and has for long.
func stoodLong(s *standing.Standing) bool { return len(s.Waits) > 0 && s.Waits[0].Stood >= long }

// logWaits writes to the log what this rank waited for.
func logWaits(s *standing.Standing) {
	s.Clean()
	fmt.Fprintf(os.Stderr, "cprun worker: %s\n", s)
}
