package comm

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// heapBoard shares a board within the process, where the race detector sees it.
type heapBoard struct{ b *copyBoard }

func newHeapBoard(ranks int) heapBoard {
	return heapBoard{&copyBoard{words: make([]uint64, boardWords(ranks)), ranks: ranks}}
}

func (h heapBoard) open(context.Context, *Group) (*copyBoard, error) { return h.b, nil }
func (h heapBoard) done(*copyBoard) error                            { return nil }

// copyWorld is a Communicator whose Exchange goes by an engine and all else by a host group.
type copyWorld struct {
	*Group
	e    *copyEngine
	stop chan struct{}
	once sync.Once
}

func newCopyWorld(ctx context.Context, c copyConfig) (*copyWorld, error) {
	e, err := connectCopyEngine(ctx, c)
	if err != nil {
		return nil, err
	}
	w := &copyWorld{Group: c.host, e: e, stop: make(chan struct{})}
	go w.listen() // ends with the engine, or at Close
	return w, nil
}

// listen passes on what the host group learns of the other ranks.
func (w *copyWorld) listen() {
	for {
		select {
		case <-w.stop:
			return
		case <-w.e.failed:
			return
		case <-time.After(time.Millisecond):
		}
		if err := w.Group.Err(); err != nil && err != ErrClosed {
			w.e.abort(err)
		}
	}
}

func (w *copyWorld) Exchange(send, recv []Message) (Pending, error) {
	w.e.using.Lock()
	defer w.e.using.Unlock()
	p, err := w.e.exchange(send, recv)
	if err != nil {
		return nil, w.fault("exchange", err)
	}
	return p, nil
}

// SetDeadline is the engine's and the host group's.
func (w *copyWorld) SetDeadline(d time.Duration) {
	w.e.setDeadline(d)
	w.Group.SetDeadline(d)
}

func (w *copyWorld) Abort(cause error) {
	w.Group.Abort(cause)
	if err := w.Group.Err(); err != nil && err != ErrClosed {
		w.e.abort(err)
	}
}

func (w *copyWorld) Close() error {
	w.once.Do(func() { close(w.stop) })
	if err := w.e.close(); err != nil {
		return err
	}
	return w.Group.Close()
}

// FakeCopyWorld joins ranks of this process by engines over fake devices.
func FakeCopyWorld(compute []tensor.Stream, opts Options) ([]Communicator, error) {
	n := len(compute)
	hosts, board := NewLocal(n, compute, opts), newHeapBoard(n)
	worlds, errs := connectAllCopies(func(r int) copyConfig {
		return copyConfig{
			host: hosts[r], dev: &fakeDevice{rank: r}, compute: compute[r], using: new(sync.Mutex), limit: hosts[r].opts.Deadline,
			lanes: 1 + n%2, split: 1000, share: board,
		}
	}, n)
	cs := make([]Communicator, n)
	for r, w := range worlds {
		if errs[r] != nil {
			return nil, errs[r]
		}
		cs[r] = w
	}
	return cs, nil
}

func connectAllCopies(config func(r int) copyConfig, n int) ([]*copyWorld, []error) {
	worlds, errs := make([]*copyWorld, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { worlds[r], errs[r] = newCopyWorld(context.Background(), config(r)) })
	}
	wg.Wait()
	return worlds, errs
}

// CopyWorlds are the ways to join ranks of several processes by engines.
var CopyWorlds = map[string]func(ctx context.Context, host *Group, dir string) (*CopyRank, error){
	"copy": fakeProcess,
}

// fakeProcess is a rank with a fake device whose memory lies in files of dir.
func fakeProcess(ctx context.Context, host *Group, dir string) (*CopyRank, error) {
	dev := &fakeDevice{rank: host.Rank(), dir: dir}
	compute := newFakeStream(nil, 0)
	w, err := newCopyWorld(ctx, copyConfig{
		host: host, dev: dev, compute: compute, using: new(sync.Mutex), limit: host.opts.Deadline, lanes: 1, split: splitBytes, share: sharedFile{},
	})
	if err != nil {
		return nil, err
	}
	return &CopyRank{copyWorld: w, rig: fakeRig{dev, compute}}, nil
}

// copyRig is a device under test: fake, or a GPU.
type copyRig interface {
	stream() tensor.Stream
	// bytes is memory of the device.
	bytes(n int) (View, error)
	// set queues filling v with x, and check that it holds nothing else. What is wrong is
	// reported by result, when the stream has got there.
	set(v View, x byte)
	check(what string, v View, x byte)
	result(ctx context.Context) error
}

// CopyRank is one rank of a world of engines, with its device.
type CopyRank struct {
	*copyWorld
	rig copyRig
	mem View
}

type fakeRig struct {
	dev     *fakeDevice
	compute *fakeStream
}

func (r fakeRig) stream() tensor.Stream { return r.compute }

func (r fakeRig) bytes(n int) (View, error) { return r.dev.alloc(n) }

func (r fakeRig) data(v View) []byte {
	addr, err := r.dev.local(v)
	if err != nil {
		panic(err)
	}
	return fakeMemory.at(addr, int64(v.Size()))
}

func (r fakeRig) set(v View, x byte) {
	b := r.data(v)
	r.compute.do(func() {
		for i := range b {
			b[i] = x
		}
	})
}

func (r fakeRig) check(what string, v View, x byte) {
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

func (r fakeRig) result(ctx context.Context) error { return r.compute.Sync(ctx) }

// fakeCopyRanks makes n ranks of this process. With a queue all streams of all ranks share it, else
// each has one with that much room.
func fakeCopyRanks(t *testing.T, n int, queue *fakeQueue, room int, opts Options) []*CopyRank {
	hosts, board := NewLocal(n, nil, opts), newHeapBoard(n)
	rigs := make([]fakeRig, n)
	for r := range n {
		rigs[r] = fakeRig{&fakeDevice{rank: r, queue: queue, room: room}, newFakeStream(queue, room)}
	}
	worlds, errs := connectAllCopies(func(r int) copyConfig {
		return copyConfig{
			host: hosts[r], dev: rigs[r].dev, compute: rigs[r].compute, using: new(sync.Mutex), limit: hosts[r].opts.Deadline,
			lanes: 1 + n%2, split: 1000, share: board,
		}
	}, n)
	ranks := make([]*CopyRank, n)
	for r := range n {
		if errs[r] != nil {
			t.Fatal(errs[r])
		}
		ranks[r] = &CopyRank{copyWorld: worlds[r], rig: rigs[r]}
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
func eachCopyRank(t *testing.T, ranks []*CopyRank, f func(r *CopyRank) error) {
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
