// Package tensor holds the two types that all other packages pass around: a View, a strided window onto memory on some
// device, and a Stream, a queue of work in order on that device. It knows neither attention nor communication.
//
//	x := tensor.FromSlice([]float32{1, 2, 3, 4}, 2, 2) // on the host: [1, 1, 2, 2]
//	arena := tensor.NewHostArena(1 << 20)
//	y := arena.Alloc(tensor.F32, 2, 2)
package tensor

import (
	"fmt"
	"unsafe"
)

// Axis names an axis of a View. Every View is [batch, seq, heads, dim]. Activations are [batch, seq, 1, features], a
// weight is [1, rows, 1, cols], a vector [1, 1, 1, n].
type Axis int

// The axes, outermost first.
const (
	Batch Axis = iota
	Seq
	Heads
	Dim
)

func (a Axis) String() string { return [...]string{"batch", "seq", "heads", "dim"}[a] }

// Memory is one allocation on one device. Only its owner frees it; a View never does.
type Memory interface {
	// Device returns its device.
	Device() Device
	// Bytes returns its length.
	Bytes() int64
	// Ptr returns the address of the first byte, on the device that Device names.
	Ptr() unsafe.Pointer
}

// Device identifies a place of memory. The zero value is the host.
type Device struct {
	Kind  string // "" for the host, "cuda" for a GPU
	Index int
}

func (d Device) String() string {
	if d.Kind == "" {
		return "cpu"
	}
	return fmt.Sprintf("%s:%d", d.Kind, d.Index)
}

// View is a strided window onto memory that it does not own. Offset and strides
// count elements, not bytes. Views are small values: copy them, compare them with ==.
type View struct {
	mem    Memory
	off    int64
	dtype  DType
	shape  [4]int
	stride [4]int64
}

// NewView makes a view. It panics if an element of it would lie outside mem.
func NewView(mem Memory, dtype DType, off int64, shape [4]int, stride [4]int64) View {
	v := View{mem: mem, off: off, dtype: dtype, shape: shape, stride: stride}
	lo, hi := off, off
	for a, n := range shape {
		if n < 0 {
			panic(fmt.Sprintf("tensor: negative length %d on axis %s", n, Axis(a)))
		}
		if n == 0 {
			return v
		}
		if d := int64(n-1) * stride[a]; d < 0 {
			lo += d
		} else {
			hi += d
		}
	}
	if size := int64(dtype.Size()); lo < 0 || (hi+1)*size > mem.Bytes() {
		panic(fmt.Sprintf("tensor: view of elements %d to %d of %s reaches outside %d bytes", lo, hi, dtype,
			mem.Bytes()))
	}
	return v
}

// Dense returns a row-major view of mem that begins at element off.
func Dense(mem Memory, dtype DType, off int64, shape [4]int) View {
	return NewView(mem, dtype, off, shape, denseStrides(shape))
}

func denseStrides(shape [4]int) [4]int64 {
	var s [4]int64
	n := int64(1)
	for a := 3; a >= 0; a-- {
		s[a] = n
		n *= int64(shape[a])
	}
	return s
}

// IsZero reports whether v is the zero View, without memory.
func (v View) IsZero() bool { return v.mem == nil }

// Memory returns the allocation of v.
func (v View) Memory() Memory { return v.mem }

// Addr returns the address of v's first element, on its device; 0 for the zero View.
func (v View) Addr() uint64 {
	if v.IsZero() {
		return 0
	}
	return uint64(uintptr(v.mem.Ptr())) + uint64(v.off*int64(v.dtype.Size()))
}

// Offset returns the index of v's first element in its memory.
func (v View) Offset() int64 { return v.off }

// DType returns the element type.
func (v View) DType() DType { return v.dtype }

// Len returns the length of one axis.
func (v View) Len(a Axis) int { return v.shape[a] }

// Shape returns the length of every axis.
func (v View) Shape() [4]int { return v.shape }

// Stride returns the distance, in elements, between neighbours on one axis.
func (v View) Stride(a Axis) int64 { return v.stride[a] }

// Strides returns the distance between neighbours on every axis.
func (v View) Strides() [4]int64 { return v.stride }

// Size returns the number of elements.
func (v View) Size() int {
	return v.shape[0] * v.shape[1] * v.shape[2] * v.shape[3]
}

// Rows returns batch times seq: the rows of v taken as a matrix.
func (v View) Rows() int { return v.shape[Batch] * v.shape[Seq] }

// Cols returns heads times dim: the columns of v taken as a matrix.
func (v View) Cols() int { return v.shape[Heads] * v.shape[Dim] }

// IsDense reports whether v is row-major without gaps. Axes of length 1 do not count.
func (v View) IsDense() bool {
	want := int64(1)
	for a := 3; a >= 0; a-- {
		if v.shape[a] == 0 {
			return true
		}
		if v.shape[a] != 1 && v.stride[a] != want {
			return false
		}
		want *= int64(v.shape[a])
	}
	return true
}

// Slice narrows one axis to [lo, hi). It copies nothing.
func (v View) Slice(a Axis, lo, hi int) View {
	if lo < 0 || hi < lo || hi > v.shape[a] {
		panic(fmt.Sprintf("tensor: slice [%d:%d) of axis %s with length %d", lo, hi, a, v.shape[a]))
	}
	if hi > lo {
		v.off += int64(lo) * v.stride[a]
	}
	v.shape[a] = hi - lo
	return v
}

// Reshape gives the elements of a dense view another shape of the same size.
func (v View) Reshape(shape [4]int) View {
	n := shape[0] * shape[1] * shape[2] * shape[3]
	if n != v.Size() || !v.IsDense() {
		panic(fmt.Sprintf("tensor: reshape of %v (dense: %t) to %v", v, v.IsDense(), shape))
	}
	v.shape, v.stride = shape, denseStrides(shape)
	return v
}

func (v View) String() string {
	dev := "nil"
	if v.mem != nil {
		dev = v.mem.Device().String()
	}
	return fmt.Sprintf("%s%v on %s, strides %v", v.dtype, v.shape, dev, v.stride)
}

// Gather returns a new dense host view of positions of v: its row i is position rows[i] on the Seq axis of v. v is a
// host view with any strides.
func Gather(v View, rows []int) View {
	out := New(v.dtype, v.shape[Batch], len(rows), v.shape[Heads], v.shape[Dim])
	for i, row := range rows {
		Copy(out.Slice(Seq, i, i+1), v.Slice(Seq, row, row+1))
	}
	return out
}

// Scatter reverses Gather: it copies row i of src to position rows[i] on the Seq axis of dst. Other positions of dst
// stay. Both are host views of one element type.
func Scatter(dst, src View, rows []int) {
	for i, row := range rows {
		Copy(dst.Slice(Seq, row, row+1), src.Slice(Seq, i, i+1))
	}
}
