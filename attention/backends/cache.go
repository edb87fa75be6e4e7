package backends

import (
	"sync"
	"sync/atomic"
)

// maxChoices is how many parameter sets a Selector remembers. A run has a handful: its layer
// shapes, with and without training. Past the bound it starts anew, which costs a selection
// each and keeps the common case free of bookkeeping.
const maxChoices = 256

// Selector remembers choices by Params, many at once. Its zero value is ready, and it is safe
// for concurrent use. A hit takes no lock and allocates nothing.
type Selector struct {
	known atomic.Pointer[map[Params]outcome] // never changed, only replaced

	mu         sync.Mutex // held while selecting, so that one goroutine selects for all
	selections atomic.Int64
}

type outcome struct {
	choice *Choice
	err    error
}

// Select does what the package's Select does, once for each p. The choice is shared: read only.
func (s *Selector) Select(p Params) (*Choice, error) {
	if m := s.known.Load(); m != nil {
		if o, ok := (*m)[p]; ok {
			return o.choice, o.err
		}
	}
	return s.miss(p)
}

// Selections returns how many times a selection ran.
func (s *Selector) Selections() int64 { return s.selections.Load() }

func (s *Selector) miss(p Params) (*Choice, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.known.Load()
	if old != nil {
		if o, ok := (*old)[p]; ok {
			return o.choice, o.err
		}
	}
	s.selections.Add(1)
	choice, err := Select(p)
	next := map[Params]outcome{}
	if old != nil && len(*old) < maxChoices {
		for k, v := range *old {
			next[k] = v
		}
	}
	next[p] = outcome{choice, err}
	s.known.Store(&next)
	return choice, err
}
