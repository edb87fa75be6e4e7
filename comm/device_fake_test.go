package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/internal/tensor"
)

// FakeDevice is a device whose memory is the host's under another name, and whose stream is a
// stream of the host.
type FakeDevice struct {
	index int
	s     eagerStream
}

// NewFakeDevice makes the device of a rank.
func NewFakeDevice(rank int) *FakeDevice {
	return &FakeDevice{rank, eagerStream{tensor.NewHostStream(fmt.Sprintf("compute %d", rank))}}
}

// Place is the device as views name it.
func (f *FakeDevice) Place() tensor.Device { return tensor.Device{Kind: "fake", Index: f.index} }

// Stream is the compute stream.
func (f *FakeDevice) Stream() tensor.Stream { return f.s }

// Fail queues an error.
func (f *FakeDevice) Fail(err error) { f.s.HostStream.Fail(err) }

// Close ends the stream.
func (f *FakeDevice) Close() error { return f.s.Close() }

// New is a view of zeros.
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

// unmask is a view of a fake device's memory as one of the host.
func unmask(v View) View {
	var stride [4]int64
	for a := range stride {
		stride[a] = v.Stride(tensor.Axis(a))
	}
	return tensor.NewView(v.Memory().(*maskedMemory).h, v.DType(), v.Offset(), v.Shape(), stride)
}

func unmaskAll(ms []Message) []Message {
	out := make([]Message, len(ms))
	for i, m := range ms {
		out[i] = Message{m.Peer, unmask(m.View)}
	}
	return out
}

func maskedBytes(v View) []byte { return tensor.Bytes(unmask(v)) }

// eagerStream is a stream of the host that takes work as a GPU's does: Do runs what queues.
type eagerStream struct{ *tensor.HostStream }

func (s eagerStream) Do(_ string, queue func() error) {
	if s.Err() == nil {
		s.Fail(queue())
	}
}

func (s eagerStream) copy(dst, src []byte) {
	s.HostStream.Do("copy", func() error {
		copy(dst, src)
		return nil
	})
}

// fakeLibrary joins fake devices as NCCL joins GPUs. Its communicators know no deadline, and one
// that is aborted leaves the others waiting or broken.
type fakeLibrary struct {
	mu     sync.Mutex
	worlds map[uint64]*localWorld // guarded by mu; by the id of the host's group
	refuse error                  // what connect fails with on rank 0
	engine func(ctx context.Context, host *Group) (mover, error)
}

func (l *fakeLibrary) world(id uint64, n int) *localWorld {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.worlds[id] == nil {
		l.worlds[id] = newLocalWorld(n)
	}
	return l.worlds[id]
}

func (l *fakeLibrary) connect(ctx context.Context, host *Group, s deviceStream, _ DeviceOptions, _ <-chan struct{}) (collectives, error) {
	id, err := shareID(ctx, host, 8, func() ([]byte, error) { return []byte("deadbeef"), l.refuse })
	if err != nil || string(id) != "deadbeef" {
		return nil, errors.Join(err, fmt.Errorf("id %q", id))
	}
	w, ranks := l.world(host.id, host.Size()), make([]int, host.Size())
	for r := range ranks {
		ranks[r] = r
	}
	g := newGroup(&localLink{w, host.Rank()}, worldID, ranks, host.Rank(), s, Options{Deadline: -1}.withDefaults())
	return &fakeCalls{g: g, s: s}, nil
}

// fakeCalls are the collectives of one rank.
type fakeCalls struct {
	g *Group
	s deviceStream
}

func (c *fakeCalls) queued(p Pending, err error) error {
	if err == nil {
		p.Wait() // the group's stream, not the host
	}
	return err
}

func (c *fakeCalls) exchange(send, recv []Message) error {
	return c.queued(c.g.Exchange(unmaskAll(send), unmaskAll(recv)))
}
func (c *fakeCalls) allReduce(v View, op Op) error { return c.queued(c.g.AllReduce(unmask(v), op)) }
func (c *fakeCalls) allGather(dst, src View) error {
	return c.queued(c.g.AllGather(unmask(dst), unmask(src)))
}
func (c *fakeCalls) reduceScatter(dst, src View, op Op) error {
	return c.queued(c.g.ReduceScatter(unmask(dst), unmask(src), op))
}
func (c *fakeCalls) broadcast(v View, root int) error {
	return c.queued(c.g.Broadcast(unmask(v), root))
}
func (c *fakeCalls) err() error   { return c.g.Err() }
func (c *fakeCalls) close() error { return c.g.Close() }
func (c *fakeCalls) abort() {
	c.g.Abort(errors.New("aborted communicator"))
	c.g.Close()
}

// FakeDeviceWorld joins fake devices over host groups.
func FakeDeviceWorld(hosts []*Group, devices []*FakeDevice, opts DeviceOptions) ([]*DeviceGroup, error) {
	return fakeDeviceWorld(&fakeLibrary{worlds: map[uint64]*localWorld{}}, hosts, devices, opts)
}

func fakeDeviceWorld(lib *fakeLibrary, hosts []*Group, devices []*FakeDevice, opts DeviceOptions) ([]*DeviceGroup, error) {
	groups, errs := make([]*DeviceGroup, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for r := range hosts {
		wg.Go(func() {
			kit := devices[r].kit()
			kit.connect, kit.engine = lib.connect, lib.engine
			groups[r], errs[r] = newDeviceGroup(context.Background(), hosts[r], kit, opts)
		})
	}
	wg.Wait()
	return groups, errors.Join(errs...)
}

func (f *FakeDevice) kit() *deviceKit {
	return &deviceKit{
		place: f.Place(), compute: f.s,
		newStream: func(name string) (deviceStream, error) { return eagerStream{tensor.NewHostStream(name)}, nil },
		copy:      func(s deviceStream, dst, src View) { s.(eagerStream).copy(maskedBytes(dst), maskedBytes(src)) },
	}
}

// FakeDeviceProcess joins fake devices of several processes. Their library moves bytes over the
// transport of the host's group, and knows no deadline either.
func FakeDeviceProcess(ctx context.Context, host *Group, device *FakeDevice) (*DeviceGroup, error) {
	kit := device.kit()
	kit.connect = func(_ context.Context, host *Group, s deviceStream, _ DeviceOptions, _ <-chan struct{}) (collectives, error) {
		g := newGroup(host.t, host.id^1<<63, host.ranks, host.Rank(), s, Options{Deadline: -1}.withDefaults())
		return &fakeCalls{g: g, s: s}, nil
	}
	return newDeviceGroup(ctx, host, kit, DeviceOptions{})
}
