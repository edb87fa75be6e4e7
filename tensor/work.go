package tensor

import "time"

// Work is what a stream is at.
type Work struct {
	Name, Label string // as a Span has them
	Since       time.Time
	For         Event // of another stream, which it stands waiting for; nil: it works
}

// Worker is a stream that tells what it is at, for those who ask why nothing goes on. HostStream is
// one. A stream of a GPU is none: its host does not know.
type Worker interface {
	// At returns what the stream is at. It is false where it has nothing to do.
	At() (w Work, busy bool)
}

var _ Worker = (*HostStream)(nil)

// At returns what the stream is at now.
func (s *HostStream) At() (w Work, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at, !s.at.Since.IsZero()
}
