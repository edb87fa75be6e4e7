//go:build cuda

package cuda

/*
#include <string.h>
#include "driver.h"

static inline CUresult cprun_host_register(CUcontext ctx, void *p, size_t n, CUdeviceptr *addr) {
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS) r = cuMemHostRegister(p, n, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
	return r != CUDA_SUCCESS ? r : cuMemHostGetDevicePointer(addr, p, 0);
}
static inline CUresult cprun_host_unregister(CUcontext ctx, void *p) { CPRUN_IN(ctx, cuMemHostUnregister(p)); }
static inline CUresult cprun_wait_value(CUcontext ctx, CUstream s, CUdeviceptr addr, cuuint64_t v) {
	CPRUN_IN(ctx, cuStreamWaitValue64(s, addr, v, CU_STREAM_WAIT_VALUE_GEQ));
}
static inline CUresult cprun_write_value(CUcontext ctx, CUstream s, CUdeviceptr addr, cuuint64_t v) {
	CPRUN_IN(ctx, cuStreamWriteValue64(s, addr, v, CU_STREAM_WRITE_VALUE_DEFAULT));
}
static inline CUresult cprun_stream_query(CUcontext ctx, CUstream s) { CPRUN_IN(ctx, cuStreamQuery(s)); }
static inline CUresult cprun_ipc_export(CUcontext ctx, void *handle, CUdeviceptr p) {
	CUipcMemHandle h;
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS) r = cuIpcGetMemHandle(&h, p);
	if (r == CUDA_SUCCESS) memcpy(handle, &h, sizeof h);
	return r;
}
static inline CUresult cprun_ipc_open(CUcontext ctx, CUdeviceptr *p, const void *handle) {
	CUipcMemHandle h;
	memcpy(&h, handle, sizeof h);
	CPRUN_IN(ctx, cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}
static inline CUresult cprun_ipc_close(CUcontext ctx, CUdeviceptr p) { CPRUN_IN(ctx, cuIpcCloseMemHandle(p)); }
static inline CUresult cprun_range(CUcontext ctx, CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS) r = cuPointerGetAttribute(base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p);
	if (r == CUDA_SUCCESS) r = cuPointerGetAttribute(bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p);
	return r;
}
static inline CUresult cprun_peer(CUcontext ctx, CUdeviceptr p) {
	CUcontext other;
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS) r = cuPointerGetAttribute(&other, CU_POINTER_ATTRIBUTE_CONTEXT, p);
	if (r == CUDA_SUCCESS && other != ctx) r = cuCtxEnablePeerAccess(other, 0);
	return r == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED ? CUDA_SUCCESS : r;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/cprun/cprun/tensor"
	"golang.org/x/sys/unix"
)

// Memory is device memory. It implements tensor.Memory. The host must not read Ptr, an address on the device.
type Memory struct {
	dev   *Device
	addr  uint64
	bytes int64
}

// Device returns the device of the memory.
func (m *Memory) Device() tensor.Device { return m.dev.Place() }

// Bytes returns its length in bytes.
func (m *Memory) Bytes() int64 { return m.bytes }

// Addr returns the device address.
func (m *Memory) Addr() uint64 { return m.addr }

// Ptr returns the device address, for tensor.Memory.
func (m *Memory) Ptr() unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&m.addr)) }

// An alloc is an allocation from the driver.
type alloc struct {
	addr  uint64
	bytes int64
}

// A pool is the unused part of an allocation for small pieces.
type pool struct {
	addr, end uint64
}

const (
	poolAlign = 512
	poolBytes = 16 << 20
	piece     = 2 << 20 // the most of a small piece: the driver's own pages, which processes map whole
)

// Alloc returns uninitialised memory. Free or Close frees it. A large piece is an allocation of the driver by itself: a
// peer that reaches it maps the whole allocation, which takes about 1 s for 75 GiB. Small pieces share allocations.
func (d *Device) Alloc(bytes int64) (*Memory, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := (uint64(max(bytes, 1)) + poolAlign - 1) / poolAlign * poolAlign
	if n > piece {
		a, err := d.take(int64(n))
		if err != nil {
			return nil, err
		}
		return &Memory{dev: d, addr: a.addr, bytes: bytes}, nil
	}
	if d.pool.end-d.pool.addr < n {
		a, err := d.take(poolBytes)
		if err != nil {
			return nil, err
		}
		d.pool = pool{addr: a.addr, end: a.addr + poolBytes}
	}
	m := &Memory{dev: d, addr: d.pool.addr, bytes: bytes}
	d.pool.addr += n
	return m, nil
}

// take allocates memory from the driver. The caller holds d.mu.
func (d *Device) take(bytes int64) (alloc, error) {
	var ptr cu.DevicePtr
	err := d.With(func() (err error) {
		ptr, err = cu.MemAlloc(bytes)
		return err
	})
	if err != nil {
		err = d.named("cuMemAlloc", err)
		free, total, infoErr := d.MemInfo()
		if infoErr != nil {
			return alloc{}, fmt.Errorf("%v: allocating %d bytes: %w", d, bytes, err)
		}
		return alloc{}, fmt.Errorf("%v: allocating %d bytes, with %d of %d free: %w", d, bytes, free, total, err)
	}
	a := alloc{addr: uint64(ptr), bytes: bytes}
	d.allocs = append(d.allocs, a)
	return a, nil
}

// Free frees an allocation of the driver by itself; a smaller piece stays until Close. The device must be done with it.
func (m *Memory) Free() error {
	d := m.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.bytes <= piece {
		return nil
	}
	d.allocs = slices.DeleteFunc(d.allocs, func(a alloc) bool { return a.addr == m.addr })
	if err := d.With(func() error { return cu.MemFree(cu.DevicePtr(m.addr)) }); err != nil {
		return fmt.Errorf("%v: free: %w", d, err)
	}
	return nil
}

func (d *Device) freeAll() error {
	d.reasonMu.Lock()
	d.reasons = nil // these functions read pinned memory
	d.reasonMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range d.pinned {
		if err := p.unpin(); err != nil {
			return err
		}
	}
	clear(d.pinned)
	for _, a := range d.allocs {
		if err := d.With(func() error { return cu.MemFree(cu.DevicePtr(a.addr)) }); err != nil {
			return fmt.Errorf("%v: free: %w", d, err)
		}
	}
	d.allocs, d.pool = nil, pool{}
	return nil
}

// Pinned is page-locked host memory, from and to which the device copies by DMA. Host returns it as a tensor.Memory.
type Pinned struct {
	dev  *Device
	data []byte
}

// AllocHost returns zeroed pinned host memory. Free, or Close of the device, frees it. All cores touch its pages first,
// huge ones where the system has them: the driver's own allocation takes eight times as long.
func (d *Device) AllocHost(bytes int64) (*Pinned, error) {
	page := int64(os.Getpagesize())
	n := int((max(bytes, 1) + page - 1) / page * page)
	data, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of host memory: %w", bytes, err)
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // only for speed
	var touching sync.WaitGroup
	for part := range slices.Chunk(data, max(1<<21, n/runtime.GOMAXPROCS(0))) {
		touching.Go(func() {
			for i := 0; i < len(part); i += int(page) {
				part[i] = 0 // the system has zeroed it
			}
		})
	}
	touching.Wait()
	p := &Pinned{dev: d, data: data}
	addr, err := d.Register(p.ptr(), int64(n))
	if err == nil && addr != uint64(uintptr(p.ptr())) {
		err = errors.Join(errors.New("the device has another address for it"), d.Unregister(p.ptr()))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%d bytes of pinned host memory: %w", bytes, err), unix.Munmap(data))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned[p] = struct{}{}
	return p, nil
}

func (p *Pinned) ptr() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(p.data)) }

func (p *Pinned) unpin() error {
	if err := p.dev.Unregister(p.ptr()); err != nil {
		return err
	}
	return unix.Munmap(p.data)
}

// Free frees the memory. The device must be done with it.
func (p *Pinned) Free() error {
	p.dev.mu.Lock()
	delete(p.dev.pinned, p)
	p.dev.mu.Unlock()
	return p.unpin()
}

// Host returns the memory as a tensor.Host.
func (p *Pinned) Host() *tensor.Host { return tensor.HostAt(p.ptr(), int64(len(p.data))) }

const (
	memOps64    = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
	memOps64Old = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1)
)

// MemOps returns nil if WaitValue and WriteValue work on this device, or an error with the reason.
func (d *Device) MemOps() error {
	var faults []error
	for _, a := range []cu.DeviceAttribute{memOps64, memOps64Old} {
		can, err := d.dev.Attribute(a)
		if err == nil && can != 0 {
			return nil
		}
		faults = append(faults, err)
	}
	return fmt.Errorf("%v: its streams cannot wait for 64-bit values in memory: %w", d,
		errors.Join(append(faults, errors.ErrUnsupported)...))
}

// Register pins existing host memory, such as memory shared between processes, and returns its address on the device.
// Both p and bytes must be multiples of a page. Unregister undoes it.
func (d *Device) Register(p unsafe.Pointer, bytes int64) (addr uint64, err error) {
	var a C.CUdeviceptr
	err = d.check(fmt.Sprintf("cuMemHostRegister of %d bytes", bytes),
		C.cprun_host_register(d.ctx, p, C.size_t(bytes), &a))
	return uint64(a), err
}

// Unregister unpins what Register pinned. The device must be done with it.
func (d *Device) Unregister(p unsafe.Pointer) error {
	return d.check("cuMemHostUnregister", C.cprun_host_unregister(d.ctx, p))
}

// WaitValue makes later work wait until the 64-bit word at addr is at least v. The comparison is cyclic: the word may
// be up to 1<<63 ahead.
//
// The driver cannot see which work writes the word. Streams may share a queue of the device, and some calls wait for
// all queued work. So the wait is safe only if the write is already queued, on any device.
func (s *Stream) WaitValue(addr, v uint64) {
	if s.failed.Load() {
		return
	}
	defer s.spans.begin(s, "wait", "")()
	s.Fail(s.dev.check("cuStreamWaitValue64", C.cprun_wait_value(s.dev.ctx, s.handle, C.CUdeviceptr(addr),
		C.cuuint64_t(v))))
}

// WriteValue queues a write of the 64-bit word at addr. Other devices and the host that read v also see all results of
// earlier work.
func (s *Stream) WriteValue(addr, v uint64) {
	if s.failed.Load() {
		return
	}
	s.Fail(s.dev.check("cuStreamWriteValue64", C.cprun_write_value(s.dev.ctx, s.handle, C.CUdeviceptr(addr),
		C.cuuint64_t(v))))
}

// Idle reports whether the device has finished all queued work, also on a poisoned stream. Any goroutine may call it.
func (s *Stream) Idle() bool {
	return C.cprun_stream_query(s.dev.ctx, s.handle) != C.CUDA_ERROR_NOT_READY
}

// IPCHandle names an allocation to other processes of the host.
type IPCHandle [C.sizeof_CUipcMemHandle]byte

// Allocation returns the driver's allocation that contains addr. It stays valid until Close.
func (d *Device) Allocation(addr uint64) (base uint64, bytes int64, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range d.allocs {
		if addr >= a.addr && addr-a.addr < uint64(a.bytes) {
			return a.addr, a.bytes, true
		}
	}
	return 0, 0, false
}

// Export returns the handle of the allocation that begins at base.
func (d *Device) Export(base uint64) (h IPCHandle, err error) {
	return h, d.check("cuIpcGetMemHandle", C.cprun_ipc_export(d.ctx, unsafe.Pointer(&h), C.CUdeviceptr(base)))
}

// Import maps an allocation of this or another device that another process exported, and returns its address. A process
// cannot import its own exports. After the other process has ended, the content is undefined. CloseImport unmaps it.
func (d *Device) Import(h IPCHandle) (addr uint64, err error) {
	var a C.CUdeviceptr
	err = d.check("cuIpcOpenMemHandle", C.cprun_ipc_open(d.ctx, &a, unsafe.Pointer(&h)))
	return uint64(a), err
}

// Range returns the address and size of the allocation that contains addr. This process must have allocated it, on any
// device, or imported it.
func (d *Device) Range(addr uint64) (base uint64, bytes int64, err error) {
	var at C.CUdeviceptr
	var size C.size_t
	err = d.check("cuPointerGetAttribute", C.cprun_range(d.ctx, &at, &size, C.CUdeviceptr(addr)))
	return uint64(at), int64(size), err
}

// CloseImport unmaps an allocation from Import. The device must be done with it.
func (d *Device) CloseImport(addr uint64) error {
	return d.check("cuIpcCloseMemHandle", C.cprun_ipc_close(d.ctx, C.CUdeviceptr(addr)))
}

// Reach lets this device access the device memory at addr, which this process allocated on any device.
func (d *Device) Reach(addr uint64) error {
	return d.check("cuCtxEnablePeerAccess", C.cprun_peer(d.ctx, C.CUdeviceptr(addr)))
}
