package partition

import (
	"math"
	"math/bits"
)

// A count is a number of pairs in 128 bits: the square of a long sequence does not fit 64.
type count struct{ hi, lo uint64 }

func product(a, b int) count {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return count{hi, lo}
}

func (a count) plus(b count) count {
	lo, carry := bits.Add64(a.lo, b.lo, 0)
	hi, _ := bits.Add64(a.hi, b.hi, carry)
	return count{hi, lo}
}

func (a count) minus(b count) count {
	lo, borrow := bits.Sub64(a.lo, b.lo, 0)
	hi, _ := bits.Sub64(a.hi, b.hi, borrow)
	return count{hi, lo}
}

func (a count) half() count { return count{a.hi >> 1, a.lo>>1 | a.hi<<63} }

// int returns the count, at most the largest integer.
func (a count) int() int {
	if a.hi > 0 || a.lo > math.MaxInt {
		return math.MaxInt
	}
	return int(a.lo)
}

func (a count) float() float64 { return float64(a.hi)*(1<<64) + float64(a.lo) }

// A strip is m queries from first, stride positions apart, against the keys [0, n), to count the visible pairs of a
// band.
type strip struct{ first, stride, m, n int }

func (s strip) pairs(b Band) count {
	if b.Lo > b.Hi {
		return count{}
	}
	return s.below(b.Hi).minus(s.below(b.Lo - 1))
}

// below counts the pairs with j-i <= d. Query i has clamp(first+i*stride+d+1, 0, n) of them, which
// rises: a run of zeros, a ramp, and a run of full rows.
func (s strip) below(d int) count {
	first := s.first + d + 1 // of row 0, unclamped
	zeros := min(max(floorDiv(-first, s.stride)+1, 0), s.m)
	full := min(max(s.m-ceilDiv(s.n-first, s.stride), 0), s.m)
	ramp := max(s.m-zeros-full, 0)
	if ramp == 0 {
		return product(full, s.n)
	}
	lowest := first + zeros*s.stride
	return product(ramp, 2*lowest+(ramp-1)*s.stride).half().plus(product(full, s.n))
}
