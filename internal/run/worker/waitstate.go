package worker

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch/waits"
)

// An activity holds the present phase and step of this rank, for failure reports and the launcher's table.
type activity struct {
	mu    sync.Mutex
	phase string    // guarded by mu
	since time.Time // guarded by mu; beginning of the phase
	step  int64     // guarded by mu; steps done
	// groups lists this rank's communicators, which also report the waits of their subgroups.
	groups []waiter // guarded by mu
}

type waiter interface{ Waits() []comm.Wait }

func (w *activity) enter(phase string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phase, w.since = phase, time.Now()
}

func (w *activity) reach(step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = step
}

func (w *activity) join(g waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups = append(w.groups, g)
}

func (w *activity) at() (phase string, step int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.phase, w.step
}

// lookTime bounds the query of a group's waits. A group of GPUs calls the driver, which may hang.
const lookTime = 300 * time.Millisecond

// waitState returns the activity and the waits of this rank. After a failure, the waits are those at that time.
func (p *process) waitState() waits.WaitState {
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
		go func() { got <- g.Waits() }() // ends with the driver call, or with the process
		select {
		case all := <-got:
			pending = append(pending, all...)
		case <-time.After(lookTime):
			s.Work = &waits.Work{Name: "a driver call that does not return", For: lookTime}
		}
	}
	for _, w := range blocking(pending, s.Work != nil) {
		s.Waits = append(s.Waits, waitOf(w))
	}
	s.Waits = s.Waits[:min(len(s.Waits), waits.MaxWaits)]
	return s
}

// A queue identifies a group and one of its transports. Its calls run in order.
type queue struct {
	group uint64
	via   string
}

// blocking lists the calls that block a rank, the longest wait first. These are the calls that the compute stream waits
// for. Without any, and if the stream is idle, these are the calls that a caller waits for. In place of a call that has
// not begun, it lists the call before it in the queue. Other calls overlap with work.
func blocking(all []comm.Wait, busy bool) (out []comm.Wait) {
	needed, called := map[queue]bool{}, map[queue]bool{}
	for _, w := range all {
		k := queue{w.Group, w.Via}
		needed[k] = needed[k] || w.Needed
		called[k] = called[k] || w.Called
	}
	pick := func(by map[queue]bool) {
		for _, w := range all {
			if w.Begun && by[queue{w.Group, w.Via}] {
				out = append(out, w)
			}
		}
	}
	if pick(needed); len(out) == 0 && !busy {
		pick(called)
	}
	slices.SortStableFunc(out, func(a, b comm.Wait) int {
		if len(a.Open) == 0 || len(b.Open) == 0 {
			return cmp.Compare(len(b.Open), len(a.Open)) // without open messages, this rank itself is working
		}
		return a.Since.Compare(b.Since)
	})
	return out
}

func waitOf(w comm.Wait) waits.Wait {
	t := waits.Wait{
		Op: w.Op, Label: w.Label, Group: w.Group, Via: w.Via, Call: w.Call,
		More: w.More, Unresolved: w.Vague, Bytes: w.Bytes, Stalled: elapsed(w.Since),
	}
	for _, o := range w.Open {
		t.Open = append(t.Open, waits.Open{Peer: o.Peer, Send: o.Send, Bytes: o.Bytes})
	}
	return t
}

func elapsed(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}

// A failing rank logs waits of at least long.
const long = time.Second

func waitedLong(s *waits.WaitState) bool { return len(s.Waits) > 0 && s.Waits[0].Stalled >= long }
