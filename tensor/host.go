package tensor

import (
	"fmt"
	"unsafe"
)

// Host is memory of this process. It is aligned for every element type.
type Host struct{ words []uint64 }

// HostAt returns memory of this process with another owner, such as pinned memory of a GPU's driver. p is aligned to
// eight bytes, bytes a multiple of eight.
func HostAt(p unsafe.Pointer, bytes int64) *Host {
	return &Host{words: unsafe.Slice((*uint64)(p), bytes/8)}
}

// NewHost allocates bytes of zeroed host memory.
func NewHost(bytes int64) *Host { return &Host{words: make([]uint64, (bytes+7)/8)} }

// Device returns the host.
func (h *Host) Device() Device { return Device{} }

// Bytes returns the length, rounded up to a multiple of eight.
func (h *Host) Bytes() int64 { return int64(len(h.words)) * 8 }

// Ptr returns the address of the first byte.
func (h *Host) Ptr() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(h.words)) }

// New allocates a dense host view of zeros.
func New(dtype DType, shape ...int) View {
	s := pad(shape)
	n := int64(s[0]) * int64(s[1]) * int64(s[2]) * int64(s[3])
	return Dense(NewHost(n*int64(dtype.Size())), dtype, 0, s)
}

func pad(shape []int) [4]int {
	s := [4]int{1, 1, 1, 1}
	if len(shape) > 4 {
		panic(fmt.Sprintf("tensor: %d axes", len(shape)))
	}
	copy(s[4-len(shape):], shape)
	return s
}

// FromSlice copies xs into a new dense host view.
func FromSlice[T Element](xs []T, shape ...int) View {
	v := New(typeOf[T](), shape...)
	if v.Size() != len(xs) {
		panic(fmt.Sprintf("tensor: %d elements for shape %v", len(xs), shape))
	}
	copy(Data[T](v), xs)
	return v
}

// Data returns the memory of a host view, starting at its first element: element [b, s, h, d] has index b*Stride(Batch)
// + s*Stride(Seq) + h*Stride(Heads) + d*Stride(Dim). The slice shares the view's memory. For a dense view its length is
// exactly Size; strides must not be negative.
func Data[T Element](v View) []T {
	h, ok := v.mem.(*Host)
	if !ok {
		panic(fmt.Sprintf("tensor: %v is not host memory", v))
	}
	var zero T
	if int(unsafe.Sizeof(zero)) != v.dtype.Size() {
		panic(fmt.Sprintf("tensor: %v read as %T", v, zero))
	}
	if v.Size() == 0 {
		return nil
	}
	n := int64(1)
	for a := range v.shape {
		if v.stride[a] < 0 {
			panic(fmt.Sprintf("tensor: negative stride in %v", v))
		}
		n += int64(v.shape[a]-1) * v.stride[a]
	}
	all := unsafe.Slice((*T)(h.Ptr()), h.Bytes()/int64(unsafe.Sizeof(zero)))
	return all[v.off : v.off+n : v.off+n]
}

// Bytes returns the memory of a dense host view as bytes, for transports. It shares memory.
func Bytes(v View) []byte {
	h, ok := v.mem.(*Host)
	if !ok || !v.IsDense() {
		panic(fmt.Sprintf("tensor: bytes of %v", v))
	}
	size := int64(v.dtype.Size())
	all := unsafe.Slice((*byte)(h.Ptr()), h.Bytes())
	lo, hi := v.off*size, (v.off+int64(v.Size()))*size
	return all[lo:hi:hi]
}

// Copy copies src to dst element by element; both are host views of one shape and
// element type, strided in any way.
func Copy(dst, src View) {
	if dst.shape != src.shape || dst.dtype != src.dtype {
		panic(fmt.Sprintf("tensor: copy %v to %v", src, dst))
	}
	switch dst.dtype.Size() {
	case 8:
		copyStrided[int64](dst, src)
	case 4:
		copyStrided[int32](dst, src)
	case 2:
		copyStrided[uint16](dst, src)
	case 1:
		copyStrided[uint8](dst, src)
	}
}

func copyStrided[T Element](dst, src View) {
	if dst.Size() == 0 {
		return
	}
	d, s := Data[T](dst), Data[T](src)
	n, ds, ss := dst.shape[Dim], dst.stride[Dim], src.stride[Dim]
	for b := range dst.shape[Batch] {
		for t := range dst.shape[Seq] {
			for h := range dst.shape[Heads] {
				do := int64(b)*dst.stride[0] + int64(t)*dst.stride[1] + int64(h)*dst.stride[2]
				so := int64(b)*src.stride[0] + int64(t)*src.stride[1] + int64(h)*src.stride[2]
				if ds == 1 && ss == 1 {
					copy(d[do:do+int64(n)], s[so:so+int64(n)])
					continue
				}
				for i := range int64(n) {
					d[do+i*ds] = s[so+i*ss]
				}
			}
		}
	}
}
