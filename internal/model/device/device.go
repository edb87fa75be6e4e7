// Package device is the CPU or the GPU of a rank, as the training loop and
// `cprun attention` see it: a stream, the operations that are queued on it, its memory, and
// the way there and back. Nothing above it knows which it is.
package device

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Device is the CPU or the GPU of a rank. Everything in it queues on Stream, except copies to and from
// the host: they run on Copies, ordered with Stream by events.
type Device struct {
	Name   string // "cpu", "cuda:0 (NVIDIA H200)"
	Stream tensor.Stream
	Copies []tensor.Stream // of the store; for traces
	Ops    model.Ops
	Kernel attention.Kernel
	Sinks  attention.Sinks // for what Kernel computes
	Optim  optim.Device
	Store  Store
	// Compute is the type of activations, and of the copy of the weights that they meet.
	Compute tensor.DType
	// Masters says that weights are stepped in float32 apart from that copy. It is so wherever
	// Compute is another type.
	Masters bool
	// ScaleLoss says that small gradients underflow in Compute, so that the loss is scaled.
	ScaleLoss bool
	// RunAhead is how many steps may be queued after the one that is waited for. With
	// 0 the device is idle while the host logs a step and reads the data of the next.
	RunAhead int
	// Machine is the GPU as plans know it; zero for the host.
	Machine machine.Machine
	// PeakTFLOPs is the rate that MFU is a share of; 0: not known.
	PeakTFLOPs float64
	// NewStream makes a further stream; its name is its lane in traces. Events order it with Stream
	// and with others of the device.
	NewStream func(name string) (Stream, error)
	// NewClock makes a clock of that many points of Stream.
	NewClock func(points int) (Clock, error)

	close func() error
}

// Close gives everything back. Nothing is queued any more. The compute stream of a CPU belongs to the
// caller, who closes it later.
func (d *Device) Close() error {
	if d.close == nil {
		return nil
	}
	return d.close()
}

// Store is a device's memory, and the way there and back.
type Store interface {
	// Alloc returns memory of the device with undefined content. It lives as long as the device.
	Alloc(bytes int64) (tensor.Memory, error)
	// AllocHost is zeroed memory of the host that Upload and Download take: pinned where the
	// device wants that.
	AllocHost(bytes int64) (*tensor.Host, error)
	// FreeHost gives back what AllocHost returned. No copy that uses it is under way. What is not given
	// back lives as long as the device.
	FreeHost(h *tensor.Host)
	// Upload queues a copy of a host view to one of the device, Download the other way. Both
	// are dense, of one type and size. The copy comes behind all that is queued on the device's
	// Stream, and later work there follows the copy, as if it was queued there. The
	// host view must stay as it is until then.
	Upload(dst, src View)
	Download(dst, src View)
	// Prefetch is an Upload that does not wait for queued work, and so runs beside it. Nothing that
	// is queued may use dst, or write src, any more.
	Prefetch(dst, src View)
	// MemoryBytes is the most that this process has had of the memory that is scarce: the
	// host's where that is the device, else the GPU's memory in use.
	MemoryBytes() int64
}

// CPU returns the host as a device that computes in that type. The backend is flash, or reference,
// the slow definition of attention that flash is checked against.
func CPU(stream *tensor.HostStream, backend string, compute tensor.DType) Device {
	ops, copies := cpu.New(stream), hostCopies(stream)
	d := Device{
		Name: "cpu", Stream: stream, Copies: copies.streams(), Ops: ops, Kernel: ops, Sinks: ops, Optim: ops,
		Store:   hostStore{copies},
		Compute: compute, Masters: compute != tensor.F32, ScaleLoss: compute == tensor.F16,
		NewStream: func(name string) (Stream, error) { return tensor.NewHostStream(name), nil },
		NewClock:  hostClocks(stream), close: copies.close,
	}
	if backend == "reference" {
		r := attention.NewReference[float64](stream.Do)
		d.Kernel, d.Sinks = r, r
	}
	return d
}

type hostStore struct{ *copies }

func (hostStore) Alloc(n int64) (tensor.Memory, error)    { return tensor.NewHost(n), nil }
func (hostStore) AllocHost(n int64) (*tensor.Host, error) { return tensor.NewHost(n), nil }
func (hostStore) FreeHost(*tensor.Host)                   {} // the garbage collector finds it
func (hostStore) MemoryBytes() int64                      { return int64(residentBytes()) }

// Vector returns n elements of the device, uninitialised. what names it in errors.
func (d *Device) Vector(what string, t tensor.DType, n int) (View, error) {
	mem, err := d.Store.Alloc(int64(n) * int64(t.Size()))
	if err != nil {
		return View{}, fmt.Errorf("%s: %w", what, err)
	}
	return tensor.Dense(mem, t, 0, [4]int{1, 1, 1, n}), nil
}

// HostVector returns n zeros of the host that Upload and Download take.
func (d *Device) HostVector(t tensor.DType, n int) (View, error) {
	mem, err := d.Store.AllocHost(int64(n) * int64(t.Size()))
	if err != nil {
		return View{}, err
	}
	return tensor.Dense(mem, t, 0, [4]int{1, 1, 1, n}), nil
}

// FreeHostVector gives back what HostVector returned, as FreeHost does.
func (d *Device) FreeHostVector(v View) { d.Store.FreeHost(v.Memory().(*tensor.Host)) }

// An outOfMemory is the panic of an arena that could not grow in the middle of a pass, where no
// call returns an error. Caught turns it into one.
type outOfMemory struct{ err error }

// Arena returns a stack of the device's memory. Where it has to grow and cannot, Alloc panics with
// what Caught makes an error of.
func (d *Device) Arena(what string, bytes int64) (a *tensor.Arena, err error) {
	defer Caught(&err)
	return tensor.NewArena(bytes, func(n int64) tensor.Memory {
		mem, err := d.Store.Alloc(n)
		if err != nil {
			panic(outOfMemory{fmt.Errorf("%s: %w", what, err)})
		}
		return mem
	}), nil
}

// Caught sets err if an arena could not grow. Callers defer it.
func Caught(err *error) {
	switch p := recover().(type) {
	case nil:
	case outOfMemory:
		*err = p.err
	default:
		panic(p)
	}
}

// residentBytes returns the most that this process has had resident, as the kernel counts it;
// otherwise the memory that Go has taken from the system.
func residentBytes() float64 {
	status, err := files.Read("/proc/self/status", 1<<20)
	if err == nil {
		if n, ok := peakResident(string(status)); ok {
			return n
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys)
}

// peakResident reads VmHWM of /proc/PID/status: "VmHWM:	   12345 kB".
func peakResident(status string) (float64, bool) {
	for line := range strings.Lines(status) {
		rest, ok := strings.CutPrefix(line, "VmHWM:")
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 64)
		return n * 1024, err == nil
	}
	return 0, false
}

// Clock takes the device's time at points of its stream, without a wait between them.
type Clock interface {
	// Mark queues taking the time of point i; a point may be used again.
	Mark(i int)
	// Between is the seconds from point i to point j, once the stream has got to both.
	Between(i, j int) (float64, error)
	// Close gives the clock back. The stream has got to every mark.
	Close() error
}

// A hostClock is the clock of a CPU's stream.
type hostClock struct {
	stream *tensor.HostStream
	at     []time.Time // written by the stream
}

func hostClocks(s *tensor.HostStream) func(points int) (Clock, error) {
	return func(points int) (Clock, error) { return &hostClock{stream: s, at: make([]time.Time, points)}, nil }
}

func (c *hostClock) Mark(i int) {
	c.stream.Do("", func() error { c.at[i] = time.Now(); return nil }) // without a name: not in traces
}

func (c *hostClock) Between(i, j int) (float64, error) { return c.at[j].Sub(c.at[i]).Seconds(), nil }

func (c *hostClock) Close() error { return nil }
