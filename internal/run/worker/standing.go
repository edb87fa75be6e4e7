package worker

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch/waits"
)

// whereabouts holds the activity of this rank, for reports of failures and for the launcher's table.
type whereabouts struct {
	mu    sync.Mutex
	phase string    // guarded by mu
	since time.Time // guarded by mu; of the phase
	step  int64     // guarded by mu; steps done
	// groups are the groups that this rank calls. They also report the waits of their subgroups.
	groups []waiter // guarded by mu
}

type waiter interface{ Waits() []comm.Wait }

func (w *whereabouts) enter(phase string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phase, w.since = phase, time.Now()
}

func (w *whereabouts) reach(step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = step
}

func (w *whereabouts) join(g waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups = append(w.groups, g)
}

func (w *whereabouts) at() (phase string, step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.phase, w.step
}

// lookTime bounds the query of a group's waits. A group of GPUs asks the driver, which may hang.
const lookTime = 300 * time.Millisecond

// standing returns the activity and the waits of this rank, after a failure those at its time.
func (p *process) standing() waits.WaitState {
	p.where.mu.Lock()
	s := waits.WaitState{Rank: p.Rank, Step: p.where.step, Phase: p.where.phase, PhaseTime: time.Since(p.where.since)}
	groups := slices.Clone(p.where.groups)
	p.where.mu.Unlock()
	if w, busy := p.stream.At(); busy && w.For == nil {
		s.Work = &waits.Work{Name: w.Name, Label: w.Label, For: time.Since(w.Since)}
	}
	var pending []comm.Wait
	for _, g := range groups {
		got := make(chan []comm.Wait, 1)
		go func() { got <- g.Waits() }() // ends when the driver answers, or with the process
		select {
		case all := <-got:
			pending = append(pending, all...)
		case <-time.After(lookTime):
			s.Work = &waits.Work{Name: "a call of the driver, which does not return", For: lookTime}
		}
	}
	for _, w := range standsFor(pending, s.Work != nil) {
		s.Waits = append(s.Waits, told(w))
	}
	s.Background = len(pending) - len(s.Waits)
	s.Waits = s.Waits[:min(len(s.Waits), waits.MaxWaits)]
	return s
}

// way names a group and one of its transports, on which calls follow each other.
type way struct {
	group uint64
	via   string
}

// standsFor lists the calls that block a rank, the longest first: calls that the compute stream waits for. If there
// are none and the stream is idle, it lists calls that a caller waits for. Before a call that has not begun, it lists
// the call ahead of it. Other calls overlap with work.
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

func told(w comm.Wait) waits.Wait {
	t := waits.Wait{
		Op: w.Op, Label: w.Label, Group: w.Group, Via: w.Via, Call: w.Call,
		More: w.More, Unresolved: w.Vague, Bytes: w.Bytes, Stalled: stood(w.Since),
	}
	for _, o := range w.Open {
		t.Open = append(t.Open, waits.Open{Peer: o.Peer, Send: o.Send, Bytes: o.Bytes, Moved: o.Moved,
			Stalled: stood(o.Since)})
	}
	return t
}

func stood(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}

// long is the least wait that a rank logs at its end.
const long = time.Second

func stoodLong(s *waits.WaitState) bool { return len(s.Waits) > 0 && s.Waits[0].Stalled >= long }
