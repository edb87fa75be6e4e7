package planner

import "math"

// half is one end of a message: when its rank began it, and when the rank's link has carried it.
type half struct{ begin, end float64 }

// lane is the messages from one rank to another, in order. The n-th that is sent is the n-th that is
// received.
type lane struct{ sent, received []half }

// place of a message in its lane.
type spot struct {
	lane *lane
	n    int
}

// runner is a rank that runs its program.
type runner struct {
	*program
	at    int     // the next step
	clock float64 // of the device
	host  float64 // seconds in which it has queued
	links [2][2]float64
	spots [][]spot // of the messages of exchanges that have begun
	times Rank
	span  Span
}

// world is ranks that run their programs.
type world struct {
	ranks []runner
	lanes map[[2]int]*lane
	spans bool
	all   []Span
}

func newWorld(programs []*program, spans bool) *world {
	w := &world{ranks: make([]runner, len(programs)), lanes: map[[2]int]*lane{}, spans: spans}
	for i, p := range programs {
		w.ranks[i] = runner{program: p, spots: make([][]spot, len(p.exchanges)), times: Rank{Rank: p.rank}}
	}
	return w
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

// step runs one step; false: it has to wait for another rank to get on.
func (w *world) step(r *runner) bool {
	switch s := &r.steps[r.at]; s.kind {
	case begin:
		r.queue()
		w.begin(r, int(s.exchange))
	case wait:
		return w.wait(r, int(s.exchange))
	default:
		if r.work(s); s.kind == leave && w.spans {
			w.all = append(w.all, r.span)
		}
	}
	return true
}

// work runs a step that has nothing to do with other ranks.
func (r *runner) work(s *step) {
	switch s.kind {
	case enter:
		r.span = Span{Rank: r.rank, Hop: r.labels[s.exchange], Begin: r.clock, Exposed: -r.times.Exposed, For: -1}
	case leave:
		r.span.End, r.span.Exposed = r.clock, r.span.Exposed+r.times.Exposed
	case compute:
		r.queue()
		r.clock += s.seconds
		r.times.Compute += s.seconds
	case copies:
		r.queue()
		r.clock += s.seconds
		r.times.Copies += s.seconds
	case carry:
		r.clock += s.seconds
		r.times.Exposed += s.seconds
	}
}

// carried is when the rank's link has carried a message that begins now, behind those before it.
func (r *runner) carried(m *message) float64 {
	way := 0
	if !m.sends {
		way = 1
	}
	free := &r.links[m.link][way]
	*free = max(*free, r.clock) + m.seconds
	return *free
}

// queue has the host queue one thing more.
func (r *runner) queue() {
	r.host += r.program.host
	r.times.Calls++
}

// begin gives the messages of an exchange to the rank's links, which carry them one behind another.
func (w *world) begin(r *runner, exchange int) {
	list := r.exchanges[exchange]
	spots := make([]spot, len(list))
	for i := range list {
		m := &list[i]
		key := [2]int{r.rank, m.peer}
		if !m.sends {
			key = [2]int{m.peer, r.rank}
		}
		h := half{r.clock, r.carried(m)}
		l := w.lanes[key]
		if l == nil {
			l = &lane{}
			w.lanes[key] = l
		}
		side := &l.sent
		if !m.sends {
			side = &l.received
		}
		spots[i] = spot{l, len(*side)}
		*side = append(*side, h)
	}
	r.spots[exchange] = spots
}

// wait has the rank wait for an exchange; false: a peer has not begun it.
func (w *world) wait(r *runner, exchange int) bool {
	end, late, by := r.clock, -1, 0.0
	for i, s := range r.spots[exchange] {
		m := &r.exchanges[exchange][i]
		own, other := s.lane.sent, s.lane.received
		if !m.sends {
			own, other = other, own
		}
		if s.n >= len(other) {
			return false
		}
		mine, peer := own[s.n], other[s.n]
		through := worse(max(mine.end, peer.end), max(mine.begin, peer.begin)+m.seconds)
		if through > end {
			end, late = through, -1
			if by = peer.begin; by > mine.begin && peer.end >= mine.end {
				late = m.peer
			}
		}
	}
	r.spots[exchange] = nil
	if end > r.clock {
		r.times.Exposed += end - r.clock
		r.clock, r.span.For = end, late
	}
	return true
}

// result is the times of all ranks, when none can get on.
func (w *world) result() (Result, error) {
	res := Result{Spans: w.all}
	for i := range w.ranks {
		r := &w.ranks[i]
		if r.at < len(r.steps) {
			return res, errStuck(r.rank, r.span.Hop)
		}
		res.add(r.end())
	}
	return res, nil
}

// end is the times of a rank that is done. Passes follow each other, and the host is ahead of the device, unless it takes
// longer for a whole pass.
func (r *runner) end() Rank {
	r.times.Host = max(0, r.host-r.clock)
	r.times.End = r.clock + r.times.Host
	if math.IsNaN(r.clock) {
		r.times.End = math.Inf(1)
	}
	return r.times
}

// add adds a rank.
func (res *Result) add(r Rank) {
	res.Seconds = worse(res.Seconds, r.End)
	res.Ranks = append(res.Ranks, r)
}

// lone is a rank whose peers do as it does: its messages have come when its own links have carried them.
type lone struct {
	runner
	ends  []float64 // of each exchange
	spans bool
	all   []Span
}

func (w *lone) run() {
	w.ends = append(w.ends, make([]float64, len(w.exchanges))...)
	for i := range w.steps {
		switch s := &w.steps[i]; s.kind {
		case begin:
			w.queue()
			for j := range w.exchanges[s.exchange] {
				m := &w.exchanges[s.exchange][j]
				w.ends[s.exchange] = worse(w.ends[s.exchange], w.carried(m))
			}
		case wait:
			if end := w.ends[s.exchange]; end > w.clock {
				w.times.Exposed += end - w.clock
				w.clock = end
			}
		default:
			if w.work(s); s.kind == leave && w.spans {
				w.all = append(w.all, w.span)
			}
		}
	}
}
