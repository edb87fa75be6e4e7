package copyengine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
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
	e *Engine
}

func newWorld(ctx context.Context, c config) (*world, error) {
	e, err := connect(ctx, c)
	if err != nil {
		return nil, err
	}
	w := &world{c.host, e}
	go w.listen() // ends with the engine, or at Close
	return w, nil
}

// listen passes the host group's failure to the engine.
func (w *world) listen() {
	select {
	case <-w.e.ending:
	case <-w.e.failed:
	case <-w.Link().Failed():
		w.passOn()
	}
}

func (w *world) passOn() {
	if err := w.Group.Err(); err != nil && err != comm.ErrClosed {
		w.e.Abort(err)
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

// SetDeadline sets the deadline of the engine and of the host group.
func (w *world) SetDeadline(d time.Duration) {
	w.e.SetDeadline(d)
	w.Group.SetDeadline(d)
}

func (w *world) Abort(cause error) {
	w.Group.Abort(cause)
	w.passOn()
}

func (w *world) Close() error { return errors.Join(w.e.Close(), w.Group.Close()) }

// configOf returns the config of a rank.
func configOf(host *comm.Group, dev device, compute Compute, share boardSource) config {
	return config{
		host: host, dev: dev, compute: compute, using: new(sync.Mutex), limit: host.Options().Deadline, share: share,
	}
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

// TestCopyEngine runs the suite with exchanges by the copy engine, over fake devices, and all
// other calls by a host group.
func TestCopyEngine(t *testing.T) {
	t.Parallel()
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		n := len(compute)
		hosts, board, cs := comm.NewLocal(n, compute, opts), newHeapBoard(n), make([]comm.Communicator, n)
		worlds, errs := connectAll(func(r int) config {
			return configOf(hosts[r], &fakeDevice{rank: r}, compute[r].(Compute), board)
		}, n)
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for r, w := range worlds {
			cs[r] = w
		}
		return cs
	})
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

// fakeRanks makes a rank of this process over each host group, until the test ends. All streams share queue, or if it
// is nil, each has a queue of its own with that much room.
func fakeRanks(t *testing.T, hosts []*comm.Group, queue *fakeQueue, room int) []*Rank {
	n := len(hosts)
	rigs, board, ranks := make([]fakeRig, n), newHeapBoard(n), make([]*Rank, n)
	for r := range n {
		rigs[r] = fakeRig{&fakeDevice{rank: r, queue: queue, room: room}, newFakeStream(queue, room)}
	}
	worlds, errs := connectAll(func(r int) config { return configOf(hosts[r], rigs[r].dev, rigs[r].compute, board) }, n)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for r := range n {
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

// localRanks makes n ranks over groups of this process, with queues of their own.
func localRanks(t *testing.T, n int, deadline time.Duration) []*Rank {
	return fakeRanks(t, comm.NewLocal(n, nil, comm.Options{Deadline: deadline}), nil, 0)
}

// eachRank runs f for all ranks at once.
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

// kinds lists the ways to join ranks of several processes by engines.
var kinds = worldtest.ProcessKinds{"copy": {Open: ringOf(fakeProcess)}}

// fakeProcess makes a rank with a fake device whose memory consists of files in dir.
func fakeProcess(ctx context.Context, host *comm.Group, dir string) (*Rank, error) {
	rig := fakeRig{&fakeDevice{rank: host.Rank(), dir: dir}, newFakeStream(nil, 0)}
	w, err := newWorld(ctx, configOf(host, rig.dev, rig.compute, sharedFile{}))
	return &Rank{world: w, rig: rig}, err
}

// ringOf makes ranks pass messages around a ring for ever.
func ringOf(
	connect func(ctx context.Context, host *comm.Group, dir string) (*Rank, error),
) func(context.Context, *comm.Group, string) (worldtest.ProcessRank, error) {
	return func(ctx context.Context, host *comm.Group, dir string) (worldtest.ProcessRank, error) {
		r, err := connect(ctx, host, dir)
		if err != nil {
			return worldtest.ProcessRank{}, err
		}
		step := func(ctx context.Context) error {
			err := r.Ring(ctx, 20, 100_000)
			if err != nil {
				r.Close() // the streams end
			}
			return err
		}
		return worldtest.ProcessRank{Comm: host, Step: step}, nil
	}
}

func TestMain(m *testing.M) {
	kinds.Main()
	goleak.VerifyTestMain(m)
}

// TestKill kills one of four processes. The others must report it by name.
func TestKill(t *testing.T) {
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) { kinds.End(t, kind, "ring", 4, worldtest.Kill, comm.ErrPeerLost.Error()) })
	}
}
