package worker

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// start notes what the time until the first step goes to. Parts may overlap.
type start struct {
	mu    sync.Mutex
	began time.Time
	parts []part // guarded by mu; in the order in which they began
}

type part struct {
	name string
	took time.Duration
}

func newStart() *start { return &start{began: time.Now()} }

// time notes a part from now until the function that it returns is called.
func (s *start) time(name string) (end func()) {
	began := time.Now()
	s.mu.Lock()
	i := len(s.parts)
	s.parts = append(s.parts, part{name: name})
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.parts[i].took = time.Since(began)
	}
}

// String returns a line for the log: "first step done in 3.21 s: context 0.90, weights 1.10, ...".
func (s *start) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	parts := make([]string, len(s.parts))
	for i, p := range s.parts {
		parts[i] = fmt.Sprintf("%s %.2f", p.name, p.took.Seconds())
	}
	return fmt.Sprintf("first step done in %.2f s: %s (s; parts may overlap)", time.Since(s.began).Seconds(), strings.Join(parts, ", "))
}
