package half

import "math"

// FromE4M3 returns the value of an E4M3 (arXiv:2209.05433): 1 sign, 4 exponent and 3 fraction bits, without infinities.
func FromE4M3(b uint8) float32 {
	sign, abs := uint32(b&0x80)<<24, uint32(b&0x7f)
	switch {
	case abs == 0x7f:
		return math.Float32frombits(sign | 0x7fc00000)
	case abs < 8: // zero or subnormal, a multiple of 2^-9
		return math.Float32frombits(math.Float32bits(float32(abs)*0x1p-9) | sign)
	}
	return math.Float32frombits(sign | (abs<<20 + (127-7)<<23))
}

// ToE4M3 returns the E4M3 nearest to x, ties to even. Values beyond 448 become 448, as do infinities.
func ToE4M3(x float32) uint8 {
	b := math.Float32bits(x)
	sign, abs := uint8(b>>24&0x80), b&0x7fffffff
	switch {
	case abs > 0x7f800000: // NaN
		return sign | 0x7f
	case abs < 0x3c800000: // below 2^-6: a multiple of 2^-9, the unit in the last place of 2^14
		return sign | uint8(math.Float32bits(math.Float32frombits(abs)+0x1p14)-0x46800000)
	}
	abs -= (127 - 7) << 23
	return sign | uint8(min((abs+0x7ffff+abs>>20&1)>>20, 0x7e))
}
