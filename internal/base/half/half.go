// Package half converts the floats BF16 and F16, of 16 bits, and E4M3, of 8, to and from float32:
//
//	b := half.ToBF16(x)
//	x = half.FromBF16(b)
//
// float32 represents every value of these types exactly. A NaN stays NaN, with its sign and the upper bits of its
// payload.
package half

import "math"

// FromBF16 returns the value of a bfloat16, the upper half of a float32.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// ToBF16 returns the bfloat16 nearest to x, ties to even.
func ToBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if x != x {
		// The quiet bit keeps it a NaN, even if the payload is only in the lower half.
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromF16 returns the value of an IEEE 754 binary16: 1 sign, 5 exponent and 10 fraction bits.
func FromF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0: // zero or subnormal: frac * 2^-24
		x := float32(frac) * 0x1p-24
		return math.Float32frombits(math.Float32bits(x) | sign)
	case 31: // infinity or NaN
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// ToF16 returns the binary16 nearest to x, ties to even. Values from 65520 become infinite.
func ToF16(x float32) uint16 {
	b := math.Float32bits(x)
	sign, abs := uint16(b>>16&0x8000), b&0x7fffffff
	switch {
	case abs > 0x7f800000: // NaN
		return sign | 0x7e00 | uint16(abs>>13&0x3ff)
	case abs >= 0x477ff000: // 65520
		return sign | 0x7c00
	case abs < 0x38800000: // below 2^-14: subnormal, a multiple of 2^-24
		// The unit in the last place of 0.5 is 2^-24, so the addition rounds to it.
		f := math.Float32frombits(abs) + 0.5
		return sign | uint16(math.Float32bits(f)-0x3f000000)
	}
	abs -= (127 - 15) << 23
	return sign | uint16((abs+0xfff+abs>>13&1)>>13)
}

// RoundToF16 rounds a float64 to the nearest binary16, ties to even, with a single rounding.
func RoundToF16(x float64) uint16 {
	y := float32(x)
	if float64(y) == x || x != x {
		return ToF16(y)
	}
	// Round to odd: of the two float32 around x, take the one with an odd last bit. It is no tie of binary16, and is on
	// the same side of each tie as x, since float32 has enough extra bits.
	b := math.Float32bits(y)
	if math.Abs(float64(y)) > math.Abs(x) {
		b-- // towards zero
	}
	return ToF16(math.Float32frombits(b | 1))
}
