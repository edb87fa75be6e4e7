//go:build cuda

package blas

/*
#cgo LDFLAGS: -ldl
#include "library.h"
#cgo noescape cprun_plan_run
#cgo nocallback cprun_plan_run
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

var library struct {
	once sync.Once
	t    C.cprun_blas_t
	err  error
}

// paths lists the libraries to try: first in the loader's folders, then in those of a toolkit.
var paths = []string{
	"libcublasLt.so.13", "libcublasLt.so.12",
	"/usr/local/cuda/lib64/libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.12",
}

func load() error {
	l := &library
	l.once.Do(func() {
		var faults []error
		for _, p := range paths {
			path := C.CString(p)
			fault := C.cprun_blas_load(&l.t, path)
			C.free(unsafe.Pointer(path))
			if fault == nil {
				return
			}
			faults = append(faults, fmt.Errorf("%s: %s", p, C.GoString(fault)))
		}
		l.err = fmt.Errorf("cuBLASLt, which multiplies matrices, cannot be loaded; install the CUDA toolkit (package "+
			"libcublas), or add the folder of %s to LD_LIBRARY_PATH:\n%w", paths[0], errors.Join(faults...))
	})
	return l.err
}

// Version loads cuBLASLt and returns its version, 130100 for 13.1.0.
func Version() (int, error) {
	if err := load(); err != nil {
		return 0, err
	}
	return int(C.cprun_blas_version(&library.t)), nil
}

func check(call string, s C.cublasStatus_t) error {
	if s == C.CUBLAS_STATUS_SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %s", call, C.GoString(C.cprun_blas_status(&library.t, s)))
}

// Handle is cuBLASLt on one stream, with the algorithms that it chose. One goroutine may use it at a time.
type Handle struct {
	stream    *cuda.Stream
	workspace *cuda.Memory
	h         C.cublasLtHandle_t
	plans     map[key]*C.cprun_plan_t
}

// Open loads cuBLASLt and makes a handle. Only this handle may use workspace, device memory; 64 MiB suffice for any
// algorithm.
func Open(stream *cuda.Stream, workspace *cuda.Memory) (*Handle, error) {
	if err := load(); err != nil {
		return nil, err
	}
	h := &Handle{stream: stream, workspace: workspace, plans: map[key]*C.cprun_plan_t{}}
	err := stream.Device().With(func() error {
		return check("cublasLtCreate", C.cprun_blas_create(&library.t, &h.h))
	})
	if err != nil {
		return nil, fmt.Errorf("%v: %w", stream.Device(), err)
	}
	return h, nil
}

// Close frees the handle and its plans. The stream must be done.
func (h *Handle) Close() error {
	for _, p := range h.plans {
		C.cprun_plan_free(&library.t, p)
	}
	h.plans = nil
	return h.stream.Device().With(func() error {
		return check("cublasLtDestroy", C.cprun_blas_destroy(&library.t, h.h))
	})
}

// Plans returns the number of planned problems.
func (h *Handle) Plans() int { return len(h.plans) }

// Multiply queues p on the stream. If cuBLASLt has no algorithm for p, such as for bfloat16 matrices with an odd number
// of columns, it queues nothing and returns false. M, N and K must be at least 1. An error poisons the stream.
func (h *Handle) Multiply(name string, p Problem) bool {
	if h.stream.Err() != nil {
		return true // dropped
	}
	k := p.key()
	x := h.plans[k]
	if x == nil {
		var err error
		if x, err = h.plan(p); err != nil {
			h.stream.Fail(fmt.Errorf("%s: %v: %w", name, p, err))
			return true
		}
		h.plans[k] = x
	}
	if x.found == 0 {
		return false
	}
	h.stream.Do(name, func() error { return h.run(x, p) })
	return true
}

// run queues the product.
func (h *Handle) run(x *C.cprun_plan_t, p Problem) error {
	beta := C.float(0)
	if p.C.Addr != 0 {
		beta = 1
	}
	o := p.operands()
	return h.stream.Device().With(func() error {
		// Row-major matrices are the transposed of column-major ones: D' = B' A' + C'.
		s := C.cprun_plan_run(&library.t, h.h, x, beta,
			C.uint64_t(o[1].Addr), C.uint64_t(o[0].Addr), C.uint64_t(o[2].Addr), C.uint64_t(o[3].Addr),
			C.uint64_t(o[1].Factors), C.uint64_t(o[0].Factors), C.uint64_t(h.workspace.Addr()), h.stream.Handle())
		if s != C.CUBLAS_STATUS_SUCCESS {
			return fmt.Errorf("%v: %w", p, check("cublasLtMatmul", s))
		}
		return nil
	})
}

// plan asks cuBLASLt for an algorithm for p: its first choice, which is always the same.
func (h *Handle) plan(p Problem) (out *C.cprun_plan_t, err error) {
	x, err := product(p)
	if err != nil {
		return nil, err
	}
	x.workspace = C.size_t(h.workspace.Bytes())
	err = h.stream.Device().With(func() error {
		return check("choosing a matrix product", C.cprun_plan_make(&library.t, h.h, &x, &out))
	})
	return out, err
}

// product converts p to cuBLASLt's column-major form, in which the operands are exchanged.
func product(p Problem) (C.cprun_product_t, error) {
	var x C.cprun_product_t
	in, ok := types[p.In]
	out, ok2 := types[p.Out]
	scaled := p.In == tensor.U8
	if !ok || !ok2 || p.Out == tensor.U8 || !scaled && p.Out != p.In && p.Out != tensor.F32 {
		return x, fmt.Errorf("cuBLASLt multiplies float32, float16 and bfloat16, to the same type or float32, and E4M3")
	}
	if v := int(C.cprun_blas_version(&library.t)); scaled && v < scaledVersion {
		return x, fmt.Errorf("cuBLASLt %d.%d does not multiply E4M3 with a factor for each row; install CUDA 12.9 or "+
			"later", v/10000, v/100%100)
	}
	m, n, k := C.uint64_t(p.M), C.uint64_t(p.N), C.uint64_t(p.K)
	x._type = [4]C.cudaDataType_t{in, in, out, out}
	x.op = [2]C.cublasOperation_t{C.CUBLAS_OP_N, C.CUBLAS_OP_N}
	// A row-major matrix of r rows and c columns is a column-major one of c rows and r columns.
	x.rows, x.cols = [4]C.uint64_t{n, k, n, n}, [4]C.uint64_t{k, m, m, m}
	if p.TransB {
		x.op[0], x.rows[0], x.cols[0] = C.CUBLAS_OP_T, k, n
	}
	if p.TransA {
		x.op[1], x.rows[1], x.cols[1] = C.CUBLAS_OP_T, m, k
	}
	o := p.operands()
	for i, from := range [4]int{1, 0, 2, 3} {
		x.stride[i], x.align[i] = C.int64_t(o[from].Stride), C.uint32_t(alignment(o[from].Addr))
	}
	x.factors = [2]C.uint64_t{C.uint64_t(p.B.Factors), C.uint64_t(p.A.Factors)}
	return x, nil
}

var types = map[tensor.DType]C.cudaDataType_t{tensor.F32: C.CUDA_R_32F, tensor.F16: C.CUDA_R_16F,
	tensor.BF16: C.CUDA_R_16BF, tensor.U8: C.CUDA_R_8F_E4M3}

// scaledVersion is the first version with factors for each row.
const scaledVersion = 120900
