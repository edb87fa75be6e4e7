//go:build cuda

package cuda

// #include "driver.h"
import "C"

import "time"

// waits adds up how long a stream stands still for others, by a pair of events around each wait.
type waits struct {
	counting bool
	open     []waitPair // not known to be over, oldest first
	free     []waitPair // events to use again
	total    time.Duration
}

type waitPair struct{ from, to C.CUevent }

// waitsOpen is how many pairs there may be before those that are over are looked for: a run that
// logs every thousandth step waits some hundred thousand times in between.
const waitsOpen = 512

// CountWaits has Waited count from here on. It costs two events for each wait.
func (s *Stream) CountWaits() { s.waits.counting = true }

// Waited returns how long the stream has stood still for other streams since CountWaits, as far as
// the device has come. It is for the goroutine that queues.
func (s *Stream) Waited() time.Duration {
	w := &s.waits
	over := 0
	for _, p := range w.open {
		var took C.float
		if C.cprun_event_query(s.dev.ctx, p.to) != C.CUDA_SUCCESS ||
			C.cprun_event_elapsed(s.dev.ctx, &took, p.from, p.to) != C.CUDA_SUCCESS {
			break // not reached, or the device has failed, of which the stream tells
		}
		w.total += milliseconds(took)
		over++
	}
	w.free = append(w.free, w.open[:over]...)
	w.open = append(w.open[:0], w.open[over:]...)
	return w.total
}

// begin records the start of a wait; what it returns records the end.
func (w *waits) begin(s *Stream) (end func()) {
	if !w.counting {
		return nothing
	}
	if len(w.open) >= waitsOpen {
		s.Waited()
	}
	var p waitPair
	if n := len(w.free); n > 0 {
		p, w.free = w.free[n-1], w.free[:n-1]
	} else {
		p = waitPair{s.timing(), s.timing()}
	}
	s.Fail(s.dev.check("cuEventRecord", C.cprun_event_record(s.dev.ctx, p.from, s.handle)))
	return func() {
		s.Fail(s.dev.check("cuEventRecord", C.cprun_event_record(s.dev.ctx, p.to, s.handle)))
		w.open = append(w.open, p)
	}
}
