package planner

import (
	"fmt"
	"math"
)

// An endpoint is one end of a message: the times when its rank began it, and when the rank's link has carried it.
type endpoint struct{ begin, end float64 }

// A lane is the messages from one rank to another, in order. The n-th that is sent is the n-th that is
// received.
type lane struct{ sent, received []endpoint }

type position struct {
	lane *lane
	n    int
}

type runner struct {
	*program
	at        int           // the next step
	clock     float64       // of the device
	host      float64       // seconds in which it has queued
	links     [2][2]float64 // when each is free: in its host and across, each way
	positions [][]position  // of the messages of exchanges that have begun, in a world
	ends      []float64     // of exchanges, of a rank alone
	times     Rank
}

type world struct {
	ranks []runner
	lanes map[[2]int]*lane
}

func simulate(programs []*program) (res Result, err error) {
	w := &world{ranks: make([]runner, len(programs)), lanes: map[[2]int]*lane{}}
	for i, p := range programs {
		w.ranks[i] = runner{program: p, positions: make([][]position, len(p.exchanges))}
	}
	for w.advance() {
	}
	for i := range w.ranks {
		r := &w.ranks[i]
		if r.at < len(r.steps) {
			return res, fmt.Errorf("planner: rank %d waits forever for exchange %d: its peers do not have its messages",
				r.rank, r.steps[r.at].of)
		}
		res.add(r.end())
	}
	return res, nil
}

// advance runs each rank until it waits for another. It reports whether any got on.
func (w *world) advance() (moved bool) {
	for i := range w.ranks {
		r := &w.ranks[i]
		for r.at < len(r.steps) && w.step(r) {
			r.at++
			moved = true
		}
	}
	return moved
}

func (w *world) step(r *runner) bool {
	switch s := &r.steps[r.at]; s.kind {
	case begin:
		r.start(s)
		w.begin(r, s.of)
	case wait:
		return w.wait(r, s.of)
	default:
		r.work(s)
	}
	return true
}

// work runs a step that has nothing to do with other ranks.
func (r *runner) work(s *step) {
	r.queue()
	r.clock += s.seconds
	if s.kind == compute {
		r.times.Compute += s.seconds
	} else {
		r.times.Copies += s.seconds
	}
}

// start queues an exchange, which shared cores carry at once.
func (r *runner) start(s *step) {
	r.queue()
	r.clock += s.seconds
	r.times.Exposed += s.seconds
}

// carried returns when the rank's link has carried a message that begins now, after those before it.
func (r *runner) carried(m *message) float64 {
	link, way := 0, 0
	if m.across {
		link = 1
	}
	if m.sends {
		way = 1
	}
	free := &r.links[link][way]
	*free = max(*free, r.clock) + m.seconds
	return *free
}

func (r *runner) queue() {
	r.host += r.program.host
	r.times.Calls++
}

func (r *runner) until(end float64) {
	if end > r.clock {
		r.times.Exposed += end - r.clock
		r.clock = end
	}
}

// begin gives the messages of an exchange to the rank's links, which carry them one after another.
func (w *world) begin(r *runner, exchange int) {
	list := r.exchanges[exchange]
	positions := make([]position, len(list))
	for i := range list {
		m := &list[i]
		key := [2]int{r.rank, m.peer}
		if !m.sends {
			key = [2]int{m.peer, r.rank}
		}
		l := w.lanes[key]
		if l == nil {
			l = &lane{}
			w.lanes[key] = l
		}
		side := &l.sent
		if !m.sends {
			side = &l.received
		}
		positions[i] = position{l, len(*side)}
		*side = append(*side, endpoint{r.clock, r.carried(m)})
	}
	r.positions[exchange] = positions
}

// wait waits for an exchange, or returns false if a peer has not begun it.
func (w *world) wait(r *runner, exchange int) bool {
	end := r.clock
	for i, s := range r.positions[exchange] {
		m := &r.exchanges[exchange][i]
		own, other := s.lane.sent, s.lane.received
		if !m.sends {
			own, other = other, own
		}
		if s.n >= len(other) {
			return false
		}
		mine, peer := own[s.n], other[s.n]
		end = max(end, mine.end, peer.end, max(mine.begin, peer.begin)+m.seconds)
	}
	r.positions[exchange] = nil
	r.until(end)
	return true
}

// simulateAlone runs the program of a rank whose peers run the same one: its messages arrive when its own links have
// carried them.
func simulateAlone(p *program) Rank {
	r := runner{program: p, ends: make([]float64, len(p.exchanges))}
	for i := range r.steps {
		switch s := &r.steps[i]; s.kind {
		case begin:
			r.start(s)
			for j := range r.exchanges[s.of] {
				r.ends[s.of] = max(r.ends[s.of], r.carried(&r.exchanges[s.of][j]))
			}
		case wait:
			r.until(r.ends[s.of])
		default:
			r.work(s)
		}
	}
	return r.end()
}

// end returns the times of a rank that is done. Passes follow each other, and the host is ahead of the device, unless
// it takes longer for a whole pass.
func (r *runner) end() Rank {
	r.times.Host = max(0, r.host-r.clock)
	r.times.End = r.clock + r.times.Host
	if math.IsNaN(r.clock) {
		r.times.End = math.Inf(1)
	}
	return r.times
}

func (res *Result) add(r Rank) {
	res.Seconds = max(res.Seconds, r.End)
	res.Ranks = append(res.Ranks, r)
}
