//go:build cuda

package cuda

/*
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
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"
)

const (
	memOps64    = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
	memOps64Old = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1)
)

// MemOps returns nil where WaitValue and WriteValue work on this device, else an error that says why
// they do not.
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

// Register pins host memory of somebody else's, such as memory shared between processes, and
// returns its address on the device. Both p and bytes are multiples of a page. Unregister
// takes it back.
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

// WaitValue makes later work wait until the 64-bit word at addr is v or more. The comparison is cyclic: the word may be
// up to 1<<63 ahead.
//
// The driver does not know the writer. Streams can share a queue of the device, and some calls wait for all queued
// work, so the wait is safe only if the write has been queued before, on whatever device.
func (s *Stream) WaitValue(addr, v uint64) {
	if s.failed.Load() {
		return
	}
	defer s.spans.begin(s, "wait", "")()
	s.Fail(s.dev.check("cuStreamWaitValue64", C.cprun_wait_value(s.dev.ctx, s.handle, C.CUdeviceptr(addr),
		C.cuuint64_t(v))))
}

// WriteValue queues writing the 64-bit word at addr, which other devices and the host may
// read. They see all that was queued before it when they see v.
func (s *Stream) WriteValue(addr, v uint64) {
	if s.failed.Load() {
		return
	}
	s.Fail(s.dev.check("cuStreamWriteValue64", C.cprun_write_value(s.dev.ctx, s.handle, C.CUdeviceptr(addr),
		C.cuuint64_t(v))))
}

// Idle reports whether the device has done all that was queued, which on a poisoned stream it
// may not have. Any goroutine may ask.
func (s *Stream) Idle() bool {
	return C.cprun_stream_query(s.dev.ctx, s.handle) != C.CUDA_ERROR_NOT_READY
}
