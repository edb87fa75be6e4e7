// Package device is the CPU or the GPU of a rank: a stream, the operations queued on it, its memory, and copies between
// host and device. CPU and CUDA return a Device; code above it, such as the training loop and `cprun attention`, is the
// same for both.
package device

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Device is the CPU or the GPU of a rank. Everything in it queues on Stream, except copies to and from the host: they
// run on Copies, ordered with Stream by events.
type Device struct {
	Name   string // "cpu", "cuda:0 (NVIDIA H200)"
	Stream tensor.Stream
	Copies []tensor.Stream // of the store; for traces
	Ops    model.Ops
	Kernel attention.Kernel
	Sinks  attention.Sinks // for what Kernel computes
	Delta  delta.Kernel
	Optim  optim.Device
	Store  Store
	// Compute is the type of activations and of the weights used with them.
	Compute tensor.DType
	// Masters: the optimizer updates separate float32 weights. It is set whenever Compute is another type.
	Masters bool
	// ScaleLoss: small gradients underflow in Compute, so the loss is scaled.
	ScaleLoss bool
	// RunAhead is the number of steps that may be queued beyond the awaited one. With 0 the device is idle while the
	// host logs a step and reads the next data.
	RunAhead int
	// Machine is the GPU for plans; for a CPU only its hosts are set.
	Machine machine.Machine
	// PeakTFLOPs is the peak for MFU; 0: unknown.
	PeakTFLOPs float64
	// Draw sets v, a dense view of the device, to elements lo, lo+1, ... of n; nil: the host draws. They are those of the
	// host, except for the last bit of the rarest.
	Draw func(v View, lo int64, n kernels.Normals)
	// NewStream creates another stream, which Close closes; its name is its lane in traces. Events order it with Stream
	// and with others of the device.
	NewStream func(name string) (tensor.Stream, error)
	// NewOptim creates an optimizer that queues on a stream of NewStream.
	NewOptim func(s tensor.Stream) optim.Device
	// NewClock creates a clock with that many points of Stream.
	NewClock func(points int) (Clock, error)

	close func() error
}

// Close frees the device after all queued work. The caller owns the compute stream of a CPU, and closes it later.
func (d *Device) Close() error {
	if d.close == nil {
		return nil
	}
	return d.close()
}

// Store is a device's memory, with copies between host and device.
type Store interface {
	// Alloc returns memory of the device with undefined content. It lives as long as the device.
	Alloc(bytes int64) (tensor.Memory, error)
	// AllocHost returns zeroed host memory for Upload and Download, pinned if the device needs it.
	AllocHost(bytes int64) (*tensor.Host, error)
	// FreeHost frees memory of AllocHost that no running copy uses. Other memory lives as long as the device.
	FreeHost(h *tensor.Host)
	// Upload queues a copy of a host view to a device view, Download the other way. Both are dense, of one type and
	// size. The copy runs in the order of Stream, as if queued there. The host view must stay unchanged until then.
	Upload(dst, src View)
	Download(dst, src View)
	// Prefetch is an Upload that runs concurrently with queued work. No queued work may use dst or write src.
	Prefetch(dst, src View)
	// Copy queues a copy within or between host and device on a stream of NewStream. Both views are dense, of one type
	// and size. The caller orders it with other streams.
	Copy(s tensor.Stream, dst, src View)
	// Follow makes Stream wait for an event of such a copy. The wait does not count as waiting for other ranks.
	Follow(e tensor.Event)
	// MemoryBytes returns the peak of the host's memory for a CPU, else the used memory of the GPU.
	MemoryBytes() int64
}

// CPU returns the host as a device that computes in a type. The backend is flash, or reference, the slow definition of
// attention for checks.
func CPU(stream *tensor.HostStream, backend string, compute tensor.DType) Device {
	ops, copies := cpu.New(stream), hostCopies(stream)
	var further streams
	d := Device{
		Name: "cpu", Stream: stream, Copies: copies.streams(), Ops: ops, Kernel: ops, Sinks: ops, Delta: ops.Delta(),
		Optim:   ops,
		Store:   hostStore{copies},
		Compute: compute, Masters: compute != tensor.F32, ScaleLoss: compute == tensor.F16,
		NewStream: further.maker(func(name string) (Stream, error) { return tensor.NewHostStream(name), nil }),
		NewOptim:  func(s tensor.Stream) optim.Device { return cpu.New(s.(*tensor.HostStream)) },
		NewClock: func(points int) (Clock, error) {
			return &hostClock{stream: stream, at: make([]time.Time, points)}, nil
		},
		close: func() error { return errors.Join(further.close(), copies.close()) },
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
func (hostStore) FreeHost(*tensor.Host)                   {} // garbage collected
func (hostStore) MemoryBytes() int64                      { return int64(residentBytes()) }

// Vector returns n uninitialised elements of the device. what names them in errors.
func (d *Device) Vector(what string, t tensor.DType, n int) (View, error) {
	mem, err := d.Store.Alloc(int64(n) * int64(t.Size()))
	if err != nil {
		return View{}, fmt.Errorf("%s: %w", what, err)
	}
	return tensor.Dense(mem, t, 0, [4]int{1, 1, 1, n}), nil
}

// HostVector returns n zeros of host memory for copies. what names them in errors.
func (d *Device) HostVector(what string, t tensor.DType, n int) (View, error) {
	mem, err := d.Store.AllocHost(int64(n) * int64(t.Size()))
	if err != nil {
		return View{}, fmt.Errorf("%s: %w", what, err)
	}
	return tensor.Dense(mem, t, 0, [4]int{1, 1, 1, n}), nil
}

// HostArena returns a stack of host memory for copies; see Arena.
func (d *Device) HostArena(what string, bytes int64) (*tensor.Arena, error) {
	return newArena(what, bytes, func(n int64) (tensor.Memory, error) { return d.Store.AllocHost(n) })
}

// FreeHostVector frees a HostVector, as FreeHost does.
func (d *Device) FreeHostVector(v View) { d.Store.FreeHost(v.Memory().(*tensor.Host)) }

// An outOfMemory is the panic of an arena that cannot grow inside a pass, which returns no errors. Caught turns it into
// an error.
type outOfMemory struct{ err error }

// Arena returns a stack of the device's memory. If it cannot grow, Alloc panics with an outOfMemory for Caught.
func (d *Device) Arena(what string, bytes int64) (*tensor.Arena, error) {
	return newArena(what, bytes, d.Store.Alloc)
}

func newArena(what string, bytes int64, alloc func(bytes int64) (tensor.Memory, error)) (a *tensor.Arena, err error) {
	defer Caught(&err)
	return tensor.NewArena(bytes, func(n int64) tensor.Memory {
		mem, err := alloc(n)
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

// residentBytes returns the peak resident memory of this process by the kernel, else the memory that Go has taken from
// the system.
func residentBytes() float64 {
	status, _ := files.Read("/proc/self/status", 1<<20)
	if n, ok := peakResident(string(status)); ok {
		return n
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys)
}

// peakResident reads VmHWM of /proc/PID/status: "VmHWM:      12345 kB".
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

// Clock records device times at points of its stream without waiting.
type Clock interface {
	// Mark queues the recording of point i; a point may be reused.
	Mark(i int)
	// Between returns the seconds from point i to point j, after the stream has passed both.
	Between(i, j int) (float64, error)
	// Close frees the clock, after the stream has passed every mark.
	Close() error
}

// A hostClock is the clock of a CPU's stream.
type hostClock struct {
	stream *tensor.HostStream
	at     []time.Time // written by the stream
}

func (c *hostClock) Mark(i int) {
	c.stream.Do("", func() error { c.at[i] = time.Now(); return nil }) // without a name: not in traces
}

func (c *hostClock) Between(i, j int) (float64, error) { return c.at[j].Sub(c.at[i]).Seconds(), nil }

func (c *hostClock) Close() error { return nil }
