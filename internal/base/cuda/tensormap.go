//go:build cuda

package cuda

/*
#include <string.h>
#include "driver.h"
typedef struct {
	CUtensorMapDataType type;
	cuuint32_t rank;
	cuuint64_t addr, dim[5], stride[5];
	cuuint32_t box[5], step[5];
	CUtensorMapSwizzle swizzle;
	CUtensorMapL2promotion promotion;
} cprun_tiled_t;
static inline CUresult cprun_tensor_map(CUcontext ctx, void *out, const cprun_tiled_t *t) {
	CUtensorMap m; // aligned as the driver wants it
	CUresult r = cprun_use(ctx);
	if (r == CUDA_SUCCESS)
		r = cuTensorMapEncodeTiled(&m, t->type, t->rank, (void *)t->addr, t->dim, t->stride, t->box, t->step,
			CU_TENSOR_MAP_INTERLEAVE_NONE, t->swizzle, t->promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
	if (r == CUDA_SUCCESS) memcpy(out, &m, sizeof m);
	return r;
}
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// TensorMap says to the copy engine of an SM (TMA, from sm_90 on) how a tensor lies in device
// memory, and which box of it a copy moves. A kernel takes it as a __grid_constant__ argument:
// Args.TensorMap.
type TensorMap [C.sizeof_CUtensorMap]byte

// Tiled describes a tensor of up to five axes, the innermost first.
type Tiled struct {
	Type    tensor.DType
	Addr    uint64  // a multiple of 16
	Shape   []int   // elements
	Strides []int64 // bytes, multiples of 16, of every axis but the innermost, which has no gaps
	Box     []int   // elements, at most 256 on an axis; outside the tensor they read as 0
	// Swizzle is how the 16-byte pieces of a box are permuted in shared memory, 0, 32, 64 or 128
	// bytes; the innermost axis of the box is no longer.
	Swizzle int
}

var mapTypes = map[tensor.DType]C.CUtensorMapDataType{
	tensor.F64: C.CU_TENSOR_MAP_DATA_TYPE_FLOAT64, tensor.F32: C.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
	tensor.F16: C.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, tensor.BF16: C.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
	tensor.I64: C.CU_TENSOR_MAP_DATA_TYPE_INT64, tensor.I32: C.CU_TENSOR_MAP_DATA_TYPE_INT32,
	tensor.U8: C.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}

var swizzles = map[int]C.CUtensorMapSwizzle{
	0: C.CU_TENSOR_MAP_SWIZZLE_NONE, 32: C.CU_TENSOR_MAP_SWIZZLE_32B,
	64: C.CU_TENSOR_MAP_SWIZZLE_64B, 128: C.CU_TENSOR_MAP_SWIZZLE_128B,
}

// TensorMap encodes t. An error of the driver's says only that some value is not allowed, and
// so the error has all of them.
func (d *Device) TensorMap(t Tiled) (m TensorMap, err error) {
	kind, known := mapTypes[t.Type]
	swizzle, allowed := swizzles[t.Swizzle]
	n := len(t.Shape)
	if !known || !allowed || n < 1 || n > 5 || len(t.Strides) != n-1 || len(t.Box) != n {
		return m, fmt.Errorf("%v: a tensor map of %+v: the type, the swizzle or the number of axes is not one there is",
			d, t)
	}
	c := C.cprun_tiled_t{
		_type: kind, rank: C.cuuint32_t(n), addr: C.cuuint64_t(t.Addr), swizzle: swizzle,
		promotion: C.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
	}
	for i := range n {
		c.dim[i], c.box[i], c.step[i] = C.cuuint64_t(t.Shape[i]), C.cuuint32_t(t.Box[i]), 1
		if i < n-1 {
			c.stride[i] = C.cuuint64_t(t.Strides[i])
		}
	}
	return m, d.check(fmt.Sprintf("cuTensorMapEncodeTiled of %+v", t),
		C.cprun_tensor_map(d.ctx, unsafe.Pointer(&m), &c))
}

// TensorMap adds a tensor map. Every other argument is a parameter of its own then; see Args.
func (a *Args) TensorMap(m TensorMap) *Args { return a.Bytes(m[:], 64) }
