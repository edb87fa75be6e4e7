package wire

import (
	"math"
	"sync"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// A roster holds the latest states of all ranks of the world, first or second hand: names, waits, departures. Each rank
// numbers its states and only the last counts, so that routes, repetition and lost older ones do not matter.
type roster struct {
	own   int
	alarm blame.Alarm // rings when another rank announces a wait

	mu     sync.Mutex
	names  []string // guarded by mu; "" if it is not known
	states []state  // guarded by mu
	waits  blame.WaitState
}

// A state is the latest announcement of a rank.
type state struct {
	seq   uint64 // number; lastWord is the highest
	value uint64 // the size of a status frame
}

// lastWord numbers a rank's departure.
const lastWord = math.MaxUint64

func newRoster(own, size int, name string) *roster {
	r := &roster{own: own, names: make([]string, size), states: make([]state, size)}
	r.names[own] = name
	return r
}

// name returns the name of a rank, or "".
func (r *roster) name(rank int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.names[rank]
}

func (r *roster) introduce(rank int, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[rank] = name
}

func (r *roster) hasLeft(rank int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.states[rank].seq == lastWord
}

// waitsFor returns the peer that a rank waits for, or -1.
func (r *roster) waitsFor(rank int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.states[rank]; s.seq != lastWord {
		return int(s.value) - 1
	}
	return -1
}

// say records the peer that a part of the own rank waits for, or -1, and reports whether that is news.
func (r *roster) say(who any, peer int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, value := &r.states[r.own], uint64(r.waits.Set(who, peer)+1)
	if s.value == value {
		return false
	}
	s.seq, s.value = s.seq+1, value
	return true
}

// learn records the state of a rank, with a name, and reports whether it is news.
func (r *roster) learn(rank int, s state, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rank == r.own || s.seq <= r.states[rank].seq {
		return false
	}
	before := r.states[rank]
	r.states[rank] = s
	r.alarm.Late(before.waits(), s.waits())
	if about := s.about(rank); about >= 0 && r.names[about] == "" {
		r.names[about] = name
	}
	return true
}

// waits reports whether the rank waits.
func (s state) waits() bool { return s.seq != lastWord && s.value > 0 }

// about returns the rank that a state names: the one waited for, the rank itself after its departure, or -1.
func (s state) about(rank int) int {
	if s.seq == lastWord {
		return rank
	}
	return int(s.value) - 1
}

// status returns the frame of a rank's latest state.
func (r *roster) status(rank int) (header, []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, name := r.states[rank], ""
	if about := s.about(rank); about >= 0 {
		name = r.names[about]
	}
	return header{kind: frameStatus, length: len(name), id: link.MsgID{Group: uint64(rank), Seq: s.seq}, size: s.value},
		[]byte(name)
}
