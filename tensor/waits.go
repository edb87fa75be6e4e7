package tensor

import "time"

// WaitCounter is a Stream that tells how long it has stood waiting for events of other streams,
// such as those of transfers. HostStream is one, and so are the streams of GPUs.
type WaitCounter interface {
	// CountWaits begins to count, on streams that do not count from the start.
	CountWaits()
	// Waited returns the time counted so far.
	Waited() time.Duration
}

var _ WaitCounter = (*HostStream)(nil)

// CountWaits does nothing: a stream of the host always counts.
func (s *HostStream) CountWaits() {}
