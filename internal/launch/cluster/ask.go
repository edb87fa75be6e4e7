package cluster

import (
	"slices"

	"github.com/cprun/cprun/internal/launch"
)

// What the ranks of a start wait for: an agent asks, all say, and what they say goes to those who have asked.

// onAsked: an agent's user wants to know what all ranks wait for.
func (m *machine) onAsked(from string) {
	if r := m.run; !slices.Contains(r.askers, from) {
		r.askers = append(r.askers, from)
	}
	m.relay(from, launch.News{Ask: true})
}

// onStandings: an agent says what its ranks wait for.
func (m *machine) onStandings(from string, n launch.News) {
	for _, name := range m.run.askers {
		switch {
		case name == from:
		case name == m.self.Name:
			m.hear(n)
		case m.joined(name):
			m.fx.send(&message{News: &relayed{m.reg.index, n}}, name)
		}
	}
}

// brief cuts what a rank has said of its waits down to the first, of few ranks.
func brief(f *launch.Failure) {
	const most = 8
	if f.Standing == nil || len(f.Standing.Waits) == 0 {
		return
	}
	s := *f.Standing
	w := s.Waits[0]
	w.More += max(len(w.Open)-most, 0)
	w.Open = w.Open[:min(len(w.Open), most)]
	s.Waits = append(s.Waits[:0:0], w)
	f.Standing = &s
}
