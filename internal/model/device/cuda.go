//go:build cuda

package device

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cores"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/internal/base/heap"
	"github.com/cprun/cprun/internal/base/nccl"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/tensor"
)

// CUDA opens a GPU for a run.
func CUDA(o CUDAOptions) (d Device, err error) {
	load(o)
	var closers []func() error
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll(closers))
		}
	}()
	s, err := openGPU(o, &closers)
	if err != nil {
		return Device{}, err
	}
	var beside errgroup.Group
	undo := func(error) {}
	if o.Beside != nil {
		beside.Go(func() error {
			u, err := o.Beside(s.stream)
			if u != nil {
				undo = u
			}
			return err
		})
	}
	ops, kernel, err := cudaOps(o, s, &closers)
	if e := beside.Wait(); err == nil {
		err = e
	}
	if err != nil {
		undo(err)
		return Device{}, err
	}
	d = Device{
		Name: s.dev.String(), Stream: s.stream, Copies: s.copies.streams(), Ops: ops, Kernel: kernel, Sinks: ops,
		Delta: gpu.NewDelta(s.stream, s.loader), Optim: ops, Store: s, Draw: ops.Draw,
		Compute: o.Compute, Masters: o.Compute != tensor.F32, ScaleLoss: o.Compute == tensor.F16, RunAhead: 1,
		Machine:   o.Machine,
		NewStream: s.further.maker(s.newStream), NewClock: s.clock,
		NewOptim: func(to tensor.Stream) optim.Device { return gpu.NewOptim(to.(*cuda.Stream), s.loader) },
		close:    func() error { return closeAll(closers) },
	}
	if peak, ok := machine.CardFor(s.dev.Arch); ok {
		d.PeakTFLOPs = peak.BF16 / 1e12
		if o.Compute == tensor.F32 {
			d.PeakTFLOPs = peak.FP32 / 1e12
		}
	}
	return d, nil
}

// openGPU opens the context, checks that the memory of the run is free, and creates a stream.
func openGPU(o CUDAOptions, closers *[]func() error) (*cudaStore, error) {
	defer o.timed("context")()
	gpu, err := cuda.Open(o.Ordinal)
	if err != nil {
		return nil, err
	}
	keepNear(&o, gpu)
	s := newCUDAStore(gpu)
	*closers = append(*closers, gpu.Close, s.free)
	if free, total, err := gpu.MemInfo(); err == nil && free < o.Planned {
		return nil, &MemoryError{Of: gpu.String(), Need: o.Planned, Free: free, Total: total,
			Err: errors.New("out of memory")}
	}
	if s.stream, err = gpu.NewStream("compute", false); err != nil {
		return nil, err
	}
	*closers = append(*closers, s.stream.Close)
	if s.copies, err = s.newCopies(); err != nil {
		return nil, err
	}
	*closers = append(*closers, s.copies.close, s.further.close)
	return s, nil
}

// keepNear binds this process to the NUMA node of its GPU, before it allocates host memory there.
func keepNear(o *CUDAOptions, gpu *cuda.Device) {
	bound, err := cores.KeepNear(gpu.Bus())
	switch {
	case err != nil: // costs only speed
		o.note("%s: this process may run far from it: %v", gpu, err)
	case len(bound) > 0:
		o.note("%s: this process runs on the %d cores next to it, from core %d", gpu, len(bound), bound[0])
	}
}

// cudaOps returns the operations and the attention of a step, loaded in parallel.
func cudaOps(o CUDAOptions, s *cudaStore, closers *[]func() error) (*gpu.Ops, attention.Kernel, error) {
	defer o.timed("kernels")()
	loader, err := gpu.NewLoader(s.dev)
	if err != nil {
		return nil, nil, err
	}
	s.loader = loader
	ops, err := gpu.NewOps(s.stream, loader)
	if err != nil {
		return nil, nil, err
	}
	*closers = append(*closers, ops.Close)
	kernel, end, err := cudaKernel(o, s.stream, loader)
	if err != nil {
		return nil, nil, err
	}
	*closers = append(*closers, end)
	err = preload(ops, kernel, o.Compute, o.HeadDim)
	if fault := loader.Fault(); fault != nil {
		o.note("compiled kernels are not kept, so every start compiles them: %v", fault)
	}
	return ops, kernel, err
}

// load starts to load the libraries, hundreds of megabytes each, while the driver creates the context. Callers block
// until their library has loaded, and get its error.
func load(o CUDAOptions) {
	libraries := []func() (int, error){blas.Version, nccl.Version}
	if o.Backend == backends.Fused.String() {
		libraries = append(libraries, dnn.Version)
	}
	for _, version := range libraries {
		go version() // ends by itself
	}
}

func closeAll(closers []func() error) error {
	var errs []error
	for i := len(closers) - 1; i >= 0; i-- {
		errs = append(errs, closers[i]())
	}
	return errors.Join(errs...)
}

// cudaKernel returns the kernel of a backend, and its close function.
func cudaKernel(o CUDAOptions, s *cuda.Stream, l *gpu.Loader) (attention.Kernel, func() error, error) {
	nothing := func() error { return nil }
	switch o.Backend {
	case "fused":
		k, err := gpu.NewFused(s, l, gpu.FusedOptions{
			Deterministic: o.Deterministic, Packed: o.Packed &&
				backends.Packs(o.Machine.Arch, o.Machine.CUDNN), Workspace: o.Workspace,
			ZeroWorkspace: o.zeroWorkspace(),
		})
		if err != nil {
			return nil, nil, err
		}
		return k, k.Close, nil
	case "flash":
		k, err := gpu.NewFlash(s, l, gpu.FlashOptions{Deterministic: o.Deterministic, SMMargin: o.SMMargin})
		return k, nothing, err
	case "reference":
		k, err := gpu.NewReference(s, l)
		return k, nothing, err
	}
	return nil, nil, fmt.Errorf("attention backend %s is not in this build; take fused, flash or reference", o.Backend)
}

// preload loads the kernels of a step, and compiles missing ones in parallel before the first step.
func preload(ops *gpu.Ops, kernel attention.Kernel, compute tensor.DType, dim int) error {
	var g errgroup.Group
	g.Go(ops.Preload)
	if f, ok := kernel.(*gpu.Flash); ok && dim > 0 {
		g.Go(func() error { return f.Preload(compute, dim, dim) })
	}
	return g.Wait()
}

type cudaStore struct {
	*copies
	dev     *cuda.Device
	stream  *cuda.Stream
	further streams
	loader  *gpu.Loader

	hostMu sync.Mutex     // guards what follows
	pinned []*cuda.Pinned // the blocks of host
	host   *heap.Heap
	out    map[*tensor.Host]View // of host, by the result of AllocHost
}

// pinnedBlock is the size of one allocation of pinned memory. Each takes the driver a millisecond, whatever its size.
const pinnedBlock = 1 << 20

func newCUDAStore(dev *cuda.Device) *cudaStore {
	s := &cudaStore{dev: dev, out: make(map[*tensor.Host]View)}
	s.host = heap.New(pinnedBlock, func(n int64) (tensor.Memory, error) {
		p, err := dev.AllocHost(n)
		if err != nil {
			return nil, &MemoryError{Of: "pinned host memory", Need: n, Host: true, Err: err}
		}
		s.pinned = append(s.pinned, p)
		return p.Host(), nil
	})
	return s
}

func (s *cudaStore) Alloc(n int64) (tensor.Memory, error) {
	m, err := s.dev.Alloc(n)
	if err != nil {
		return nil, err
	}
	return m, nil
}

func (s *cudaStore) AllocHost(n int64) (*tensor.Host, error) {
	s.hostMu.Lock()
	defer s.hostMu.Unlock()
	v, err := s.host.Alloc(tensor.F64, int(n+7)/8)
	if err != nil {
		return nil, err
	}
	words := tensor.Data[float64](v)
	h := tensor.HostAt(unsafe.Pointer(unsafe.SliceData(words)), int64(len(words))*8)
	s.out[h] = v
	return h, nil
}

func (s *cudaStore) FreeHost(h *tensor.Host) {
	s.hostMu.Lock()
	defer s.hostMu.Unlock()
	clear(tensor.Data[float64](s.out[h])) // free memory is zero
	s.host.Free(s.out[h])
	delete(s.out, h)
}

func (s *cudaStore) newStream(name string) (Stream, error) {
	stream, err := s.dev.NewStream(name, false)
	if err != nil {
		return nil, err
	}
	return stream, nil
}

func (s *cudaStore) newCopies() (*copies, error) {
	up, err := s.newStream("upload")
	if err != nil {
		return nil, err
	}
	down, err := s.newStream("download")
	if err != nil {
		return nil, errors.Join(err, up.Close())
	}
	return &copies{compute: s.stream, up: up, down: down, queue: copyCUDA, follow: s.stream.Follow}, nil
}

func copyCUDA(to tensor.Stream, name string, dst, src View) {
	if dst.DType() != src.DType() || dst.Size() != src.Size() || !dst.IsDense() || !src.IsDense() {
		panic(fmt.Sprintf("device: %s of %v to %v", name, src, dst))
	}
	s := to.(*cuda.Stream)
	s.Do(name, func() error {
		s.Copy(dst.Addr(), src.Addr(), int64(src.Size())*int64(src.DType().Size()))
		return nil
	})
}

// MemoryBytes returns the used bytes of the GPU, by any process: one process runs on each.
func (s *cudaStore) MemoryBytes() int64 {
	free, total, err := s.dev.MemInfo()
	if err != nil {
		return 0 // the stream reports faults of the device
	}
	return total - free
}

func (s *cudaStore) clock(points int) (Clock, error) {
	c, err := s.stream.NewClock(points)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s *cudaStore) free() error {
	var errs []error
	for _, p := range s.pinned {
		errs = append(errs, p.Free())
	}
	s.pinned = nil
	return errors.Join(errs...)
}
