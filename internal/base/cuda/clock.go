//go:build cuda

package cuda

// #include "driver.h"
import "C"

import (
	"errors"
	"fmt"
)

// Clock takes the device's time at points of a stream, without a wait between them.
type Clock struct {
	s      *Stream
	events []C.CUevent
}

// NewClock returns a clock with that many points. The caller closes it.
func (s *Stream) NewClock(points int) (*Clock, error) {
	c := &Clock{s: s, events: make([]C.CUevent, points)}
	for i := range c.events {
		if err := s.dev.check("cuEventCreate", C.cprun_event_new(s.dev.ctx, &c.events[i],
			C.CU_EVENT_DEFAULT)); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// Mark queues taking the time of point i.
func (c *Clock) Mark(i int) {
	if c.s.failed.Load() {
		return
	}
	c.s.Fail(c.s.dev.check("cuEventRecord", C.cprun_event_record(c.s.dev.ctx, c.events[i], c.s.handle)))
}

// Between returns the seconds from point i to point j. The stream has been waited for since.
func (c *Clock) Between(i, j int) (float64, error) {
	var ms C.float
	if err := c.s.dev.check("cuEventElapsedTime", C.cprun_event_elapsed(c.s.dev.ctx, &ms, c.events[i],
		c.events[j])); err != nil {
		return 0, fmt.Errorf("time from point %d to %d: %w", i, j, err)
	}
	return float64(ms) / 1e3, nil
}

// Close frees the events.
func (c *Clock) Close() error {
	var all []error
	for _, e := range c.events {
		if e != nil {
			all = append(all, c.s.dev.check("cuEventDestroy", C.cprun_event_free(c.s.dev.ctx, e)))
		}
	}
	c.events = nil
	return errors.Join(all...)
}
