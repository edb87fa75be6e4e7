package backends

import "sync"

// maxChoices bounds the choices that a Selector remembers. A run has a handful: its layer shapes, with and without
// training.
const maxChoices = 256

// Selector remembers choices by Params. Its zero value is ready, and it is safe for concurrent use.
type Selector struct {
	mu    sync.Mutex
	known map[Params]outcome
}

type outcome struct {
	choice *Choice
	err    error
}

// Select does what the package's Select does, once for each p. The choice is shared: read only.
func (s *Selector) Select(p Params) (*Choice, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, ok := s.known[p]; ok {
		return o.choice, o.err
	}
	if s.known == nil || len(s.known) == maxChoices {
		s.known = map[Params]outcome{}
	}
	choice, err := Select(p)
	s.known[p] = outcome{choice, err}
	return choice, err
}
