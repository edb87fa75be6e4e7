package tensor

import "time"

// Work is what a stream is at.
type Work struct {
	Name, Label string // as a Span has them
	Since       time.Time
	For         Event // of another stream, which it stands waiting for; nil: it works
}

// At returns what the stream is at now, for those who ask why nothing goes on. It is false if the stream has nothing
// to do. The host of a GPU does not know, so a stream of a GPU has no such method.
func (s *HostStream) At() (w Work, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at, !s.at.Since.IsZero()
}
