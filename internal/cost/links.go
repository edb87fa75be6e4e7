package cost

import (
	"math"
)

// host of a rank; ranks lie host by host.
func (m *Model) host(rank int) int { return rank / max(m.job.PerHost, 1) }

// Exchange implements planner.Costs.
func (m *Model) Exchange(from, to int, bytes int64, messages int) float64 {
	pair := SameHost
	if m.host(from) != m.host(to) {
		pair = OtherHost
	}
	return m.move(pair, "exchange", bytes, messages)
}

// move is the time of messages of a rank over a link, in both directions at once.
func (m *Model) move(pair, call string, bytes int64, messages int) float64 {
	if bytes <= 0 {
		return 0
	}
	assumed := m.job.Link
	if pair == OtherHost {
		assumed = m.job.Net
	}
	k, measured := m.link(pair, call)
	start := netStart
	if measured {
		start = m.least[k]
	}
	more := float64(max(messages, 1)-1) * start // besides the first's, which is in the curve
	if assumed > 0 {
		rate := assumed
		if measured && pair == SameHost { // what a link reaches of its peak, by size
			if r, ok := m.links[k].look(at(float64(bytes))); ok {
				rate = min(rate, math.Exp(r)*max(1, assumed/m.peak(k)))
			}
		}
		return start + more + float64(bytes)/rate
	}
	r, ok := m.links[k].look(at(float64(bytes)))
	if !ok {
		return 0
	}
	return more + max(start, float64(bytes)/math.Exp(r))*m.slow
}

// peak is the fastest rate of a curve.
func (m *Model) peak(k linkKey) float64 {
	top := 0.0
	for _, v := range m.links[k].spots {
		top = max(top, math.Exp(v))
	}
	return top
}

// link finds the curve of a call, of any number of ranks: of the job's where there is one, else of the most. A table
// without other hosts has those of one stand for them.
func (m *Model) link(pair, call string) (linkKey, bool) {
	for _, p := range []string{pair, SameHost} {
		best, ok := linkKey{}, false
		for k := range m.links {
			if k.pair != p || k.call != call {
				continue
			}
			if !ok || k.ranks == m.job.Ranks || k.ranks > best.ranks && best.ranks != m.job.Ranks {
				best, ok = k, true
			}
		}
		if ok {
			return best, true
		}
		if pair == OtherHost && m.job.Net > 0 {
			break
		}
	}
	return linkKey{}, false
}

// Reduce returns the time of a collective over ranks of the job: all_reduce, reduce_scatter or all_gather, of bytes in
// the whole buffer. Each link carries (ranks-1)/ranks of them, twice with all_reduce, at the rate of the slowest link
// that a ring of the ranks goes over.
func (m *Model) Reduce(call string, ranks int, bytes int64) float64 {
	if ranks < 2 || bytes <= 0 {
		return 0
	}
	share := float64(ranks-1) / float64(ranks)
	if ranks <= max(m.job.PerHost, 1) {
		k, ok := m.link(SameHost, call)
		if ok && m.job.Link == 0 {
			r, _ := m.links[k].look(at(float64(bytes)))
			measured := float64(k.ranks-1) / float64(k.ranks)
			return max(m.least[k], float64(bytes)/math.Exp(r)*share/measured) * m.slow
		}
		return m.ring(SameHost, call, ranks, int64(share*float64(bytes)))
	}
	return m.ring(OtherHost, call, ranks, int64(share*float64(bytes)))
}

// ring is a collective from the curve of exchanges. The start-ups of its turns overlap but for those of a tree.
func (m *Model) ring(pair, call string, ranks int, bytes int64) float64 {
	if call == "all_reduce" {
		bytes *= 2
	}
	turns := int(math.Ceil(math.Log2(float64(ranks))))
	return m.move(pair, "exchange", bytes, turns)
}
