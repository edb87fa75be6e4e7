package device

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// A FakeDevice has the host's memory under another name, and a stream of the host.
type FakeDevice struct {
	index int
	s     eagerStream
}

// NewFakeDevice makes the device of a rank.
func NewFakeDevice(rank int) *FakeDevice {
	return &FakeDevice{rank, eagerStream{tensor.NewHostStream(fmt.Sprintf("compute %d", rank))}}
}

// Place returns the device of its views.
func (f *FakeDevice) Place() tensor.Device { return tensor.Device{Kind: "fake", Index: f.index} }

// Stream returns the compute stream.
func (f *FakeDevice) Stream() tensor.Stream { return f.s }

// Fail queues an error.
func (f *FakeDevice) Fail(err error) { f.s.HostStream.Fail(err) }

// Close ends the stream.
func (f *FakeDevice) Close() error { return f.s.Close() }

// New returns a view of zeros.
func (f *FakeDevice) New(d tensor.DType, shape ...int) tensor.View {
	h := tensor.New(d, shape...)
	return tensor.Dense(&maskedMemory{h.Memory().(*tensor.Host), f.Place()}, d, 0, h.Shape())
}

// Upload queues a copy from the host.
func (f *FakeDevice) Upload(dst, src tensor.View) {
	own := tensor.New(src.DType(), src.Size())
	copy(tensor.Bytes(own), tensor.Bytes(src))
	f.s.copy(maskedBytes(dst), tensor.Bytes(own))
}

// Download queues a copy to the host.
func (f *FakeDevice) Download(dst, src tensor.View) { f.s.copy(tensor.Bytes(dst), maskedBytes(src)) }

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
	engine func(ctx context.Context, host *comm.Group) (mover, error)
}

func (l *fakeLibrary) world(id uint64, n int) *local.World {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.worlds[id] == nil {
		l.worlds[id] = local.NewWorld(n)
	}
	return l.worlds[id]
}

func (l *fakeLibrary) connect(
	ctx context.Context,
	host *comm.Group,
	s gpuStream,
	_ <-chan struct{},
) (collectives, error) {
	l.joined.Add(1)
	id, err := shareID(ctx, host, 8, func() ([]byte, error) { return []byte("deadbeef"), l.refuse })
	if err != nil || string(id) != "deadbeef" {
		return nil, errors.Join(err, fmt.Errorf("id %q", id))
	}
	w := l.world(host.ID(), host.Size())
	g := comm.NewWorld(w.Link(host.Rank()), host.Rank(), s, comm.Options{Deadline: -1})
	return &fakeCalls{g: g, s: s}, nil
}

// fakeCalls implements the collectives of one rank.
type fakeCalls struct {
	g *comm.Group
	s gpuStream
}

func (c *fakeCalls) queued(p comm.Pending, err error) error {
	if err == nil {
		p.Wait() // the group's stream, not the host
	}
	return err
}

func (c *fakeCalls) exchange(send, recv []comm.Message) error {
	return c.queued(c.g.Exchange(unmaskAll(send), unmaskAll(recv)))
}
func (c *fakeCalls) allReduce(v tensor.View, op comm.Op) error {
	return c.queued(c.g.AllReduce(unmask(v), op))
}
func (c *fakeCalls) allGather(dst, src tensor.View) error {
	return c.queued(c.g.AllGather(unmask(dst), unmask(src)))
}
func (c *fakeCalls) reduceScatter(dst, src tensor.View, op comm.Op) error {
	return c.queued(c.g.ReduceScatter(unmask(dst), unmask(src), op))
}
func (c *fakeCalls) broadcast(v tensor.View, root int) error {
	return c.queued(c.g.Broadcast(unmask(v), root))
}
func (c *fakeCalls) err() error   { return c.g.Err() }
func (c *fakeCalls) close() error { return c.g.Close() }
func (c *fakeCalls) abort() {
	c.g.Abort(errors.New("aborted communicator"))
	c.g.Close()
}

// FakeDeviceWorld joins fake devices over host groups.
func FakeDeviceWorld(hosts []*comm.Group, devices []*FakeDevice, opts Options) ([]*Group, error) {
	return fakeDeviceWorld(&fakeLibrary{worlds: map[uint64]*local.World{}}, hosts, devices, opts)
}

func fakeDeviceWorld(lib *fakeLibrary, hosts []*comm.Group, devices []*FakeDevice, opts Options) ([]*Group, error) {
	groups, errs := make([]*Group, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r := range hosts {
		wg.Go(func() {
			kit := devices[r].kit()
			kit.connect, kit.engine = lib.connect, lib.engine
			groups[r], errs[r] = newGroup(context.Background(), hosts[r], kit, opts, false)
		})
	}
	wg.Wait()
	return groups, errors.Join(errs...)
}

func (f *FakeDevice) kit() *kit {
	return &kit{
		device: f.Place(), compute: f.s,
		newStream: func(name string) (gpuStream, error) { return eagerStream{tensor.NewHostStream(name)}, nil },
		copy:      func(s gpuStream, dst, src tensor.View) { s.(eagerStream).copy(maskedBytes(dst), maskedBytes(src)) },
	}
}

// FakeDeviceProcess joins fake devices of several processes. Their library moves bytes over the
// transport of the host's group, and knows no deadline either.
func FakeDeviceProcess(ctx context.Context, host *comm.Group, device *FakeDevice) (*Group, error) {
	kit := device.kit()
	kit.connect = func(ctx context.Context, host *comm.Group, s gpuStream, _ <-chan struct{}) (collectives, error) {
		g, err := host.Subgroup(ctx, 0, host.Rank(), s)
		if err != nil {
			return nil, err
		}
		g.SetDeadline(-1)
		return &fakeCalls{g: g, s: s}, nil
	}
	return newGroup(ctx, host, kit, Options{}, false)
}
