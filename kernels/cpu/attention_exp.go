package cpu

import "math"

// The float32 exponential is exp(x) = 2^n exp(r) with n = round(x / ln 2) and r = x - n ln 2
// in [-ln2/2, ln2/2], and a minimax polynomial for exp(r) (Cephes, expf.c, S. Moshier).
// ln 2 is subtracted in two parts, of which the first has so few bits that n times it is
// exact. It errs by less than 1.5 units in the last place over the whole range.
const (
	log2e = 1.4426950408889634 // 1/ln 2
	ln2Hi = 0.693359375        // 355/512
	ln2Lo = -2.12194440054690583e-4

	expP0 = 1.9875691500e-4
	expP1 = 1.3981999507e-3
	expP2 = 8.3334519073e-3
	expP3 = 4.1665795894e-2
	expP4 = 1.6666665459e-1
	expP5 = 5.0000001201e-1

	expMin  = -87.33654 // below it the result is subnormal and 2^n has no exponent of its own
	expMax  = 88.37626  // above it n would be 128
	expZero = -103.98   // below it the result rounds to 0; -Inf too

	roundBias = 3 << 22 // added to a small float32 and taken away again, it rounds to an integer
)

// exp32 is e to the x, with the special cases of math.Exp.
func exp32(x float32) float32 {
	if !(x >= expMin && x <= expMax) {
		return expEdge(x)
	}
	return expFast(x)
}

// expFast is exp32 for arguments in [expMin, expMax]. It is small enough to be inlined.
func expFast(x float32) float32 {
	biased := x*log2e + roundBias
	n := biased - roundBias
	r := x - n*ln2Hi - n*ln2Lo
	y := (((((expP0*r+expP1)*r+expP2)*r+expP3)*r+expP4)*r+expP5)*(r*r) + r + 1
	// The low bits of the biased number are n in two's complement: they go to the exponent.
	return y * math.Float32frombits((math.Float32bits(biased)+127)<<23)
}

// expEdge is exp where the fast way has no exponent bits left, and for NaN and infinities.
func expEdge(x float32) float32 {
	if x < expZero {
		return 0
	}
	return float32(math.Exp(float64(x)))
}

// expRow32 replaces s by exp(s - m) and returns the sum.
func expRow32(s []float32, m float32) float64 {
	var sum, odd float64 // two chains, for speed
	for len(s) >= 2 {
		x, y := s[0]-m, s[1]-m
		if x >= expMin && y >= expMin && x <= expMax && y <= expMax {
			x, y = expFast(x), expFast(y)
		} else {
			x, y = exp32(x), exp32(y)
		}
		s[0], s[1] = x, y
		sum += float64(x)
		odd += float64(y)
		s = s[2:]
	}
	if len(s) == 1 {
		s[0] = exp32(s[0] - m)
		sum += float64(s[0])
	}
	return sum + odd
}

// expRow64 is expRow32 in float64.
func expRow64(s []float64, m float64) float64 {
	sum := 0.0
	for i := range s {
		s[i] = math.Exp(s[i] - m)
		sum += s[i]
	}
	return sum
}
