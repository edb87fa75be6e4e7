package kernels

import (
	"math"

	"github.com/cprun/cprun/internal/tensor"
)

// Copy copies src to dst, of one shape, converting between float types: rounded to the
// nearest, ties to even, float64 to a 16-bit type by way of float32. Views may be strided.
func (c *CPU) Copy(dst, src View) {
	must(sameShape(dst, src), "copy", dst, src)
	if dst.DType() == src.DType() {
		if err := onHost("copy", dst, src); err != nil {
			panic(err)
		}
		c.queue("copy", func() {
			c.each(dst.Rows(), func(r int) { tensor.Copy(rowOf(dst, r), rowOf(src, r)) })
		})
		return
	}
	load, store := loader(src), storer(dst)
	must(load != nil && store != nil, "copy", dst, src)
	heads, dim := dst.Len(tensor.Heads), dst.Len(tensor.Dim)
	seq, dn, sn := dst.Len(tensor.Seq), dst.Stride(tensor.Dim), src.Stride(tensor.Dim)
	c.queue("copy", func() {
		c.each(dst.Rows(), func(r int) {
			for h := range heads {
				do, so := at(dst, r/seq, r%seq, h), at(src, r/seq, r%seq, h)
				for i := range int64(dim) {
					store(do+i*dn, load(so+i*sn))
				}
			}
		})
	})
}

// rowOf is row r of batch and seq together.
func rowOf(v View, r int) View {
	b, s := r/v.Len(tensor.Seq), r%v.Len(tensor.Seq)
	return v.Slice(tensor.Batch, b, b+1).Slice(tensor.Seq, s, s+1)
}

// loader reads elements of v as float64, which holds every other float exactly; nil where
// v is not of a float type.
func loader(v View) func(i int64) float64 {
	switch v.DType() {
	case tensor.F64:
		xs := tensor.Data[float64](v)
		return func(i int64) float64 { return xs[i] }
	case tensor.F32:
		xs := tensor.Data[float32](v)
		return func(i int64) float64 { return float64(xs[i]) }
	case tensor.BF16:
		xs := tensor.Data[uint16](v)
		return func(i int64) float64 { return float64(math.Float32frombits(uint32(xs[i]) << 16)) }
	case tensor.F16:
		xs := tensor.Data[uint16](v)
		return func(i int64) float64 { return fromHalf(xs[i]) }
	}
	return nil
}

// storer writes elements of v; nil where v is not of a float type.
func storer(v View) func(i int64, x float64) {
	switch v.DType() {
	case tensor.F64:
		xs := tensor.Data[float64](v)
		return func(i int64, x float64) { xs[i] = x }
	case tensor.F32:
		xs := tensor.Data[float32](v)
		return func(i int64, x float64) { xs[i] = float32(x) }
	case tensor.BF16:
		xs := tensor.Data[uint16](v)
		return func(i int64, x float64) { xs[i] = toBFloat(float32(x)) }
	case tensor.F16:
		xs := tensor.Data[uint16](v)
		return func(i int64, x float64) { xs[i] = toHalf(float32(x)) }
	}
	return nil
}

// toBFloat rounds to bfloat16, the upper half of a float32.
func toBFloat(x float32) uint16 {
	bits := math.Float32bits(x)
	if x != x {
		return uint16(bits>>16) | 0x40 // stays a NaN when the lower half is cut off
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// toHalf rounds to IEEE 754 binary16; what is 65520 or more becomes infinite.
func toHalf(x float32) uint16 {
	bits := math.Float32bits(x)
	sign := uint16(bits >> 16 & 0x8000)
	abs := math.Abs(float64(x))
	switch {
	case x != x:
		return sign | 0x7e00
	case abs >= 65520:
		return sign | 0x7c00
	case abs < 0x1p-14: // subnormal: a multiple of 2^-24; rounding up to 2^-14 carries over
		return sign | uint16(math.RoundToEven(abs*0x1p24))
	}
	// The exponent moves from bias 127 to 15, and 13 bits of the fraction are rounded off.
	b := bits&0x7fffffff - 112<<23
	return sign | uint16((b+0xfff+b>>13&1)>>13)
}

func fromHalf(h uint16) float64 {
	exp, frac := int(h>>10&0x1f), float64(h&0x3ff)
	var x float64
	switch {
	case exp == 0:
		x = frac * 0x1p-24
	case exp == 0x1f && frac == 0:
		x = math.Inf(1)
	case exp == 0x1f:
		return math.NaN()
	default:
		x = math.Ldexp(1024+frac, exp-25)
	}
	if h&0x8000 != 0 {
		return -x
	}
	return x
}
