package cost

import (
	"cmp"
	"math"
)

type route struct {
	*grid
	ranks       int
	least, peak float64 // seconds, and bytes a second
}

// Exchange implements planner.Costs.
func (m *Model) Exchange(across bool, bytes int64, messages int) float64 {
	if across {
		return m.move(OtherHost, m.toOther, bytes, messages)
	}
	return m.move(SameHost, m.toSame, bytes, messages)
}

// move returns the time of messages of a rank over a link, in both directions at once; nil: the table has no such link.
func (m *Model) move(pair string, r *route, bytes int64, messages int) float64 {
	if bytes <= 0 {
		return 0
	}
	assumed := m.job.Link
	if pair == OtherHost {
		assumed = m.job.Net
	}
	start := netStart
	if r != nil {
		start = r.least
	}
	more := float64(max(messages, 1)-1) * start // besides the first's, which is in the curve
	if assumed > 0 {
		rate := assumed
		if r != nil && pair == SameHost { // the share of its peak that a link reaches, by size
			if reached, ok := r.look(at(float64(bytes))); ok {
				rate = min(rate, math.Exp(reached)*max(1, assumed/r.peak))
			}
		}
		return start + more + float64(bytes)/rate
	}
	if r == nil {
		return 0
	}
	rate, _ := r.look(at(float64(bytes)))
	if pair == SameHost {
		rate += m.linkTimes()
	}
	return more + max(start, float64(bytes)/math.Exp(rate))*m.slowLinks
}

func (m *Model) linkTimes() float64 { return math.Log(cmp.Or(m.job.LinkTimes, 1)) }

// link finds the curve of a call: for the number of ranks of the job, else for the most ranks. In a table without other
// hosts, the curves of one host replace theirs. nil: there is none.
func (m *Model) link(pair, call string) *route {
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
			r := &route{grid: m.links[best], ranks: best.ranks, least: math.Inf(1)}
			for s, v := range r.spots {
				rate := math.Exp(v)
				r.least, r.peak = min(r.least, math.Exp2(s[0])/rate), max(r.peak, rate)
			}
			return r
		}
		if pair == OtherHost && m.job.Net > 0 {
			break
		}
	}
	return nil
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
		if r := m.link(SameHost, call); r != nil && m.job.Link == 0 {
			rate, _ := r.look(at(float64(bytes)))
			rate += m.linkTimes()
			measured := float64(r.ranks-1) / float64(r.ranks)
			return max(r.least, float64(bytes)/math.Exp(rate)*share/measured) * m.slowLinks
		}
		return m.ring(SameHost, call, ranks, int64(share*float64(bytes)))
	}
	return m.ring(OtherHost, call, ranks, int64(share*float64(bytes)))
}

// ring returns the time of a collective from the curve of exchanges. Only the start-ups of a tree do not overlap.
func (m *Model) ring(pair, call string, ranks int, bytes int64) float64 {
	if call == "all_reduce" {
		bytes *= 2
	}
	turns := int(math.Ceil(math.Log2(float64(ranks))))
	return m.move(pair, m.link(pair, "exchange"), bytes, turns)
}
