package half

import (
	"math"
	"math/rand/v2"
	"sort"
	"testing"
)

// A format is a 16-bit float by its definition: a sign, exponent bits, and fraction bits.
type format struct {
	name     string
	fraction int
	bias     int
	from     func(uint16) float32
	to       func(float32) uint16
}

var formats = []format{
	{"bfloat16", 7, 127, FromBF16, ToBF16},
	{"float16", 10, 15, FromF16, ToF16},
}

// infinity returns the encoding of infinity. Larger encodings without the sign are NaN.
func (f format) infinity() uint16 { return 1<<15 - 1<<f.fraction }

// value returns the value of an encoding by the definition. The encoding of infinity counts as the next finite number,
// since rounding to infinity begins half way to it.
func (f format) value(b uint16) float64 {
	exponent, fraction := int(b&0x7fff)>>f.fraction, float64(int(b)&(1<<f.fraction-1))
	x := math.Ldexp(fraction, 1-f.bias-f.fraction)
	if exponent > 0 {
		x = math.Ldexp(1+math.Ldexp(fraction, -f.fraction), exponent-f.bias)
	}
	if b&0x8000 != 0 {
		return -x
	}
	return x
}

// nearest returns the encoding of the number nearest to x, by comparing all; of two equally near ones, the even one.
func (f format) nearest(x float64) uint16 {
	sign := uint16(math.Float64bits(x) >> 48 & 0x8000)
	x = math.Abs(x)
	n := int(f.infinity())
	above := uint16(min(sort.Search(n, func(b int) bool { return f.value(uint16(b)) >= x }), n))
	if above == 0 {
		return sign
	}
	low, high := x-f.value(above-1), f.value(above)-x
	if low < high || low == high && above&1 == 1 {
		above--
	}
	return sign | above
}

// TestEveryHalf converts all values of both types to float32 and back.
func TestEveryHalf(t *testing.T) {
	for _, f := range formats {
		for i := range 1 << 16 {
			b := uint16(i)
			x := f.from(b)
			switch abs := b & 0x7fff; {
			case abs > f.infinity():
				back := f.to(x)
				if x == x || back&0x7fff <= f.infinity() || back&0x8000 != b&0x8000 {
					t.Fatalf("%s: NaN %#04x is %v, and that %#04x", f.name, b, x, back)
				}
				continue
			case abs == f.infinity():
				if !math.IsInf(float64(x), 1-2*int(b>>15)) {
					t.Fatalf("%s: %#04x is %v", f.name, b, x)
				}
			case float64(x) != f.value(b) || math.Signbit(float64(x)) != (b>>15 == 1):
				t.Fatalf("%s: %#04x is %v, want %v", f.name, b, x, f.value(b))
			}
			if got := f.to(x); got != b {
				t.Fatalf("%s: %#04x is %v, and that %#04x", f.name, b, x, got)
			}
		}
	}
}

// TestRoundingToHalf rounds the midpoints of all adjacent values, numbers next to these, and random numbers of all
// sizes.
func TestRoundingToHalf(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, f := range formats {
		check := func(x float32) {
			t.Helper()
			if got, want := f.to(x), f.nearest(float64(x)); x == x && got != want {
				t.Fatalf("%s: %v became %#04x, want %#04x", f.name, x, got, want)
			}
			if f.name == "float16" {
				checkOnce(t, f, float64(x))
			}
		}
		for i := range 1 << 16 {
			b := uint16(i)
			if b&0x7fff < f.infinity() {
				middle := float32((f.value(b) + f.value(b+1)) / 2) // exact: it has one bit more than a value
				check(middle)
				check(math.Nextafter32(middle, 0))
				check(math.Nextafter32(middle, float32(math.Inf(1-2*int(b>>15)))))
			}
			check(math.Float32frombits(rng.Uint32()))
		}
	}
}

// checkOnce rounds x and its neighbours in float64, which are nearer to a tie than any float32.
func checkOnce(t *testing.T, f format, x float64) {
	t.Helper()
	for _, y := range []float64{x, math.Nextafter(x, 0), math.Nextafter(x, 2*x)} {
		if got, want := RoundToF16(y), f.nearest(y); y == y && got != want {
			t.Fatalf("%s: %v became %#04x, want %#04x", f.name, y, got, want)
		}
	}
}

func TestHalfOfExtremes(t *testing.T) {
	for x, want := range map[float64]uint16{
		math.Inf(1): 0x7c00, math.Inf(-1): 0xfc00, math.MaxFloat64: 0x7c00, -math.MaxFloat64: 0xfc00,
		math.SmallestNonzeroFloat64: 0, -math.SmallestNonzeroFloat64: 0x8000, 65520: 0x7c00, 65519.99999999999: 0x7bff,
	} {
		if got := RoundToF16(x); got != want {
			t.Errorf("%v became %#04x, want %#04x", x, got, want)
		}
	}
	for _, bits := range []uint32{0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff} {
		x := math.Float32frombits(bits)
		for _, f := range formats {
			if y := f.from(f.to(x)); y == y {
				t.Errorf("%s: NaN %#x became %v", f.name, bits, y)
			}
		}
	}
	if y := FromF16(RoundToF16(math.NaN())); y == y {
		t.Errorf("NaN became %v", y)
	}
}
