// Package splitmix derives numbers that look random from a few integers, as the generator SplitMix64 does (Steele, Lea
// and Flood, OOPSLA 2014).
package splitmix

// Step returns the distance of the n-th number of the generator's sequence from its seed. The factor is the odd number
// next to 2^64 over the golden ratio: its multiples are far apart, and the first 2^64 of them differ.
func Step(n uint64) uint64 { return 0x9e3779b97f4a7c15 * n }

// Mix spreads each bit of a number over all bits. Equal results have equal numbers.
func Mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
