//go:build cuda

package cuda

/*
#include <string.h>
#include "driver.h"
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

import "unsafe"

// IPCHandle names an allocation of the driver's to the other processes of the host.
type IPCHandle [C.sizeof_CUipcMemHandle]byte

// Allocation returns the allocation of this device that addr lies in: all of what Reserve took
// counts as one. It stays where it is until Close.
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

// Export makes the handle of the allocation that begins at base.
func (d *Device) Export(base uint64) (h IPCHandle, err error) {
	return h, d.check("cuIpcGetMemHandle", C.cprun_ipc_export(d.ctx, unsafe.Pointer(&h), C.CUdeviceptr(base)))
}

// Import maps an allocation that another process exported, of this or another device, and
// returns where it begins here. A process cannot import what it exported itself. If the
// other process has ended, what the memory holds is undefined. CloseImport unmaps it.
func (d *Device) Import(h IPCHandle) (addr uint64, err error) {
	var a C.CUdeviceptr
	err = d.check("cuIpcOpenMemHandle", C.cprun_ipc_open(d.ctx, &a, unsafe.Pointer(&h)))
	return uint64(a), err
}

// Range returns where the allocation of addr begins, and its size: of memory that this process has
// allocated, on whatever device, or imported.
func (d *Device) Range(addr uint64) (base uint64, bytes int64, err error) {
	var at C.CUdeviceptr
	var size C.size_t
	err = d.check("cuPointerGetAttribute", C.cprun_range(d.ctx, &at, &size, C.CUdeviceptr(addr)))
	return uint64(at), int64(size), err
}

// CloseImport unmaps what Import mapped. The device must be done with it.
func (d *Device) CloseImport(addr uint64) error {
	return d.check("cuIpcCloseMemHandle", C.cprun_ipc_close(d.ctx, C.CUdeviceptr(addr)))
}

// Reach lets this device read and write the device memory at addr, which this process
// allocated on whatever device.
func (d *Device) Reach(addr uint64) error {
	return d.check("cuCtxEnablePeerAccess", C.cprun_peer(d.ctx, C.CUdeviceptr(addr)))
}
