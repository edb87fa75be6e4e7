//go:build cuda

package device

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/copyengine"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/comm/internal/pace"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/nccl"
	"github.com/cprun/cprun/tensor"
)

// New joins the GPUs of host's ranks, one for each. Calls are ordered against compute, and a failure of the group
// poisons it. The new group takes over host, with its deadline, also if New fails; host should have no compute stream.
// Close the group before compute and its device.
func New(ctx context.Context, host *comm.Group, compute *cuda.Stream, opts Options) (*Group, error) {
	dev := compute.Device()
	kit := &kit{
		device: dev.Place(), compute: compute,
		newStream: func(name string) (gpuStream, error) {
			s, err := dev.NewStream(name, true)
			if err != nil { // a nil *cuda.Stream would be a stream
				return nil, err
			}
			return s, nil
		},
		copy: func(s gpuStream, dst, src tensor.View) {
			s.(*cuda.Stream).Copy(dst.Addr(), src.Addr(), check.Bytes(src))
		},
		connect: func(ctx context.Context, host *comm.Group, s gpuStream, stop <-chan struct{}) (collectives, error) {
			n, err := connectNCCL(ctx, host, s.(*cuda.Stream), stop)
			if err != nil {
				return nil, err
			}
			return n, nil
		},
	}
	kit.engine = func(ctx context.Context, host *comm.Group) (mover, error) {
		e, err := copyengine.New(ctx, host, dev, compute, &kit.order)
		if err != nil {
			return nil, err
		}
		return e, nil
	}
	return newGroup(ctx, host, kit, opts, false)
}

// ncclCalls implements the group's collectives with NCCL.
type ncclCalls struct {
	c      *nccl.Comm
	stream *cuda.Stream
	stop   <-chan struct{} // closed when the host's group has failed
	ended  chan struct{}   // closed by abort
}

// maxCTAs bounds the processors of a device for a collective. Groups with calls in flight at once must fit on the
// device together.
const maxCTAs = 16

// connectNCCL makes a communicator of host's ranks. Rank 0 makes the id.
func connectNCCL(ctx context.Context, host *comm.Group, s *cuda.Stream, stop <-chan struct{}) (*ncclCalls, error) {
	id, err := shareID(ctx, host, nccl.IDBytes, func() ([]byte, error) {
		id, err := nccl.NewID()
		return id[:], err
	})
	if err != nil {
		return nil, err
	}
	c, err := nccl.Init(s.Device(), nccl.ID(id), host.Rank(), host.Size(), nccl.Config{
		MaxCTAs: maxCTAs, Name: fmt.Sprintf("cprun %016x", host.ID()),
	})
	if err != nil {
		return nil, err
	}
	n := &ncclCalls{c: c, stream: s, stop: stop, ended: make(chan struct{})}
	if err := n.wait(ctx); err != nil {
		n.abort()
		return nil, fmt.Errorf("ncclCommInitRankConfig: %w", err)
	}
	return n, nil
}

// launchTime is how long wait polls NCCL without a pause. NCCL makes a call on a new thread within 50 to 150 µs, and a
// sleep would take as long again.
const launchTime = 300 * time.Microsecond

// wait returns when NCCL has done the call.
func (n *ncclCalls) wait(ctx context.Context) error {
	for pause := (pace.Backoff{Spin: launchTime}); ; pause.Wait() {
		if busy, err := n.c.Busy(); err != nil || !busy {
			return err
		}
		select {
		case <-n.stop:
			return comm.ErrAborted
		case <-n.ended:
			return comm.ErrAborted
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
	}
}

func (n *ncclCalls) done(err error) error {
	if err != nil {
		return err
	}
	return n.wait(context.Background())
}

func (n *ncclCalls) exchange(send, recv []comm.Message) error {
	ms := make([]nccl.Message, 0, len(send)+len(recv))
	for _, m := range send {
		ms = append(ms, nccl.Message{Addr: m.View.Addr(), Bytes: check.Bytes(m.View), Peer: m.Peer, Send: true})
	}
	for _, m := range recv {
		ms = append(ms, nccl.Message{Addr: m.View.Addr(), Bytes: check.Bytes(m.View), Peer: m.Peer})
	}
	return n.done(n.c.Exchange(n.stream, ms))
}

var ncclOps = map[comm.Op]nccl.Op{comm.Sum: nccl.Sum, comm.Max: nccl.Max, comm.Min: nccl.Min}

func (n *ncclCalls) allReduce(v tensor.View, op comm.Op) error {
	return n.done(n.c.AllReduce(n.stream, v.Addr(), v.Size(), v.DType(), ncclOps[op]))
}

func (n *ncclCalls) allGather(dst, src tensor.View) error {
	return n.done(n.c.AllGather(n.stream, dst.Addr(), src.Addr(), check.Bytes(src)))
}

func (n *ncclCalls) reduceScatter(dst, src tensor.View, op comm.Op) error {
	return n.done(n.c.ReduceScatter(n.stream, dst.Addr(), src.Addr(), dst.Size(), dst.DType(), ncclOps[op]))
}

func (n *ncclCalls) broadcast(v tensor.View, root int) error {
	return n.done(n.c.Broadcast(n.stream, v.Addr(), check.Bytes(v), root))
}

func (n *ncclCalls) err() error {
	_, err := n.c.Busy()
	if errors.Is(err, nccl.ErrGone) {
		return nil // ended here, with a known cause
	}
	return err
}

func (n *ncclCalls) abort() {
	close(n.ended)
	n.c.Abort()
}

func (n *ncclCalls) close() error { return n.c.Destroy() }

var _ gpuStream = (*cuda.Stream)(nil)
