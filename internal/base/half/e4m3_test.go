package half

import (
	"math"
	"testing"
)

// e4m3 returns the value of an encoding by the definition.
func e4m3(b uint8) float64 {
	exponent, fraction := int(b>>3&15), float64(b&7)
	x := math.Ldexp(1+fraction/8, exponent-7)
	if exponent == 0 {
		x = math.Ldexp(fraction, -9)
	}
	return math.Copysign(x, float64(0x7f-int(b)))
}

func TestEveryE4M3(t *testing.T) {
	for i := range 1 << 8 {
		b := uint8(i)
		x := FromE4M3(b)
		if b&0x7f == 0x7f {
			if back := ToE4M3(x); x == x || back != b {
				t.Errorf("NaN %#02x is %v, and that %#02x", b, x, back)
			}
			continue
		}
		if want := e4m3(b); float64(x) != want || math.Signbit(float64(x)) != math.Signbit(want) || ToE4M3(x) != b {
			t.Errorf("%#02x is %v, want %v; that is %#02x", b, x, want, ToE4M3(x))
		}
	}
}

// TestE4M3Ties checks each midpoint of neighbours, and the float32 on both sides of it.
func TestE4M3Ties(t *testing.T) {
	for low := uint8(0); low < 0x7e; low++ {
		tie := float32((e4m3(low) + e4m3(low+1)) / 2)
		for x, want := range map[float32]uint8{
			math.Nextafter32(tie, 0): low, tie: low + low&1, math.Nextafter32(tie, 1000): low + 1,
		} {
			if got, minus := ToE4M3(x), ToE4M3(-x); got != want || minus != want|0x80 {
				t.Errorf("%v is %#02x and its negative %#02x, want %#02x", x, got, minus, want)
			}
		}
	}
	for _, x := range []float32{449, 464, 480, 1e30, float32(math.Inf(1))} {
		if got, minus := ToE4M3(x), ToE4M3(-x); got != 0x7e || minus != 0xfe {
			t.Errorf("%v is %#02x and its negative %#02x, want 448 and -448", x, got, minus)
		}
	}
}
