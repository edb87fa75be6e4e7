package device

import (
	"context"
	"errors"
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// Stream is an additional stream of a device.
type Stream interface {
	tensor.Stream
	// Close ends the stream after its work, and returns its error.
	Close() error
}

// streams are the further streams of a device, in the order of their creation.
type streams []Stream

// maker returns Device.NewStream, given the creation of a stream.
func (list *streams) maker(create func(name string) (Stream, error)) func(name string) (tensor.Stream, error) {
	return func(name string) (tensor.Stream, error) {
		s, err := create(name)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", name, err)
		}
		*list = append(*list, s)
		return s, nil
	}
}

// close ends the streams after their work. A stream may wait for an earlier one.
func (list *streams) close() error {
	var errs []error
	for _, s := range *list {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
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

// Copy queues a copy on a further stream; see Store.
func (c *copies) Copy(s tensor.Stream, dst, src View) { c.queue(s, "copy", dst, src) }

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
