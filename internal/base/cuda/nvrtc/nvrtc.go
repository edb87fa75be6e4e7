//go:build cuda

package nvrtc

/*
#cgo CFLAGS: -D_GNU_SOURCE
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "library.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"
)

// Compiler is NVRTC. Any goroutine may use it.
type Compiler struct {
	t            C.cprun_nvrtc_t
	path         string
	major, minor int
}

// sonames lists the supported libraries, the newest first.
var sonames = []string{"libnvrtc.so.13", "libnvrtc.so.12"}

// places lists the folders of toolkits in which the loader does not search.
var places = []string{"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"}

// Open loads NVRTC from the first of dirs that contains it, or else from the loader's folders, or else from the usual
// folders of a toolkit.
func Open(dirs ...string) (*Compiler, error) {
	var paths []string
	for _, d := range slices.Concat(dirs, []string{""}, places) {
		for _, name := range sonames {
			paths = append(paths, filepath.Join(d, name))
		}
	}
	var faults []error
	for _, path := range paths {
		c := &Compiler{path: path}
		if err := c.open(); err != nil {
			faults = append(faults, err)
			continue
		}
		return c, nil
	}
	return nil, fmt.Errorf("NVRTC, which compiles the kernels, cannot be loaded; install the CUDA toolkit (package "+
		"cuda-nvrtc), or add the folder of %s to LD_LIBRARY_PATH:\n%w", sonames[0], errors.Join(faults...))
}

func (c *Compiler) open() error {
	path := C.CString(c.path)
	defer C.free(unsafe.Pointer(path))
	if fault := C.cprun_nvrtc_open(&c.t, path); fault != nil {
		return fmt.Errorf("%s: %s", c.path, C.GoString(fault))
	}
	var major, minor C.int
	if err := c.check("nvrtcVersion", C.cprun_nvrtc_version(&c.t, &major, &minor)); err != nil {
		return fmt.Errorf("%s: %w", c.path, err)
	}
	c.major, c.minor = int(major), int(minor)
	c.path = C.GoString(C.cprun_nvrtc_where(&c.t))
	// NVRTC needs a second library in the same folder, where the loader may not search. If it is elsewhere, NVRTC
	// searches for it, and reports an error during compilation if it is missing.
	builtins := C.CString(filepath.Join(filepath.Dir(c.path), "libnvrtc-builtins.so."+c.Version()))
	defer C.free(unsafe.Pointer(builtins))
	C.cprun_nvrtc_preload(builtins)
	return nil
}

// Version returns the CUDA version of NVRTC, such as "13.0".
func (c *Compiler) Version() string { return fmt.Sprintf("%d.%d", c.major, c.minor) }

// Path returns the path of the loaded library.
func (c *Compiler) Path() string { return c.path }

func (c *Compiler) check(call string, r C.nvrtcResult) error {
	if r == C.NVRTC_SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %s", call, C.GoString(C.cprun_nvrtc_error(&c.t, r)))
}

// Error is a failed compilation.
type Error struct {
	Name  string // of the source
	Cause error
	Log   string // the compiler's log
}

func (e *Error) Error() string {
	return fmt.Sprintf("compiling %s: %v\n%s", e.Name, e.Cause, strings.TrimSpace(e.Log))
}

func (e *Error) Unwrap() error { return e.Cause }

// Compile translates src to a cubin. src may include headers by their names. The options must name an architecture:
// --gpu-architecture=sm_90a. The log has warnings and, with --ptxas-options=-v, the input of ParseUsage. An error is an
// *Error.
func (c *Compiler) Compile(name string, src []byte, headers map[string][]byte, opts []string) (cubin []byte,
	log string, err error) {
	cubin, log, err = c.compile(name, src, headers, opts)
	if err != nil {
		return nil, log, &Error{Name: name, Cause: err, Log: log}
	}
	return cubin, log, nil
}

func (c *Compiler) compile(name string, src []byte, headers map[string][]byte, opts []string) (cubin []byte,
	log string, err error) {
	var hold texts
	defer hold.free()
	names := slices.Sorted(maps.Keys(headers))
	bodies := make([]string, len(names))
	for i, h := range names {
		bodies[i] = string(headers[h])
	}
	var p C.nvrtcProgram
	if err := c.check("nvrtcCreateProgram", C.cprun_nvrtc_create(&c.t, &p, hold.one(string(src)), hold.one(name),
		C.int(len(names)), hold.all(bodies), hold.all(names))); err != nil {
		return nil, "", err
	}
	defer C.cprun_nvrtc_destroy(&c.t, p)
	fault := c.check("nvrtcCompileProgram", C.cprun_nvrtc_compile(&c.t, p, C.int(len(opts)), hold.all(opts)))
	if log, err = c.log(p); err != nil {
		return nil, "", err
	}
	if fault != nil {
		return nil, log, fault
	}
	var n C.size_t
	if err := c.check("nvrtcGetCUBINSize", C.cprun_nvrtc_cubin_size(&c.t, p, &n)); err != nil {
		return nil, log, err
	}
	if n == 0 {
		return nil, log,
			errors.New("there is no cubin; the architecture must be a real one, sm_90a and not compute_90a")
	}
	cubin = make([]byte, n)
	return cubin, log, c.check("nvrtcGetCUBIN", C.cprun_nvrtc_cubin(&c.t, p, unsafe.Pointer(&cubin[0])))
}

func (c *Compiler) log(p C.nvrtcProgram) (string, error) {
	var n C.size_t
	if err := c.check("nvrtcGetProgramLogSize", C.cprun_nvrtc_log_size(&c.t, p, &n)); err != nil || n == 0 {
		return "", err
	}
	text := make([]byte, n)
	err := c.check("nvrtcGetProgramLog", C.cprun_nvrtc_log(&c.t, p, unsafe.Pointer(&text[0])))
	return strings.TrimRight(string(text), "\x00"), err
}

// texts holds C strings, and arrays of them.
type texts struct{ held []unsafe.Pointer }

func (t *texts) one(s string) *C.char {
	p := C.CString(s)
	t.held = append(t.held, unsafe.Pointer(p))
	return p
}

func (t *texts) all(ss []string) **C.char {
	if len(ss) == 0 {
		return nil
	}
	p := C.malloc(C.size_t(len(ss)) * C.size_t(unsafe.Sizeof((*C.char)(nil))))
	t.held = append(t.held, p)
	for i, s := range ss {
		unsafe.Slice((**C.char)(p), len(ss))[i] = t.one(s)
	}
	return (**C.char)(p)
}

func (t *texts) free() {
	for _, p := range t.held {
		C.free(p)
	}
}
