package cluster

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"unicode"

	"github.com/cprun/cprun/internal/launch"
)

// What other agents send is checked once, where it is read: the rest of the package trusts it to be
// of one piece. It trusts no agent to be another.

const (
	maxText     = 8 << 10 // of a reason
	maxFailures = maxAgents * 8
)

// check refuses a message that no agent sends.
func (m *message) check() error {
	switch {
	case m.Status != nil:
		return m.Status.check()
	case m.Join != nil && m.Join.Ended != nil:
		return m.Join.Ended.check()
	case m.Refuse != nil:
		return checkText(*m.Refuse)
	case m.Note != nil:
		return checkText(*m.Note)
	case m.Promise != nil && m.Promise.Accepted != nil:
		return m.Promise.Accepted.check()
	case m.Accept != nil:
		return m.Accept.Decision.check()
	case m.Nack != nil:
		return m.Nack.Leader.check()
	case m.Decided != nil:
		return m.Decided.check()
	case m.News != nil:
		return checkNews(&m.News.News)
	case m.Ended != nil:
		return m.Ended.check()
	case m.Again != nil:
		return m.Again.check()
	case m.Bye != nil:
		return checkText(m.Bye.Why)
	}
	return nil
}

func checkText(s string) error {
	if len(s) > maxText {
		return fmt.Errorf("text of %d bytes: at most %d are allowed", len(s), maxText)
	}
	return nil
}

func (s *status) check() error {
	if s.Index < 0 {
		return fmt.Errorf("decision %d: below 0", s.Index)
	}
	return s.Leader.check()
}

// check allows an empty one: no one.
func (f *Found) check() error {
	if *f == (Found{}) {
		return nil
	}
	if err := checkName(f.Name); err != nil {
		return err
	}
	return checkAddr(f.Addr)
}

func checkName(s string) error {
	if s == "" || len(s) > maxHost+32 || slices.ContainsFunc([]rune(s), unicode.IsControl) {
		return fmt.Errorf("name %q: want 1 to %d bytes that print", s, maxHost+32)
	}
	return nil
}

func checkAddr(s string) error {
	host, _, err := net.SplitHostPort(s)
	if err != nil || net.ParseIP(host) == nil {
		return fmt.Errorf("address %q: want an IP address and a port", s)
	}
	return nil
}

// check refuses an agent that cannot be in a world.
func (m *Member) check() error {
	for _, s := range []string{m.Name, m.Host, m.HostID} {
		if err := checkName(s); err != nil {
			return err
		}
	}
	if m.NodeRank < -1 || m.NodeRank >= maxAgents || m.NProc < 1 || m.NProc > maxProcs {
		return fmt.Errorf("agent %s: node rank %d, %d processes", m.Name, m.NodeRank, m.NProc)
	}
	return checkAddr(m.Addr)
}

// check refuses a world whose ranks do not follow each other.
func (w *World) check() error {
	if w.Generation < 0 || w.Restart < 0 || len(w.Agents) > maxAgents {
		return fmt.Errorf("world %d, restart %d, %d agents", w.Generation, w.Restart, len(w.Agents))
	}
	seen, next := map[string]bool{}, 0
	for i := range w.Agents {
		m := &w.Agents[i]
		if err := m.check(); err != nil {
			return err
		}
		if seen[m.Name] || m.FirstRank != next || m.NodeRank < 0 {
			return fmt.Errorf("world %d: agent %s is there twice, or has a wrong rank", w.Generation, m.Name)
		}
		seen[m.Name] = true
		next += m.NProc
	}
	if next != w.Size {
		return fmt.Errorf("world %d: %d ranks of %d", w.Generation, next, w.Size)
	}
	return nil
}

func (d *decision) check() error {
	if d.Index < 1 || d.Leader.Name == "" || d.End == nil && len(d.World.Agents) == 0 {
		return fmt.Errorf("decision %d of %q about %d agents", d.Index, d.Leader.Name, len(d.World.Agents))
	}
	if d.End != nil {
		if err := checkText(d.End.Why); err != nil {
			return err
		}
	} else if d.World.Generation != d.Index {
		return fmt.Errorf("decision %d: world %d", d.Index, d.World.Generation)
	}
	for _, err := range []error{d.Leader.check(), d.World.check(), d.Tally.check()} {
		if err != nil {
			return err
		}
	}
	return nil
}

func (e *ended) check() error {
	if len(e.Ending.Failures) > maxFailures {
		return errors.New("too many failures")
	}
	return checkText(e.Fault)
}

func (a *again) check() error {
	if a.After < 0 {
		return errors.New("a wait below 0")
	}
	return a.Tally.check()
}

func (t *tally) check() error {
	if t.Retries.Max < 0 || t.Retries.Done < 0 || t.Target < 0 || len(t.Lost) > 4*maxAgents {
		return errors.New("tally out of bounds")
	}
	return nil
}

func checkNews(n *launch.News) error {
	if len(n.Addrs) > maxAgents*maxProcs {
		return errors.New("too many addresses")
	}
	if len(n.Standings) > maxProcs {
		return errors.New("what too many ranks wait for")
	}
	for _, s := range []string{n.Stop, n.Lost} {
		if err := checkText(s); err != nil {
			return err
		}
	}
	return nil
}
