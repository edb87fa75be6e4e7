//go:build cuda

package cuda

// #include "driver.h"
import "C"

import (
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/cprun/cprun/tensor"
)

// Memory is device memory. It implements tensor.Memory; Ptr is an address on the device,
// which the host must not read.
type Memory struct {
	dev   *Device
	addr  uint64
	bytes int64
}

// Device returns the place it lies on.
func (m *Memory) Device() tensor.Device { return m.dev.Place() }

// Bytes returns its length in bytes.
func (m *Memory) Bytes() int64 { return m.bytes }

// Ptr returns the address as tensor.Memory has it.
func (m *Memory) Ptr() unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&m.addr)) }

// An alloc is an allocation of the driver's.
type alloc struct {
	addr  uint64
	bytes int64
}

// A pool is the memory that Reserve took and Alloc has not handed out.
type pool struct {
	addr, end uint64
}

const poolAlign = 512

// Reserve takes bytes of the device in one allocation, the static arena of a run. Alloc
// hands it out; it is given back by Close.
func (d *Device) Reserve(bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := d.take(bytes)
	if err != nil {
		return err
	}
	d.pool = pool{addr: a.addr, end: a.addr + uint64(a.bytes)}
	return nil
}

// Alloc returns memory out of what was reserved, or of the driver's where nothing was or too little is
// left. Its content is undefined.
func (d *Device) Alloc(bytes int64) (*Memory, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := (uint64(max(bytes, 1)) + poolAlign - 1) / poolAlign * poolAlign
	if d.pool.end-d.pool.addr >= n {
		m := &Memory{dev: d, addr: d.pool.addr, bytes: bytes}
		d.pool.addr += n
		return m, nil
	}
	a, err := d.take(int64(n))
	if err != nil {
		return nil, err
	}
	return &Memory{dev: d, addr: a.addr, bytes: bytes}, nil
}

// take allocates memory of the driver's. d.mu is held.
func (d *Device) take(bytes int64) (alloc, error) {
	var ptr cu.DevicePtr
	err := d.With(func() (err error) {
		ptr, err = cu.MemAlloc(bytes)
		return err
	})
	if err != nil {
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

func (d *Device) freeAll() error {
	d.reasonMu.Lock()
	d.reasons = nil // they read pinned memory
	d.reasonMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range d.pinned {
		if err := d.check("cuMemFreeHost", C.cprun_host_free(d.ctx, p.ptr)); err != nil {
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

// Pinned is host memory that the device copies from and to without the host's help. It
// implements tensor.Memory as memory of the host.
type Pinned struct {
	dev   *Device
	ptr   unsafe.Pointer
	bytes int64
}

// AllocHost returns pinned host memory, zeroed. Free, or Close of the device, gives it back.
func (d *Device) AllocHost(bytes int64) (*Pinned, error) {
	p := &Pinned{dev: d, bytes: (bytes + 7) / 8 * 8}
	if err := d.check("cuMemHostAlloc", C.cprun_host_alloc(d.ctx, &p.ptr, C.size_t(max(p.bytes, 8)))); err != nil {
		return nil, fmt.Errorf("%d bytes of pinned host memory: %w", bytes, err)
	}
	clear(unsafe.Slice((*byte)(p.ptr), p.bytes))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned[p] = struct{}{}
	return p, nil
}

// Free gives the memory back. The device must be done with it.
func (p *Pinned) Free() error {
	p.dev.mu.Lock()
	delete(p.dev.pinned, p)
	p.dev.mu.Unlock()
	return p.dev.check("cuMemFreeHost", C.cprun_host_free(p.dev.ctx, p.ptr))
}

// Addr returns the device address of a view's first element.
func Addr(v tensor.View) uint64 {
	if v.IsZero() {
		return 0
	}
	return uint64(uintptr(v.Memory().Ptr())) + uint64(v.Offset()*int64(v.DType().Size()))
}

// Host returns the memory as host memory of tensor.
func (p *Pinned) Host() *tensor.Host { return tensor.HostAt(p.ptr, p.bytes) }
