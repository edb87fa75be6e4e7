package safetensors

import (
	"math"
	"testing"
)

// The values are from the tables in arXiv:2209.05433.
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
