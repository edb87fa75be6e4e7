//go:build cuda

package dnn

/*
#cgo CXXFLAGS: -std=c++17 -w
#cgo LDFLAGS: -ldl
#include "shim.h"
#cgo noescape cprun_dnn_execute
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/tensor"
)

// Oldest is the oldest supported version of cuDNN, as a number of Version.
const Oldest = 90000

// Version loads cuDNN and returns its version, 91900 for 9.19.0.
func Version() (int, error) { return load() }

var load = sync.OnceValues(func() (version int, err error) {
	var v C.size_t
	err = call("load", func(err *C.char, n C.size_t) C.int { return C.cprun_dnn_load(&v, err, n) })
	switch {
	case err != nil:
		err = fmt.Errorf("%w; install cuDNN 9 and the CUDA runtime that it was built for where the loader "+
			"finds libcudnn.so.9 (ldconfig, or LD_LIBRARY_PATH), or use another attention backend", err)
	case v < Oldest:
		err = fmt.Errorf("cuDNN %d is too old; install version %d or newer", v, Oldest)
	}
	return int(v), err
})

func call(what string, f func(err *C.char, n C.size_t) C.int) error {
	var text [4096]C.char
	if f(&text[0], C.size_t(len(text))) == 0 {
		return nil
	}
	return errors.New("cuDNN: " + what + ": " + C.GoString(&text[0]))
}

// Handle is cuDNN on one stream, with its plans. One goroutine may use it at a time.
type Handle struct {
	stream *cuda.Stream
	handle unsafe.Pointer
	plans  map[Desc]*Plan
}

// Open loads cuDNN and makes a handle.
func Open(stream *cuda.Stream) (*Handle, error) {
	if _, err := Version(); err != nil {
		return nil, err
	}
	h := &Handle{stream: stream, plans: map[Desc]*Plan{}}
	err := stream.Device().With(func() error {
		return call("create", func(err *C.char, n C.size_t) C.int {
			return C.cprun_dnn_open(&h.handle, stream.Handle(), err, n)
		})
	})
	if err != nil {
		return nil, fmt.Errorf("%v: %w", stream.Device(), err)
	}
	return h, nil
}

// Close destroys the plans and the handle. The stream must be done with them.
func (h *Handle) Close() error {
	return h.stream.Device().With(func() error {
		for _, p := range h.plans {
			C.cprun_dnn_free(p.plan)
		}
		clear(h.plans)
		return call("destroy", func(err *C.char, n C.size_t) C.int { return C.cprun_dnn_close(h.handle, err, n) })
	})
}

// Built returns the number of built plans.
func (h *Handle) Built() int { return len(h.plans) }

// Workspaces returns the bytes of each plan's workspace.
func (h *Handle) Workspaces() map[Desc]int64 {
	m := map[Desc]int64{}
	for d, p := range h.plans {
		m[d] = p.Workspace
	}
	return m
}

// Plan is a compiled problem.
type Plan struct {
	plan unsafe.Pointer
	// Workspace is the device memory that each execution needs, in bytes.
	Workspace int64
	desc      Desc
}

// Plan returns the plan of a problem. The first call builds it, which takes cuDNN up to a second. The error has cuDNN's
// reason.
func (h *Handle) Plan(d Desc) (*Plan, error) {
	if p := h.plans[d]; p != nil {
		return p, nil
	}
	p := &Plan{desc: d}
	c := d.c()
	var workspace C.int64_t
	err := h.stream.Device().With(func() error {
		return call("plan", func(err *C.char, n C.size_t) C.int {
			return C.cprun_dnn_build(&p.plan, &workspace, h.handle, &c, err, n)
		})
	})
	if err != nil {
		return nil, fmt.Errorf("%v: %w: %v", h.stream.Device(), err, d)
	}
	p.Workspace = int64(workspace)
	h.plans[d] = p
	return p, nil
}

// Execute queues a plan on the stream. Every tensor of its descriptor needs an address. workspace is the address of
// p.Workspace bytes.
func (h *Handle) Execute(p *Plan, at *Pointers, workspace uint64) error {
	err := h.stream.Device().With(func() error {
		var text [4096]C.char
		if C.cprun_dnn_execute(p.plan, h.handle, (*C.uint64_t)(unsafe.Pointer(at)), C.uint64_t(workspace), &text[0],
			C.size_t(len(text))) == 0 {
			return nil
		}
		return errors.New("cuDNN: execute: " + C.GoString(&text[0]))
	})
	if err != nil {
		return fmt.Errorf("%v: %w: %v", h.stream.Device(), err, p.desc)
	}
	return nil
}

func (d Desc) c() C.cprun_dnn_desc {
	c := C.cprun_dnn_desc{
		backward: flag(d.Backward), half: flag(d.DType == tensor.F16),
		batch: C.int64_t(d.Batch), heads: C.int64_t(d.Heads), kv_heads: C.int64_t(d.KVHeads),
		q: C.int64_t(d.SeqQ), kv: C.int64_t(d.SeqK), dim: C.int64_t(d.Dim), dim_v: C.int64_t(d.DimV),
		left: C.int64_t(d.Mask.Left), right: C.int64_t(d.Mask.Right), bottom_right: flag(d.Mask.BottomRight),
		deterministic: flag(d.Deterministic), unified: flag(d.Unified), loose: flag(d.Loose),
		total_q: C.int64_t(d.TotalQ), total_kv: C.int64_t(d.TotalK), scale: C.float(d.Scale),
	}
	for t, s := range d.Strides {
		for a, n := range s {
			c.stride[t][a] = C.int64_t(n)
		}
	}
	return c
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// The shim must have the same tensors; otherwise these lines do not compile.
var _ = [1]struct{}{}[Tensors-C.CPRUN_DNN_TENSORS]
var _ = [1]struct{}{}[len(Pointers{})-C.CPRUN_DNN_POINTERS]
