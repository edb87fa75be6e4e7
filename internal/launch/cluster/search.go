package cluster

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch/cluster/gossip"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// An agent without a leader looks for one at the seeds, among discovered agents and, after the first start, among the
// members of the last world. The first reachable member asks the others to follow it.

const (
	// The wait after a failed dial starts at minRedial and doubles up to maxRedial.
	minRedial = 200 * time.Millisecond
	maxRedial = 2 * time.Second
	// maxDials bounds the concurrent dials: a lost host may take seconds to time out.
	maxDials = 3
	// foreignTime bounds the wait while a foreign process answers at the rendezvous.
	foreignTime = 30 * time.Second
	// After firstWarning the user is warned that no agent was found, and again every warningInterval.
	firstWarning, warningInterval = 10 * time.Second, time.Minute
)

// A search is an agent's knowledge of addresses: which to dial, and which agents to avoid.
type search struct {
	cfg      *Config
	began    time.Time
	dials    map[string]*dialing
	suspects map[string]time.Time // agents that may be lost, and until when to avoid them
	hints    []gossip.Peer        // agents that seem alive

	lastRefusal  string    // error of the last dial of the rendezvous
	foreignSince time.Time // since when a foreign process answers there; zero: none does
	warnedAt     time.Time // when the user was last warned of it

	lastForeign   string // the last logged refusal
	lastForeignAt time.Time
}

// A dialing records the attempts to connect to an address.
type dialing struct {
	on    bool
	tries int
	next  time.Time
}

func newSearch(cfg *Config, now time.Time) search {
	return search{cfg: cfg, began: now, dials: map[string]*dialing{}, suspects: map[string]time.Time{}}
}

func (s *search) of(addr string) *dialing {
	if s.dials[addr] == nil {
		s.dials[addr] = new(dialing)
	}
	return s.dials[addr]
}

// begin reports whether to dial an address now: no dial is in progress, and none failed a moment ago.
func (s *search) begin(addr string, now time.Time) bool {
	d := s.of(addr)
	if d.on || now.Before(d.next) {
		return false
	}
	d.on = true
	return true
}

// ended records the result of a dial.
func (s *search) ended(addr string, err error, now time.Time) {
	d := s.of(addr)
	d.on, d.next = false, now.Add(min(maxRedial, minRedial<<min(d.tries, 5)))
	d.tries++
	if errors.Is(err, wire.ErrSelf) {
		d.next = now.Add(time.Hour)
	}
}

// rendezvous reports whether an address is the job's meeting place.
func (s *search) rendezvous(addr string) bool { return len(s.cfg.Seeds) > 0 && addr == s.cfg.Seeds[0] }

// failed handles a failed dial before the first start. It returns true if this agent must end: an agent of the job
// refuses it, another program answers at the rendezvous, or the agent of another job stays there: the previous job may
// still use the port for a while.
func (s *search) failed(addr string, err error, now time.Time) (end bool) {
	refusal := (*wire.Refusal)(nil)
	refused := errors.As(err, &refusal) && !errors.Is(err, wire.ErrBoth)
	switch {
	case refused && refusal.Proven:
		return true
	case !s.rendezvous(addr):
		return false
	case errors.Is(err, wire.ErrForeign):
		return true
	case !refused:
		s.foreignSince = time.Time{}
	case s.foreignSince.IsZero():
		s.foreignSince = now
		s.logForeign(refusal, now)
	case now.Sub(s.foreignSince) >= foreignTime:
		return true
	}
	s.lastRefusal = err.Error()
	if now.Sub(s.began) >= firstWarning && now.Sub(s.warnedAt) >= warningInterval {
		s.warnedAt = now
		s.cfg.Log("no agent of the job answers at %s yet: %v", addr, err)
	}
	return false
}

// noneFound returns the error of a search without a result.
func (s *search) noneFound() string {
	last := ""
	if s.lastRefusal != "" {
		last = ": " + s.lastRefusal
	}
	return fmt.Sprintf("no agent of job %s answered in %v at %s%s", s.cfg.Job, s.cfg.JoinTimeout,
		strings.Join(s.cfg.Seeds, ", "), last)
}

// logForeign logs a refused connection, with a limited rate.
func (s *search) logForeign(r *wire.Refusal, now time.Time) {
	const quiet = 10 * time.Second
	if text := r.Error(); text != s.lastForeign || now.Sub(s.lastForeignAt) > quiet {
		s.lastForeign, s.lastForeignAt = text, now
		s.cfg.Log("%s", text)
	}
}

// avoid keeps an agent from being followed for a while.
func (s *search) avoid(name string, now time.Time) { s.suspects[name] = now.Add(2 * s.cfg.Silence) }

func (s *search) avoids(name string, now time.Time) bool { return now.Before(s.suspects[name]) }

// alive lists the members that may be alive, in the order in which they should lead.
func (s *search) alive(members []Member, self string, peers peers, now time.Time) (alive []Member) {
	hinted := map[string]bool{}
	for _, f := range s.hints {
		hinted[f.Name] = true
	}
	for _, m := range members {
		gone := len(hinted) > 0 && !hinted[m.Name] && peers[m.Name] == nil
		if m.Name == self || !gone && !s.avoids(m.Name, now) {
			alive = append(alive, m)
		}
	}
	return alive
}
