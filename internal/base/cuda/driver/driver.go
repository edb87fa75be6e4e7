//go:build cuda

package driver

/*
#cgo LDFLAGS: -ldl
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
)

// Load finds and initialises the driver on the first call, and returns the result of that on every call. An error names
// the remedy. Any goroutine may call it.
func Load() error { return load().err }

// Version returns the newest CUDA version that the driver supports, such as "13.0", also if the driver sees no GPU.
func Version() (string, error) {
	d := load()
	if d.err != nil && !errors.Is(d.err, ErrNoDevice) {
		return "", d.err
	}
	return version(d.version), nil
}

type loaded struct {
	version int
	err     error
}

var load = sync.OnceValue(func() loaded {
	var d C.cprun_driver_t
	C.cprun_driver_load(&d)
	l := loaded{version: int(d.version)}
	switch built := int(C.cprun_driver_built()); {
	case d.absent[0] != 0:
		l.err = fmt.Errorf("%w (%s); install %s", ErrAbsent, C.GoString(&d.absent[0]), wanted(built))
	case d.missing[0] != 0:
		l.err = fmt.Errorf("the NVIDIA driver%s is too old: its libcuda.so.1 has no %s; install %s",
			runs(l.version), C.GoString(&d.missing[0]), wanted(built))
	case d.result == noDevice:
		l.err = fmt.Errorf("%w; look at nvidia-smi and CUDA_VISIBLE_DEVICES", ErrNoDevice)
	case d.result != 0:
		l.err = fmt.Errorf("the NVIDIA driver does not start: cuInit: %s (%s); look at nvidia-smi and dmesg",
			C.GoString(&d.text[0]), C.GoString(&d.name[0]))
	}
	return l
})

const noDevice = 100 // CUDA_ERROR_NO_DEVICE

// runs returns the part of a message with the driver's CUDA version, or "" if that is unknown.
func runs(v int) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf(", for CUDA %s,", version(v))
}

// version formats CUDA's number of a version: 13.0 for 13000.
func version(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// oldest maps a major version of CUDA to its first driver, from NVIDIA's release notes.
var oldest = map[int]string{12: "525", 13: "580"}

// wanted names the driver for a binary that was built with the given version of CUDA.
func wanted(built int) string {
	if v, ok := oldest[built/1000]; ok {
		return fmt.Sprintf("a driver for CUDA %s (%s or later)", version(built), v)
	}
	return "a driver for CUDA " + version(built)
}
