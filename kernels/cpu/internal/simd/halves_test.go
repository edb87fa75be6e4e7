package simd

import (
	"math"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
)

// TestHalves compares conversions with package half: every 16-bit number to float32 and back, and float32 of all kinds
// to 16 bits, both in full vectors and in the remainder.
func TestHalves(t *testing.T) {
	const all = 1 << 16
	kinds := []struct {
		name string
		to   func(l Level, dst []uint16, src []float32)
		from func(l Level, dst []float32, src []uint16)
		to1  func(x float32) uint16
	}{
		{"bfloat16", Level.ToBF16, Level.FromBF16, half.ToBF16},
		{"float16", Level.ToF16, Level.FromF16, half.ToF16},
	}
	each(t, func(t *testing.T, loops Loops[float32]) {
		l := loops.level
		for _, k := range kinds {
			bits, wide, back := make([]uint16, all), make([]float32, all), make([]uint16, all)
			for i := range bits {
				bits[i] = uint16(i)
			}
			for _, n := range []int{0, 1, 15, 16, 17, 100, all - 1, all} {
				k.from(l, wide[:n], bits[:n])
				k.to(l, back[:n], wide[:n])
				for i, b := range back[:n] {
					if b != bits[i] && wide[i] == wide[i] || b != k.to1(wide[i]) {
						t.Fatalf("%s %#04x is %g, which came back as %#04x", k.name, i, wide[i], b)
					}
				}
			}
			for high := range all {
				for i := range 19 { // bits around the rounded ones
					wide[i] = math.Float32frombits(uint32(high<<16 + i<<12 + i*i*7))
				}
				k.to(l, back[:19], wide[:19])
				for i, b := range back[:19] {
					if want := k.to1(wide[i]); b != want {
						t.Fatalf("%s of %x is %#04x, want %#04x", k.name, math.Float32bits(wide[i]), b, want)
					}
				}
			}
		}
	})
}

// TestFromHalves checks the values of some 16-bit numbers.
func TestFromHalves(t *testing.T) {
	each(t, func(t *testing.T, loops Loops[float32]) {
		l := loops.level
		var bits [21]uint16
		var x [21]float32
		for high := 0; high < 1<<16; high += len(bits) {
			for i := range bits {
				bits[i] = uint16(high + i)
			}
			l.FromBF16(x[:], bits[:])
			for i, got := range x {
				if math.Float32bits(got) != uint32(bits[i])<<16 {
					t.Fatalf("bfloat16 %#04x is %g", bits[i], got)
				}
			}
			l.FromF16(x[:], bits[:])
			for i, got := range x {
				if want := half.FromF16(bits[i]); got != want && want == want {
					t.Fatalf("float16 %#04x is %g, want %g", bits[i], got, want)
				}
			}
		}
	})
}
