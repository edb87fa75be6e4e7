package device

import (
	"context"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// gpuStream is a stream of a device. Do queues what its argument queues, and returns.
type gpuStream interface {
	tensor.Stream
	Do(name string, work func() error)
	// DoDetailed is Do with the detail of its span in a trace.
	DoDetailed(name, detail string, work func() error)
	Fail(err error)
	Err() error
	Close() error
}

// collectives are the calls of a library, NCCL, between the devices of a group. Those that
// queue do so on the stream that they were made with; they return nil when the work is queued.
// One goroutine makes them; err, abort and close are for any.
type collectives interface {
	exchange(send, recv []comm.Message) error // none to the own rank, none empty
	allReduce(v tensor.View, op comm.Op) error
	allGather(dst, src tensor.View) error
	reduceScatter(dst, src tensor.View, op comm.Op) error
	broadcast(v tensor.View, root int) error
	// err is what has gone wrong since, or nil.
	err() error
	// abort ends what is under way on the device, as an error or not, and gives everything back.
	abort()
	// close gives everything back. Nothing is under way.
	close() error
}

// solo is the collectives of one rank.
type solo struct {
	kit    *kit
	stream gpuStream
}

func (s solo) exchange([]comm.Message, []comm.Message) error { return nil }
func (s solo) allReduce(tensor.View, comm.Op) error          { return nil }
func (s solo) broadcast(tensor.View, int) error              { return nil }
func (s solo) err() error                                    { return nil }
func (s solo) abort()                                        {}
func (s solo) close() error                                  { return nil }

func (s solo) allGather(dst, src tensor.View) error {
	if !check.Same(dst, src) {
		s.kit.copy(s.stream, dst, src)
	}
	return nil
}

func (s solo) reduceScatter(dst, src tensor.View, _ comm.Op) error { return s.allGather(dst, src) }

// mover carries exchanges between the devices of a group: all messages of a call, also those to
// the own rank. Its errors need not say what call they are of.
type mover interface {
	Exchange(send, recv []comm.Message) (comm.Pending, error)
	// SetDeadline sets how long a message may stand still. Negative means for ever.
	SetDeadline(limit time.Duration)
	// Streams returns the streams that copy, for traces.
	Streams() []tensor.Stream
	// Waits returns the calls that are not over; see comm.Group.
	Waits() []comm.Wait
	// Abort fails all calls and has the device end them.
	Abort(cause error)
	Close() error
}

// kit is what a Group needs of its device. All groups of a rank share it.
type kit struct {
	place     tensor.Device
	compute   gpuStream
	newStream func(name string) (gpuStream, error)
	copy      func(s gpuStream, dst, src tensor.View) // of the device, dense and of one size
	// connect joins the ranks of host; it gives up when stop is closed.
	connect func(ctx context.Context, host *comm.Group, s gpuStream, opts Options,
		stop <-chan struct{}) (collectives, error)
	// engine joins the ranks of host by their copy engines. If it fails on one rank, it does
	// on all. It may be nil.
	engine func(ctx context.Context, host *comm.Group) (mover, error)

	// order guards the compute stream, which several groups may use from goroutines of their
	// own. It comes before a group's events.
	order sync.Mutex
}
