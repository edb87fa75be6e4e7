package device

import (
	"context"
	"errors"

	"github.com/cprun/cprun/tensor"
)

// Stream is a further stream of a device. Its maker closes it, before the device.
type Stream interface {
	tensor.Stream
	// Close ends the stream after its work, and returns its error.
	Close() error
}

// copies queues copies between the host and a device on two streams of their own, one each way,
// so that they run beside computation as far as their order lets them.
type copies struct {
	compute  tensor.Stream
	up, down Stream
	// queue queues a copy on one of them; name is its name in traces.
	queue func(s Stream, name string, dst, src View)
	// follow makes compute wait for an event of theirs. It does not count as waiting for other
	// ranks.
	follow func(e tensor.Event)
}

func (c *copies) streams() []tensor.Stream { return []tensor.Stream{c.up, c.down} }

func (c *copies) close() error { return errors.Join(c.up.Close(), c.down.Close()) }

// Upload queues an upload; see Store.
func (c *copies) Upload(dst, src View) { c.between(c.up, "upload", dst, src) }

// Download queues a download; see Store.
func (c *copies) Download(dst, src View) { c.between(c.down, "download", dst, src) }

// Prefetch queues an upload that waits for nothing; see Store.
func (c *copies) Prefetch(dst, src View) {
	c.queue(c.up, "upload", dst, src)
	c.follow(c.up.Record())
}

// between queues a copy between the work on compute so far and later work.
func (c *copies) between(s Stream, name string, dst, src View) {
	s.Wait(c.compute.Record())
	c.queue(s, name, dst, src)
	c.follow(s.Record())
}

// hostCopies returns the copies of the CPU as a device with the host's memory.
func hostCopies(compute *tensor.HostStream) *copies {
	up, down := tensor.NewHostStream("upload"), tensor.NewHostStream("download")
	return &copies{
		compute: compute, up: up, down: down,
		queue: func(s Stream, name string, dst, src View) {
			s.(*tensor.HostStream).Do(name, func() error {
				tensor.Copy(dst, src)
				return nil
			})
		},
		// Wait would count as time of waiting for other ranks.
		follow: func(e tensor.Event) {
			compute.Do("", func() error { return e.Sync(context.Background()) })
		},
	}
}
