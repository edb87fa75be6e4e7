//go:build cuda

package device

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/nccl"
	"github.com/cprun/cprun/tensor"
)

// testMemory bounds the memory of a test on a GPU, and the pinned memory for transfers between two waits.
const (
	testMemory = 1 << 30
	testPinned = 256 << 20
)

// A gpu is a GPU that tests use one after another. It is opened once, since contexts take long.
type gpu struct {
	dev    *cuda.Device
	mem    *cuda.Memory
	pinned *cuda.Pinned
}

var gpus struct {
	mu  sync.Mutex
	all map[int]*gpu // guarded by mu
}

func openGPU(ordinal int) (*gpu, error) {
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	if g := gpus.all[ordinal]; g != nil {
		return g, nil
	}
	dev, err := cuda.Open(ordinal)
	if err != nil {
		return nil, err
	}
	g := &gpu{dev: dev}
	if g.mem, err = dev.Alloc(testMemory); err != nil {
		return nil, err
	}
	if g.pinned, err = dev.AllocHost(testPinned); err != nil {
		return nil, err
	}
	if gpus.all == nil {
		gpus.all = map[int]*gpu{}
	}
	gpus.all[ordinal] = g
	return g, nil
}

// A gpuDevice is a GPU under test.
type gpuDevice struct {
	*gpu
	stream *cuda.Stream
	arena  *tensor.Arena
	used   int64      // of the pinned memory, since the last wait
	down   []download // to be copied on from the pinned memory
}

type download struct {
	dst tensor.View
	src []byte
}

func newGPUDevice(ordinal int) (*gpuDevice, error) {
	g, err := openGPU(ordinal)
	if err != nil {
		return nil, err
	}
	s, err := g.dev.NewStream(fmt.Sprintf("compute %d", ordinal), false)
	if err != nil {
		return nil, err
	}
	arena := tensor.NewArena(testMemory, func(int64) tensor.Memory { return g.mem })
	return &gpuDevice{gpu: g, stream: s, arena: arena}, nil
}

func (d *gpuDevice) Stream() tensor.Stream { return stagedStream{d.stream, d} }
func (d *gpuDevice) Fail(err error)        { d.stream.Fail(err) }

func (d *gpuDevice) Close() error {
	_ = d.stream.Close() // it may have been poisoned on purpose
	return nil
}

func (d *gpuDevice) New(t tensor.DType, shape ...int) tensor.View {
	v := d.arena.Alloc(t, shape...)
	d.stream.Memset(v.Addr(), 0, int64(v.Size()*t.Size()))
	return v
}

// stage returns pinned memory, valid until the next wait.
func (d *gpuDevice) stage(n int) (addr uint64, b []byte) {
	if d.used+int64(n) > testPinned {
		_ = d.Stream().Sync(context.Background()) // an error stays in the stream
	}
	p := unsafe.Add(d.pinned.Host().Ptr(), d.used)
	d.used += (int64(n) + 255) &^ 255
	return uint64(uintptr(p)), unsafe.Slice((*byte)(p), n)
}

func (d *gpuDevice) Upload(dst, src tensor.View) {
	b := tensor.Bytes(src)
	addr, staged := d.stage(len(b))
	copy(staged, b)
	d.stream.Copy(dst.Addr(), addr, int64(len(b)))
}

func (d *gpuDevice) Download(dst, src tensor.View) {
	n := src.Size() * src.DType().Size()
	addr, staged := d.stage(n)
	d.stream.Copy(addr, src.Addr(), int64(n))
	d.down = append(d.down, download{dst, staged})
}

// stagedStream finishes downloads when it has been waited for.
type stagedStream struct {
	*cuda.Stream
	d *gpuDevice
}

func (s stagedStream) Sync(ctx context.Context) error {
	if err := s.Stream.Sync(ctx); err != nil {
		return err
	}
	for _, x := range s.d.down {
		copy(tensor.Bytes(x.dst), x.src)
	}
	s.d.down, s.d.used = nil, 0
	return nil
}

func gpuCount(t *testing.T) int {
	n, err := cuda.Count()
	if err != nil {
		t.Fatal(err)
	}
	if n == 0 {
		t.Fatal("no GPU is seen: the tag cuda tests GPUs")
	}
	return n
}

// TestNCCL and TestDeviceCopy run the suite with one rank a GPU, all of this process.
func TestNCCL(t *testing.T)       { testGPUs(t, TransportNCCL) }
func TestDeviceCopy(t *testing.T) { testGPUs(t, TransportCopy) }

func testGPUs(t *testing.T, transport string) {
	n := gpuCount(t)
	if v, err := nccl.Version(); err != nil {
		t.Fatal(err)
	} else {
		t.Logf("%d GPUs, NCCL %s", n, nccl.VersionText(v))
	}
	commtest.TestDevices(t, commtest.Setup{
		Ranks:          n,
		SizesUnchecked: transport == TransportNCCL,
		NaNPassedOver:  true,
		Device: func(t *testing.T, rank int) commtest.Device {
			d, err := newGPUDevice(rank)
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Connect: func(t *testing.T, devices []commtest.Device, opts comm.Options) []comm.Communicator {
			return connectGPUs(t, transport, devices, opts)
		},
	})
}

func connectGPUs(t *testing.T, transport string, devices []commtest.Device, opts comm.Options) []comm.Communicator {
	hosts := comm.NewLocal(len(devices), nil, opts)
	cs, errs := make([]comm.Communicator, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	start := time.Now()
	for r := range hosts {
		wg.Go(func() {
			stream := devices[r].(*gpuDevice).stream
			cs[r], errs[r] = New(context.Background(), hosts[r], stream, Options{Transport: transport})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Logf("connected %d GPUs in %v", len(hosts), time.Since(start).Round(time.Millisecond))
	return cs
}

func init() {
	for _, transport := range []string{TransportNCCL, TransportCopy} {
		kinds[transport] = worldtest.ProcessKind{
			Patience: time.Minute,
			Open: func(ctx context.Context, host *comm.Group, _ string) (worldtest.ProcessRank, error) {
				d, err := newGPUDevice(host.Rank())
				if err != nil {
					return worldtest.ProcessRank{}, err
				}
				c, err := New(ctx, host, d.stream, Options{Transport: transport})
				return worldtest.ProcessRank{
					Comm: c,
					New:  func(t tensor.DType, n int) tensor.View { return d.New(t, n) },
				}, err
			},
		}
	}
}

// TestDeviceEnd kills or stops one of several processes with a GPU each. The others must report it by
// name, and nothing may hang that was queued on their GPUs.
func TestDeviceEnd(t *testing.T) {
	n := min(gpuCount(t), 4)
	if n < 2 {
		t.Skip("needs 2 GPUs")
	}
	lost, late := comm.ErrPeerLost.Error(), ", the deadline"
	for _, c := range []struct {
		kind, call string
		end        func(*os.Process, io.Closer) error
		cause      string
	}{
		{TransportNCCL, "all-reduce", worldtest.Kill, lost}, {TransportNCCL, "chain", worldtest.Kill, lost},
		{TransportCopy, "chain", worldtest.Kill, lost}, {TransportNCCL, "stop", worldtest.Stop, late},
	} {
		t.Run(c.kind+" "+c.call, func(t *testing.T) { kinds.End(t, c.kind, c.call, n, c.end, c.cause) })
	}
}
