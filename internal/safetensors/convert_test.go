package safetensors

import (
	"math"
	"testing"
)

// The 65536 values of a half precision type, and the float32 between each two neighbours.
func TestHalfPrecisionIsExactAndRoundsToEven(t *testing.T) {
	for _, tc := range []struct {
		name     string
		to       func(float32) uint16
		from     func(uint16) float32
		inf      uint16
		overflow float64 // where rounding to nearest gives infinity
	}{
		{"bf16", F32ToBF16, BF16ToF32, 0x7f80, 0x1.ffp127},
		{"f16", F32ToF16, F16ToF32, 0x7c00, 65520},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for b := range 1 << 16 {
				h := uint16(b)
				x := tc.from(h)
				got := tc.to(x)
				if h&0x7fff > tc.inf {
					if x == x || got&0x7fff <= tc.inf || got&0x8000 != h&0x8000 {
						t.Fatalf("NaN %#04x became %v and %#04x", h, x, got)
					}
					continue
				}
				if x != x || got != h {
					t.Fatalf("%#04x became %v and %#04x", h, x, got)
				}
				if h&0x7fff >= tc.inf {
					continue
				}
				next := float64(tc.from(h + 1))
				if h&0x7fff == tc.inf-1 {
					next = math.Copysign(2*tc.overflow-math.Abs(float64(x)), float64(x))
				}
				half := (float64(x) + next) / 2 // exact in float32: one bit more than x
				mid := float32(half)
				even := h + h&1
				if float64(mid) != half {
					t.Fatalf("%#04x: midpoint %v is not a float32", h, half)
				}
				below, above := math.Nextafter32(mid, x), math.Nextafter32(mid, float32(math.Inf(int(math.Copysign(1, half)))))
				if got := tc.to(mid); got != even {
					t.Fatalf("midpoint %v above %#04x became %#04x, not %#04x", mid, h, got, even)
				}
				if got := tc.to(below); got != h {
					t.Fatalf("%v became %#04x, not %#04x", below, got, h)
				}
				if got := tc.to(above); got != h+1 {
					t.Fatalf("%v became %#04x, not %#04x", above, got, h+1)
				}
			}
		})
	}
}

func TestNaNWithLowPayloadStaysNaN(t *testing.T) {
	for _, b := range []uint32{0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff} {
		x := math.Float32frombits(b)
		if y := BF16ToF32(F32ToBF16(x)); y == y {
			t.Errorf("%#x became %v in bf16", b, y)
		}
		if y := F16ToF32(F32ToF16(x)); y == y {
			t.Errorf("%#x became %v in f16", b, y)
		}
	}
}

// The values are those of the tables in arXiv:2209.05433.
func TestFloat8(t *testing.T) {
	for _, tc := range []struct {
		name string
		got  float32
		want float64
	}{
		{"e4m3 max", F8E4M3ToF32(0x7e), 448},
		{"e4m3 min normal", F8E4M3ToF32(0x08), 0x1p-6},
		{"e4m3 min subnormal", F8E4M3ToF32(0x01), 0x1p-9},
		{"e4m3 max subnormal", F8E4M3ToF32(0x07), 0x1.cp-7},
		{"e4m3 negative", F8E4M3ToF32(0xb8), -1},
		{"e5m2 max", F8E5M2ToF32(0x7b), 57344},
		{"e5m2 min subnormal", F8E5M2ToF32(0x01), 0x1p-16},
		{"e5m2 infinity", F8E5M2ToF32(0xfc), math.Inf(-1)},
	} {
		if float64(tc.got) != tc.want {
			t.Errorf("%s is %v, not %v", tc.name, tc.got, tc.want)
		}
	}
	for _, x := range []float32{F8E4M3ToF32(0x7f), F8E4M3ToF32(0xff), F8E5M2ToF32(0x7d), F8E5M2ToF32(0xff)} {
		if x == x {
			t.Errorf("%v is not NaN", x)
		}
	}
}
