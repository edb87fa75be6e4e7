//go:build cuda

package cuda

// #include "driver.h"
import "C"

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"

	"gorgonia.org/cu"

	"github.com/cprun/cprun/internal/base/cuda/driver"
	"github.com/cprun/cprun/tensor"
)

// Error is a failed call of the driver.
type Error struct {
	Call   string
	Device int    // ordinal
	Name   string // CUDA_ERROR_OUT_OF_MEMORY
	Text   string
	Reason string // from a kernel that ended itself; "": none
}

func (e *Error) Error() string {
	text := fmt.Sprintf("cuda:%d: %s: %s (%s)", e.Device, e.Call, e.Text, e.Name)
	if e.Reason != "" {
		text += ": " + e.Reason
	}
	return text
}

// Device is one GPU and its primary context, which it shares with libraries of the runtime API, such as cuDNN and NCCL.
type Device struct {
	// Ordinal is the driver's number of the GPU, after CUDA_VISIBLE_DEVICES.
	Ordinal int
	Name    string
	SMs     int
	// Arch is 10 times the compute capability: 90 is sm_90.
	Arch int
	// SharedPerBlock is the largest dynamic shared memory of a block, in bytes.
	SharedPerBlock int
	PCI            uint64 // address on the machine, the same in every process

	dev cu.Device
	ctx C.CUcontext

	mu     sync.Mutex
	pool   pool    // guarded by mu
	allocs []alloc // guarded by mu; all allocations from the driver, for IPC

	reasonMu sync.Mutex
	reasons  []func() string      // guarded by reasonMu
	pinned   map[*Pinned]struct{} // guarded by mu; not freed yet
}

// Count returns the number of GPUs that this process sees. Without the driver, it fails with driver.ErrAbsent.
func Count() (int, error) {
	if err := driver.Load(); errors.Is(err, driver.ErrNoDevice) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	n, err := cu.NumDevices()
	if err != nil {
		return 0, fmt.Errorf("counting GPUs: %w", err)
	}
	return n, nil
}

// Open retains the primary context of a GPU. Close releases it.
func Open(ordinal int) (*Device, error) {
	if err := driver.Load(); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", ordinal, err)
	}
	dev, err := cu.GetDevice(ordinal)
	if err != nil {
		return nil, fmt.Errorf("GPU %d: %w", ordinal, err)
	}
	d := &Device{Ordinal: ordinal, dev: dev, pinned: map[*Pinned]struct{}{}}
	if d.Name, err = dev.Name(); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", ordinal, err)
	}
	major, minor, domain, bus, slot := 0, 0, 0, 0, 0
	for a, p := range map[cu.DeviceAttribute]*int{
		cu.MultiprocessorCount: &d.SMs, cu.ComputeCapabilityMajor: &major, cu.ComputeCapabilityMinor: &minor,
		sharedOptin: &d.SharedPerBlock, pciDomain: &domain, pciBus: &bus, pciDevice: &slot,
	} {
		if *p, err = dev.Attribute(a); err != nil {
			return nil, fmt.Errorf("GPU %d: attribute %d: %w", ordinal, a, err)
		}
	}
	d.Arch, d.PCI = 10*major+minor, uint64(domain)<<32|uint64(bus)<<16|uint64(slot)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, err := dev.RetainPrimaryCtx()
	if err != nil {
		return nil, d.named("cuDevicePrimaryCtxRetain", err)
	}
	if err := cu.SetCurrentContext(ctx); err != nil {
		return nil, d.named("cuCtxSetCurrent", err)
	}
	return d, d.check("cuCtxGetCurrent", C.cprun_current(&d.ctx))
}

const (
	sharedOptin = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
	pciDomain   = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)
	pciBus      = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)
	pciDevice   = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)
)

// Close frees the device's memory and releases the context. Streams and memory of the device must not be used
// afterwards.
func (d *Device) Close() error {
	if err := d.freeAll(); err != nil {
		return err
	}
	if err := d.dev.ReleasePrimaryCtx(); err != nil {
		return fmt.Errorf("GPU %d: release: %w", d.Ordinal, err)
	}
	return nil
}

// Place returns the device of views.
func (d *Device) Place() tensor.Device { return tensor.Device{Kind: "cuda", Index: d.Ordinal} }

// Bus returns the device's name on the PCI bus, as in /sys/bus/pci/devices.
func (d *Device) Bus() string {
	return fmt.Sprintf("%04x:%02x:%02x.0", d.PCI>>32, d.PCI>>16&0xffff, d.PCI&0xffff)
}

func (d *Device) String() string { return fmt.Sprintf("cuda:%d (%s)", d.Ordinal, d.Name) }

// With calls f with the device's context current on its thread, for libraries.
func (d *Device) With(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.check("cuCtxSetCurrent", C.cprun_use(d.ctx)); err != nil {
		return err
	}
	return f()
}

// MemInfo returns the free and the total memory of the device, in bytes, over all processes.
func (d *Device) MemInfo() (free, total int64, err error) {
	err = d.With(func() (err error) {
		free, total, err = cu.MemInfo()
		return err
	})
	return free, total, err
}

// OnError registers f, which returns the reason for which a kernel ended itself, or "". Errors of the device include
// it.
func (d *Device) OnError(f func() string) {
	d.reasonMu.Lock()
	defer d.reasonMu.Unlock()
	d.reasons = append(d.reasons, f)
}

// reason returns the first reason of a registered function, or "".
func (d *Device) reason() string {
	d.reasonMu.Lock()
	defer d.reasonMu.Unlock()
	for _, f := range d.reasons {
		if s := f(); s != "" {
			return s
		}
	}
	return ""
}

// check returns nil or an *Error.
func (d *Device) check(call string, r C.CUresult) error {
	if r == C.CUDA_SUCCESS {
		return nil
	}
	return &Error{Call: call, Device: d.Ordinal, Name: C.GoString(C.cprun_error_name(r)),
		Text: C.GoString(C.cprun_error_text(r)), Reason: d.reason()}
}

// named returns an error of package cu with the driver's name and text: cu does not know the newer codes.
func (d *Device) named(call string, err error) error {
	if r := reflect.ValueOf(err); r.Kind() == reflect.Int {
		return d.check(call, C.CUresult(r.Int()))
	}
	return err
}

// Info describes a GPU without a context.
type Info struct {
	Ordinal int
	Name    string
	Arch    int // as Device.Arch
	SMs     int
	Memory  int64 // bytes
	// Peers lists the ordinals of the GPUs with memory that it can access.
	Peers []int
}

// Probe lists the GPUs that this process sees. It creates no context, which would take memory on each of them.
func Probe() ([]Info, error) {
	n, err := Count()
	if err != nil {
		return nil, err
	}
	devs, infos := make([]cu.Device, n), make([]Info, n)
	for i := range n {
		if devs[i], err = cu.GetDevice(i); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
	}
	for i, dev := range devs {
		if infos[i], err = probe(i, dev, devs); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
	}
	return infos, nil
}

func probe(ordinal int, dev cu.Device, all []cu.Device) (d Info, err error) {
	d.Ordinal = ordinal
	if d.Name, err = dev.Name(); err != nil {
		return d, err
	}
	if d.Memory, err = dev.TotalMem(); err != nil {
		return d, err
	}
	major, minor := 0, 0
	for _, a := range []struct {
		attribute cu.DeviceAttribute
		value     *int
	}{{cu.MultiprocessorCount, &d.SMs}, {cu.ComputeCapabilityMajor, &major}, {cu.ComputeCapabilityMinor, &minor}} {
		if *a.value, err = dev.Attribute(a.attribute); err != nil {
			return d, fmt.Errorf("attribute %d: %w", a.attribute, err)
		}
	}
	d.Arch = 10*major + minor
	for j, peer := range all {
		if j == ordinal {
			continue
		}
		can, err := dev.CanAccessPeer(peer)
		if err != nil {
			return d, fmt.Errorf("access to GPU %d: %w", j, err)
		}
		if can != 0 {
			d.Peers = append(d.Peers, j)
		}
	}
	return d, nil
}
