package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// A fakeDevice has the host's memory under another name, and a stream of the host.
type fakeDevice struct {
	index int
	s     eagerStream
}

func newFakeDevice(rank int) *fakeDevice {
	return &fakeDevice{rank, eagerStream{tensor.NewHostStream(fmt.Sprintf("compute %d", rank))}}
}

func (f *fakeDevice) place() tensor.Device  { return tensor.Device{Kind: "fake", Index: f.index} }
func (f *fakeDevice) Stream() tensor.Stream { return f.s }
func (f *fakeDevice) Fail(err error)        { f.s.HostStream.Fail(err) }
func (f *fakeDevice) Close() error          { return f.s.Close() }

func (f *fakeDevice) New(d tensor.DType, shape ...int) tensor.View {
	h := tensor.New(d, shape...)
	return tensor.Dense(&maskedMemory{h.Memory().(*tensor.Host), f.place()}, d, 0, h.Shape())
}

// of returns a view of these numbers.
func (f *fakeDevice) of(numbers ...float32) tensor.View {
	v := f.New(tensor.F32, len(numbers))
	copy(values(v), numbers)
	return v
}

// values returns the numbers in a view of a fake device.
func values(v tensor.View) []float32 { return tensor.Data[float32](unmask(v)) }

func (f *fakeDevice) Upload(dst, src tensor.View) {
	f.s.copy(maskedBytes(dst), bytes.Clone(tensor.Bytes(src)))
}

func (f *fakeDevice) Download(dst, src tensor.View) { f.s.copy(tensor.Bytes(dst), maskedBytes(src)) }

type maskedMemory struct {
	h  *tensor.Host
	at tensor.Device
}

func (m *maskedMemory) Device() tensor.Device { return m.at }
func (m *maskedMemory) Bytes() int64          { return m.h.Bytes() }
func (m *maskedMemory) Ptr() unsafe.Pointer   { return m.h.Ptr() }

// unmask returns a view of a fake device's memory as a view of the host.
func unmask(v tensor.View) tensor.View {
	var stride [4]int64
	for a := range stride {
		stride[a] = v.Stride(tensor.Axis(a))
	}
	return tensor.NewView(v.Memory().(*maskedMemory).h, v.DType(), v.Offset(), v.Shape(), stride)
}

func unmaskAll(ms []comm.Message) []comm.Message {
	out := make([]comm.Message, len(ms))
	for i, m := range ms {
		out[i] = comm.Message{Peer: m.Peer, View: unmask(m.View)}
	}
	return out
}

func maskedBytes(v tensor.View) []byte { return tensor.Bytes(unmask(v)) }

// An eagerStream is a stream of the host that takes work like a GPU's stream: Do runs its argument at once, which
// queues work.
type eagerStream struct{ *tensor.HostStream }

func (s eagerStream) Do(_ string, queue func() error) {
	if s.Err() == nil {
		s.Fail(queue())
	}
}

func (s eagerStream) DoDetailed(name, _ string, queue func() error) { s.Do(name, queue) }

func (s eagerStream) copy(dst, src []byte) {
	s.HostStream.Do("copy", func() error {
		copy(dst, src)
		return nil
	})
}

// fakeLibrary joins fake devices as NCCL joins GPUs. Its communicators have no deadline. If one is aborted, the others
// wait or break.
type fakeLibrary struct {
	mu     sync.Mutex
	worlds map[uint64]*local.World // guarded by mu; by the id of the host's group
	refuse error                   // the error of connect on rank 0
	joined atomic.Int64            // calls of connect
	engine func(ctx context.Context, host *comm.Group, compute tensor.Stream) (mover, error)
	sent   atomic.Int64 // messages over a fakeEngine
}

// join returns a group without a deadline of the ranks of host in a world of the library's own.
func (l *fakeLibrary) join(host *comm.Group, id uint64, compute tensor.Stream) *comm.Group {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.worlds == nil {
		l.worlds = map[uint64]*local.World{}
	}
	if l.worlds[id] == nil {
		l.worlds[id] = local.NewWorld(host.Size())
	}
	return comm.NewWorld(l.worlds[id].Link(host.Rank()), host.Rank(), compute, comm.Options{Deadline: -1})
}

func (l *fakeLibrary) connect(ctx context.Context, host *comm.Group, s gpuStream, _ <-chan struct{}) (collectives, error) {
	l.joined.Add(1)
	id, err := shareID(ctx, host, 8, func() ([]byte, error) { return []byte("deadbeef"), l.refuse })
	if err != nil || string(id) != "deadbeef" {
		return nil, errors.Join(err, fmt.Errorf("id %q", id))
	}
	return &fakeCalls{l.join(host, host.ID(), s)}, nil
}

// subEngine makes engines over a group of the hosts.
func (l *fakeLibrary) subEngine(ctx context.Context, host *comm.Group, compute tensor.Stream) (mover, error) {
	g, err := host.Subgroup(ctx, 0, host.Rank(), compute)
	return &fakeEngine{g, &l.sent}, err
}

// A fakeEngine moves data between fake devices, and counts its sends.
type fakeEngine struct {
	*comm.Group
	sent *atomic.Int64
}

func (e *fakeEngine) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	e.sent.Add(int64(len(send)))
	return e.Group.Exchange(unmaskAll(send), unmaskAll(recv))
}

// fakeCalls implements the collectives of one rank.
type fakeCalls struct{ g *comm.Group }

func queued(p comm.Pending, err error) error {
	if err == nil {
		p.Wait() // the group's stream, not the host
	}
	return err
}

func (c *fakeCalls) exchange(send, recv []comm.Message) error {
	return queued(c.g.Exchange(unmaskAll(send), unmaskAll(recv)))
}
func (c *fakeCalls) allReduce(v tensor.View, op comm.Op) error {
	return queued(c.g.AllReduce(unmask(v), op))
}
func (c *fakeCalls) broadcast(v tensor.View, root int) error {
	return queued(c.g.Broadcast(unmask(v), root))
}
func (c *fakeCalls) allGather(dst, src tensor.View) error {
	return queued(c.g.AllGather(unmask(dst), unmask(src)))
}
func (c *fakeCalls) reduceScatter(dst, src tensor.View, op comm.Op) error {
	return queued(c.g.ReduceScatter(unmask(dst), unmask(src), op))
}
func (c *fakeCalls) err() error   { return c.g.Err() }
func (c *fakeCalls) close() error { return c.g.Close() }
func (c *fakeCalls) abort() {
	c.g.Abort(errors.New("aborted communicator"))
	c.g.Close()
}

// connectFakes joins fake devices over host groups.
func connectFakes(lib *fakeLibrary, hosts []*comm.Group, devices []*fakeDevice, opts Options) ([]*Group, error) {
	groups, errs := make([]*Group, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r, host := range hosts {
		wg.Go(func() {
			kit := devices[r].kit(lib.connect)
			if lib.engine != nil {
				kit.engine = func(ctx context.Context, host *comm.Group) (mover, error) {
					return lib.engine(ctx, host, devices[r].s)
				}
			}
			groups[r], errs[r] = newGroup(context.Background(), host, kit, opts, false)
		})
	}
	wg.Wait()
	return groups, errors.Join(errs...)
}

func (f *fakeDevice) kit(
	connect func(context.Context, *comm.Group, gpuStream, <-chan struct{}) (collectives, error),
) *kit {
	return &kit{
		device: f.place(), compute: f.s, connect: connect,
		newStream: func(name string) (gpuStream, error) { return eagerStream{tensor.NewHostStream(name)}, nil },
		copy:      func(s gpuStream, dst, src tensor.View) { s.(eagerStream).copy(maskedBytes(dst), maskedBytes(src)) },
	}
}

// ranksOver joins fake devices over host groups, and closes them when the test ends.
func ranksOver(t *testing.T, lib *fakeLibrary, hosts []*comm.Group, opts Options) ([]*Group, []*fakeDevice, error) {
	devices := make([]*fakeDevice, len(hosts))
	for r := range devices {
		devices[r] = newFakeDevice(r)
	}
	groups, err := connectFakes(lib, hosts, devices, opts)
	t.Cleanup(func() {
		for r, g := range groups {
			if g != nil {
				if err := g.Close(); err != nil {
					t.Error(err)
				}
			}
			devices[r].Close()
		}
	})
	return groups, devices, err
}

// fakeRanks joins n ranks of this process.
func fakeRanks(t *testing.T, lib *fakeLibrary, n int, opts Options) ([]*Group, []*fakeDevice, error) {
	return ranksOver(t, lib, comm.NewLocal(n, nil, comm.Options{}), opts)
}

// each runs f for all ranks at once.
func each(t *testing.T, groups []*Group, f func(r int, g *Group) error) {
	t.Helper()
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			if err := f(r, g); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
}

// with returns a message to or from a rank.
func with(peer int, v tensor.View) []comm.Message { return []comm.Message{{Peer: peer, View: v}} }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
