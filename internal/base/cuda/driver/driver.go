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

// Load finds the driver and starts it on the first call, and returns what came of that on every
// call. Any goroutine may call it. An error says what to do.
func Load() error { return load().err }

// Version returns the newest CUDA that the driver can run, such as "13.0". The driver may see no
// GPU.
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

// runs says which CUDA a driver is for, where it tells.
func runs(v int) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf(", for CUDA %s,", version(v))
}

// version writes a version as CUDA counts it, 13000 for 13.0.
func version(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// oldest is the first driver of a major version of CUDA, by NVIDIA's release notes.
var oldest = map[int]string{12: "525", 13: "580"}

// wanted names the driver that a binary needs which was built with that version of CUDA.
func wanted(built int) string {
	if v, ok := oldest[built/1000]; ok {
		return fmt.Sprintf("a driver for CUDA %s (%s or later)", version(built), v)
	}
	return "a driver for CUDA " + version(built)
}
