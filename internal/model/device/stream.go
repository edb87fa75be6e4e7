package device

import (
	"context"
	"errors"

	"github.com/cprun/cprun/tensor"
)

// Stream is an additional stream of a device. Its creator closes it before the device.
type Stream interface {
	tensor.Stream
	// Close ends the stream after its work, and returns its error.
	Close() error
}

// copies queues copies between host and device on two streams, one for each direction, so that they run concurrently
// with computation.
type copies struct {
	compute  tensor.Stream
	up, down Stream
	// queue queues a copy on a stream; name is its name in traces.
	queue func(s tensor.Stream, name string, dst, src View)
	// follow makes compute wait for an event of a copy. That wait does not count as waiting for other ranks.
	follow func(e tensor.Event)
}

func (c *copies) streams() []tensor.Stream { return []tensor.Stream{c.up, c.down} }

func (c *copies) close() error { return errors.Join(c.up.Close(), c.down.Close()) }

// Upload queues an upload; see Store.
func (c *copies) Upload(dst, src View) { c.between(c.up, "upload", dst, src) }

// Download queues a download; see Store.
func (c *copies) Download(dst, src View) { c.between(c.down, "download", dst, src) }

// Prefetch queues an upload without waiting for compute; see Store.
func (c *copies) Prefetch(dst, src View) {
	c.queue(c.up, "upload", dst, src)
	c.follow(c.up.Record())
}

// Offload queues a copy to the host; see Store.
func (c *copies) Offload(dst, src View) { c.queue(c.down, "offload", dst, src) }

// Reload queues a copy from the host; see Store.
func (c *copies) Reload(dst, src View) { c.queue(c.up, "reload", dst, src) }

// Follow makes compute wait for a copy; see Store.
func (c *copies) Follow(e tensor.Event) { c.follow(e) }

// between queues a copy in the order of compute.
func (c *copies) between(s Stream, name string, dst, src View) {
	s.Wait(c.compute.Record())
	c.queue(s, name, dst, src)
	c.follow(s.Record())
}

// hostCopies returns the copies of the CPU, whose device memory is the host's.
func hostCopies(compute *tensor.HostStream) *copies {
	up, down := tensor.NewHostStream("upload"), tensor.NewHostStream("download")
	return &copies{
		compute: compute, up: up, down: down,
		queue: func(s tensor.Stream, name string, dst, src View) {
			s.(*tensor.HostStream).Do(name, func() error {
				tensor.Copy(dst, src)
				return nil
			})
		},
		// Wait would count as waiting for other ranks.
		follow: func(e tensor.Event) {
			compute.Do("", func() error { return e.Sync(context.Background()) })
		},
	}
}
