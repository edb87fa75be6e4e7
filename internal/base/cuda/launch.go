//go:build cuda

package cuda

/*
#include <stdlib.h>
#include <string.h>
#include "driver.h"
#cgo noescape cprun_launch
#cgo nocallback cprun_launch
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
	"encoding/binary"
	"fmt"
	"math"
	"time"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// Module is compiled code on a device.
type Module struct {
	dev *Device
	m   C.CUmodule
}

// Load loads a cubin.
func (d *Device) Load(cubin []byte) (*Module, error) {
	m := &Module{dev: d}
	image := C.CBytes(cubin)
	defer C.free(image)
	return m, d.check("cuModuleLoadData", C.cprun_module_load(d.ctx, &m.m, image))
}

// Function is a loaded kernel.
type Function struct {
	dev  *Device
	f    C.CUfunction
	Name string // in the program
}

// Function finds a kernel by its name. shared is the largest dynamic shared memory of its launches, in bytes.
func (m *Module) Function(name string, shared int) (*Function, error) {
	f := &Function{dev: m.dev, Name: name}
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	if err := m.dev.check("cuModuleGetFunction "+name, C.cprun_module_function(m.dev.ctx, &f.f, m.m,
		cname)); err != nil {
		return nil, err
	}
	if shared > 48<<10 {
		r := C.cprun_function_set(m.dev.ctx, f.f, C.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, C.int(shared))
		if err := m.dev.check(fmt.Sprintf("%d bytes of shared memory for %s", shared, name), r); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// Blocks returns the number of blocks that an SM runs at once, given their threads and dynamic shared memory.
func (f *Function) Blocks(threads, shared int) (int, error) {
	var n C.int
	err := f.dev.check("occupancy of "+f.Name, C.cprun_occupancy(f.dev.ctx, &n, f.f, C.int(threads), C.size_t(shared)))
	return int(n), err
}

// Dim is the size of a grid or a block along X, Y and Z; 0 in Y or Z means 1.
type Dim struct{ X, Y, Z int }

func (d Dim) c() [3]C.uint {
	return [3]C.uint{C.uint(d.X), C.uint(max(d.Y, 1)), C.uint(max(d.Z, 1))}
}

// Launch configures the launch of a kernel.
type Launch struct {
	Grid, Block Dim
	Shared      int // bytes of dynamic shared memory
}

// Launch queues a kernel. If the grid is empty it does nothing.
func (s *Stream) Launch(f *Function, l Launch, a *Args) {
	if s.failed.Load() || l.Grid.X == 0 {
		return
	}
	c := C.cprun_launch_t{grid: l.Grid.c(), block: l.Block.c(), shared: C.uint(l.Shared)}
	if a.apart {
		if a.count > len(a.at) {
			s.Fail(fmt.Errorf("launch of %s: %d arguments, of which one is aligned to more than 16 bytes; at most %d "+
				"then", f.Name, a.count, len(a.at)))
			return
		}
		c.params = C.int(a.count)
		for i, at := range a.at[:a.count] {
			c.at[i] = C.ushort(at)
		}
	}
	r := C.cprun_launch(s.dev.ctx, s.handle, f.f, &c, unsafe.Pointer(&a.buf[0]), C.size_t(a.n))
	if r != C.CUDA_SUCCESS {
		s.Fail(s.dev.check(fmt.Sprintf("launch of %s, grid %v, block %v, %d bytes of shared memory", f.Name, l.Grid,
			l.Block, l.Shared), r))
	}
}

// Args collects the arguments of a kernel, in the layout of C. Each call adds a parameter.
type Args struct {
	buf [4096]byte // what CUDA guarantees for a kernel's parameters
	n   int
	// The constant bank aligns a GPU's parameters to 16 bytes only. If a parameter is aligned to more, its place
	// depends on the GPU, so the driver must place every parameter: apart is set, and at holds their offsets in buf.
	apart bool
	at    [C.CPRUN_PARAMS]uint16
	count int
}

func (a *Args) room(size, align int) []byte {
	at := (a.n + align - 1) / align * align
	a.n = at + size
	if a.count < len(a.at) {
		a.at[a.count] = uint16(at)
	}
	a.count++
	a.apart = a.apart || align > 16
	return a.buf[at:a.n]
}

// View adds the address of the view's first element, or NULL for the zero View.
func (a *Args) View(v tensor.View) *Args { return a.Addr(v.Addr()) }

// Addr adds a device address.
func (a *Args) Addr(p uint64) *Args {
	binary.LittleEndian.PutUint64(a.room(8, 8), p)
	return a
}

// Int adds an int.
func (a *Args) Int(x int) *Args {
	binary.LittleEndian.PutUint32(a.room(4, 4), uint32(int32(x)))
	return a
}

// Int64 adds a long long.
func (a *Args) Int64(x int64) *Args {
	binary.LittleEndian.PutUint64(a.room(8, 8), uint64(x))
	return a
}

// Float adds a float.
func (a *Args) Float(x float64) *Args {
	binary.LittleEndian.PutUint32(a.room(4, 4), math.Float32bits(float32(x)))
	return a
}

// Struct adds a copy of a struct as a parameter, and returns a. The fields of *x must equal those of C in size and
// order, and hold no Go pointers.
func Struct[T any](a *Args, x *T) *Args { return StructAligned(a, x, int(unsafe.Alignof(*x))) }

// StructAligned does what Struct does, for a struct that C aligns to more than Go, such as one with tensor maps.
func StructAligned[T any](a *Args, x *T, align int) *Args {
	return a.Bytes(unsafe.Slice((*byte)(unsafe.Pointer(x)), int(unsafe.Sizeof(*x))), align)
}

// Bytes adds a struct with the given alignment, such as a tensor map.
func (a *Args) Bytes(b []byte, align int) *Args {
	copy(a.room(len(b), align), b)
	return a
}

// waits adds up a stream's waits for other streams, with a pair of events around each wait.
type waits struct {
	counting bool
	open     []waitPair // not known to have ended, oldest first
	free     []waitPair // events to reuse
	total    time.Duration
}

type waitPair struct{ from, to C.CUevent }

// waitsOpen bounds the open pairs. A run that logs every thousandth step waits about a hundred thousand times in
// between.
const waitsOpen = 512

// CountWaits starts counting for Waited. It costs two events for each wait.
func (s *Stream) CountWaits() { s.waits.counting = true }

// Waited returns the time for which the stream has waited for other streams since CountWaits, up to the device's
// current work. Only the goroutine that queues may call it.
func (s *Stream) Waited() time.Duration {
	w := &s.waits
	over := 0
	for _, p := range w.open {
		var took C.float
		if C.cprun_event_query(s.dev.ctx, p.to) != C.CUDA_SUCCESS ||
			C.cprun_event_elapsed(s.dev.ctx, &took, p.from, p.to) != C.CUDA_SUCCESS {
			break // not reached, or the device has failed, which the stream reports
		}
		w.total += milliseconds(took)
		over++
	}
	w.free = append(w.free, w.open[:over]...)
	w.open = append(w.open[:0], w.open[over:]...)
	return w.total
}

// begin records the start of a wait; the returned function records its end.
func (w *waits) begin(s *Stream) (end func()) {
	if !w.counting {
		return nothing
	}
	if len(w.open) >= waitsOpen {
		s.Waited()
	}
	var p waitPair
	if n := len(w.free); n > 0 {
		p, w.free = w.free[n-1], w.free[:n-1]
	} else {
		p = waitPair{s.timing(), s.timing()}
	}
	s.Fail(s.dev.check("cuEventRecord", C.cprun_event_record(s.dev.ctx, p.from, s.handle)))
	return func() {
		s.Fail(s.dev.check("cuEventRecord", C.cprun_event_record(s.dev.ctx, p.to, s.handle)))
		w.open = append(w.open, p)
	}
}

// TensorMap describes a tensor in device memory, and the box that a copy moves, to an SM's copy engine (TMA, since
// sm_90). A kernel takes it as a __grid_constant__ argument; see Args.Bytes.
type TensorMap [C.sizeof_CUtensorMap]byte

// Tiled describes a tensor of up to five axes, the innermost first.
type Tiled struct {
	Type    tensor.DType
	Addr    uint64  // a multiple of 16
	Shape   []int   // elements
	Strides []int64 // bytes, multiples of 16, of every axis except the innermost, which is contiguous
	Box     []int   // elements, at most 256 on an axis; outside the tensor they read as 0
	// Swizzle selects the permutation of a box's 16-byte pieces in shared memory: 0, 32, 64 or 128 bytes. The innermost
	// axis of the box must not be longer.
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

// TensorMap encodes t. The driver's error does not name the invalid value, so the error lists all values.
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
