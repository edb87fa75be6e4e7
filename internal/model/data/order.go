package data

import "math/bits"

// An order is a permutation of 0 to n-1 that needs no memory: a Feistel network over the
// smallest even number of bits that holds n, walked until it lands below n (Black and
// Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). A shuffled list of a
// corpus's samples would be held by every rank; and this one is the same in every version of
// Go, so that a run resumed after an upgrade reads on where it stopped.
type order struct {
	n    uint64
	half uint // bits of each side
	keys [feistelRounds]uint64
}

const feistelRounds = 8

func newOrder(n, seed, epoch int64) order {
	half := max(1, uint(bits.Len64(uint64(n-1))+1)/2)
	o := order{n: uint64(n), half: half}
	state := mix(uint64(seed)) ^ mix(uint64(epoch)+0x632be59bd9b4e019)
	for i := range o.keys {
		state += 0x9e3779b97f4a7c15
		o.keys[i] = mix(state)
	}
	return o
}

// at returns the i-th of the permutation.
func (o order) at(i int64) int64 {
	mask := uint64(1)<<o.half - 1
	x := uint64(i)
	for {
		l, r := x>>o.half, x&mask
		for _, k := range o.keys {
			l, r = r, l^mix(r^k)&mask
		}
		if x = l<<o.half | r; x < o.n {
			return int64(x)
		}
	}
}

// mix returns the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
