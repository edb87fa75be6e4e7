package copyengine

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// A heapBoard shares a board within the process, under the race detector.
type heapBoard struct{ b *board }

func newHeapBoard(ranks int) heapBoard {
	return heapBoard{&board{words: make([]uint64, boardWords(ranks)), ranks: ranks}}
}

func (h heapBoard) open(context.Context, *comm.Group) (*board, error) { return h.b, nil }
func (h heapBoard) done(*board) error                                 { return nil }

// A world is a comm.Communicator that exchanges over an engine, and does all else over a host group.
type world struct {
	*comm.Group
	e    *Engine
	stop chan struct{}
	once sync.Once
}

func newWorld(ctx context.Context, c config) (*world, error) {
	e, err := connect(ctx, c)
	if err != nil {
		return nil, err
	}
	w := &world{Group: c.host, e: e, stop: make(chan struct{})}
	go w.listen() // ends with the engine, or at Close
	return w, nil
}

// listen passes the host group's failure to the engine.
func (w *world) listen() {
	for {
		select {
		case <-w.stop:
			return
		case <-w.e.failed:
			return
		case <-time.After(time.Millisecond):
		}
		if err := w.Group.Err(); err != nil && err != comm.ErrClosed {
			w.e.Abort(err)
		}
	}
}

func (w *world) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	w.e.using.Lock()
	defer w.e.using.Unlock()
	p, err := w.e.Exchange(send, recv)
	if err != nil {
		return nil, w.e.fault(err)
	}
	return p, nil
}

// SetDeadline is the engine's and the host group's.
func (w *world) SetDeadline(d time.Duration) {
	w.e.SetDeadline(d)
	w.Group.SetDeadline(d)
}

func (w *world) Abort(cause error) {
	w.Group.Abort(cause)
	if err := w.Group.Err(); err != nil && err != comm.ErrClosed {
		w.e.Abort(err)
	}
}

func (w *world) Close() error {
	w.once.Do(func() { close(w.stop) })
	if err := w.e.Close(); err != nil {
		return err
	}
	return w.Group.Close()
}

// fakeWorld joins ranks of this process by engines over fake devices.
func fakeWorld(compute []tensor.Stream, opts comm.Options) ([]comm.Communicator, error) {
	n := len(compute)
	hosts, board := comm.NewLocal(n, compute, opts), newHeapBoard(n)
	worlds, errs := connectAll(func(r int) config {
		return config{
			host: hosts[r], dev: &fakeDevice{rank: r}, compute: compute[r].(Compute), using: new(sync.Mutex), limit: hosts[r].Options().Deadline,
			share: board,
		}
	}, n)
	cs := make([]comm.Communicator, n)
	for r, w := range worlds {
		if errs[r] != nil {
			return nil, errs[r]
		}
		cs[r] = w
	}
	return cs, nil
}

func connectAll(config func(r int) config, n int) ([]*world, []error) {
	worlds, errs := make([]*world, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { worlds[r], errs[r] = newWorld(context.Background(), config(r)) })
	}
	wg.Wait()
	return worlds, errs
}

// fakeProcess makes a rank with a fake device whose memory consists of files in dir.
func fakeProcess(ctx context.Context, host *comm.Group, dir string) (*Rank, error) {
	dev := &fakeDevice{rank: host.Rank(), dir: dir}
	compute := newFakeStream(nil, 0)
	w, err := newWorld(ctx, config{
		host: host, dev: dev, compute: compute, using: new(sync.Mutex), limit: host.Options().Deadline, share: sharedFile{},
	})
	if err != nil {
		return nil, err
	}
	return &Rank{world: w, rig: fakeRig{dev, compute}}, nil
}

// A rig is a device under test: fake, or a GPU.
type rig interface {
	stream() tensor.Stream
	// bytes returns memory of the device.
	bytes(n int) (tensor.View, error)
	// set queues filling v with x, and check that it holds nothing else. What is wrong is
	// reported by result, when the stream has got there.
	set(v tensor.View, x byte)
	check(what string, v tensor.View, x byte)
	// await queues waiting for a gate, as a kernel does.
	await(g tensor.Gate)
	result(ctx context.Context) error
}

// Rank is one rank of a world of engines, with its device.
type Rank struct {
	*world
	rig rig
	mem tensor.View
}

type fakeRig struct {
	dev     *fakeDevice
	compute *fakeStream
}

func (r fakeRig) stream() tensor.Stream { return r.compute }

func (r fakeRig) bytes(n int) (tensor.View, error) { return r.dev.alloc(n) }

func (r fakeRig) data(v tensor.View) []byte {
	addr, err := r.dev.local(v)
	if err != nil {
		panic(err)
	}
	return fakeMemory.at(addr, int64(v.Size()))
}

func (r fakeRig) set(v tensor.View, x byte) {
	b := r.data(v)
	r.compute.do(func() {
		for i := range b {
			b[i] = x
		}
	})
}

func (r fakeRig) check(what string, v tensor.View, x byte) {
	b := r.data(v)
	r.compute.do(func() {
		for i := range b {
			if b[i] != x {
				r.compute.Fail(fmt.Errorf("%s: byte %d of %d is %d, want %d", what, i, len(b), b[i], x))
				return
			}
		}
	})
}

func (r fakeRig) await(g tensor.Gate) {
	word := r.dev.flags[g.Word]
	r.compute.do(func() {
		for !reached(atomic.LoadUint64(word), g.Count) {
			runtime.Gosched()
		}
	})
}

func (r fakeRig) result(ctx context.Context) error { return r.compute.Sync(ctx) }

// fakeRanks makes n ranks of this process. All streams share queue, or if it is nil, each has a queue of its own with
// that much room.
func fakeRanks(t *testing.T, n int, queue *fakeQueue, room int, opts comm.Options) []*Rank {
	hosts, board := comm.NewLocal(n, nil, opts), newHeapBoard(n)
	rigs := make([]fakeRig, n)
	for r := range n {
		rigs[r] = fakeRig{&fakeDevice{rank: r, queue: queue, room: room}, newFakeStream(queue, room)}
	}
	worlds, errs := connectAll(func(r int) config {
		return config{
			host: hosts[r], dev: rigs[r].dev, compute: rigs[r].compute, using: new(sync.Mutex), limit: hosts[r].Options().Deadline,
			share: board,
		}
	}, n)
	ranks := make([]*Rank, n)
	for r := range n {
		if errs[r] != nil {
			t.Fatal(errs[r])
		}
		ranks[r] = &Rank{world: worlds[r], rig: rigs[r]}
	}
	t.Cleanup(func() {
		for _, r := range ranks {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		for _, r := range rigs {
			r.compute.close()
		}
		if queue != nil {
			queue.close()
		}
	})
	return ranks
}

// each runs f for all ranks at once.
func eachRank(t *testing.T, ranks []*Rank, f func(r *Rank) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, r := range ranks {
		wg.Go(func() {
			if err := f(r); err != nil {
				t.Errorf("rank %d: %v", r.Rank(), err)
			}
		})
	}
	wg.Wait()
}
