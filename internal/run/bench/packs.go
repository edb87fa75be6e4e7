package bench

import (
	"fmt"
	"math/bits"
)

// magiBins are the document lengths of MagiAttention's benchmark of packed documents
// (SandAI-org/MagiAttention, exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv, at
// 2c64135): how many documents are as long as the middle of each bin.
var magiBins = []struct{ from, to, documents int }{
	{0, 10, 30254}, {11, 50, 391188}, {51, 100, 699596}, {101, 200, 1377757}, {201, 500, 3794735}, {501, 1024, 3316785},
	{1025, 2048, 2106566}, {2049, 4096, 988525}, {4097, 8192, 410002}, {8193, 16384, 173574}, {16385, 32768, 115007},
	{32769, 65536, 18428}, {65537, 131072, 22513}, {131073, 196608, 18284},
}

// magiSeed is the benchmark's.
const magiSeed = 42

// MagiPacks returns the first packs of MagiAttention's benchmark of packed documents, as lists of lengths that sum to
// tokens each: documents longer than a quarter of a pack are cut, all are shuffled and fill packs in turn, a document
// that does not fit continues in the next pack, and the packs are shuffled. It draws the numbers of
// numpy.random.default_rng(42), so the packs are the same. tokens is a multiple of 4.
func MagiPacks(tokens, packs int) ([][]int, error) {
	piece := tokens / 4
	if tokens < 4 || tokens%4 != 0 {
		return nil, fmt.Errorf("packs of %d tokens: want a multiple of 4", tokens)
	}
	lengths, total := magiLengths(piece)
	rng := newPCG(magiSeed)
	shuffle(rng, lengths)
	order := make([]int32, total/int64(tokens))
	for i := range order {
		order[i] = int32(i)
	}
	shuffle(rng, order)
	order = order[:min(packs, len(order))]
	place := make(map[int32]int, len(order))
	for i, pack := range order {
		place[pack] = i
	}
	out := make([][]int, len(order))
	cutPacks(lengths, tokens, func(pack int32, length int) {
		if i, ok := place[pack]; ok {
			out[i] = append(out[i], length)
		}
	})
	return out, nil
}

// magiLengths lists the lengths before they are shuffled: the pieces, then the tails of each bin.
func magiLengths(piece int) (lengths []int32, total int64) {
	pieces, all := 0, 0
	for _, b := range magiBins {
		middle := (b.from + b.to) / 2
		pieces += middle / piece * b.documents
		all += (middle/piece + 1) * b.documents
		total += int64(middle) * int64(b.documents)
	}
	lengths = make([]int32, 0, all)
	add := func(length, n int) {
		for range n {
			lengths = append(lengths, int32(length))
		}
	}
	add(piece, pieces)
	for _, b := range magiBins {
		if tail := (b.from + b.to) / 2 % piece; tail > 0 {
			add(tail, b.documents)
		}
	}
	return lengths, total
}

// cutPacks calls see for the documents of each pack in order.
func cutPacks(lengths []int32, tokens int, see func(pack int32, length int)) {
	pack, left := int32(0), tokens
	for _, n := range lengths {
		for length := int(n); length > 0; {
			part := min(length, left)
			see(pack, part)
			if length, left = length-part, left-part; left == 0 {
				pack, left = pack+1, tokens
			}
		}
	}
}

// shuffle implements numpy.random.Generator.shuffle.
func shuffle(rng *pcg, list []int32) {
	for i := len(list) - 1; i > 0; i-- {
		j := rng.upTo(uint32(i))
		list[i], list[j] = list[j], list[i]
	}
}

// A pcg is numpy's PCG64: O'Neill, PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for
// Random Number Generation, 2014, XSL-RR of 128 bits.
type pcg struct {
	hi, lo       uint64
	incHi, incLo uint64
	half         uint32 // of the last 64 bits, if kept
	kept         bool
}

// newPCG returns numpy's default_rng(seed).
func newPCG(seed uint32) *pcg {
	w := seedWords(seed)
	p := &pcg{incHi: w[2]<<1 | w[3]>>63, incLo: w[3]<<1 | 1}
	p.step()
	carry := uint64(0)
	p.lo, carry = bits.Add64(p.lo, w[1], 0)
	p.hi, _ = bits.Add64(p.hi, w[0], carry)
	p.step()
	return p
}

func (p *pcg) step() {
	const mulHi, mulLo = 2549297995355413924, 4865540595714422341
	hi, lo := bits.Mul64(p.lo, mulLo)
	hi += p.hi*mulLo + p.lo*mulHi
	var carry uint64
	p.lo, carry = bits.Add64(lo, p.incLo, 0)
	p.hi, _ = bits.Add64(hi, p.incHi, carry)
}

func (p *pcg) next() uint64 {
	p.step()
	return bits.RotateLeft64(p.hi^p.lo, -int(p.hi>>58))
}

// next32 uses both halves of 64 bits, the low one first.
func (p *pcg) next32() uint32 {
	if p.kept {
		p.kept = false
		return p.half
	}
	x := p.next()
	p.half, p.kept = uint32(x>>32), true
	return uint32(x)
}

// upTo returns a number from 0 to most: it draws as many bits as most has until they are not above it.
func (p *pcg) upTo(most uint32) uint32 {
	mask := uint32(1)<<bits.Len32(most) - 1
	for {
		if x := p.next32() & mask; x <= most {
			return x
		}
	}
}

// seedWords returns numpy's SeedSequence(seed).generate_state(4, uint64) (O'Neill, developing a seed_seq alternative,
// 2015).
func seedWords(seed uint32) (out [4]uint64) {
	const initA, multA, initB, multB = 0x43b0d7e5, 0x931e8875, 0x8b51f9dd, 0x58f38ded
	const mixL, mixR = 0xca01f9dd, 0x4973f715
	a := uint32(initA)
	hash := func(x uint32) uint32 {
		x ^= a
		a *= multA
		x *= a
		return x ^ x>>16
	}
	pool := [4]uint32{hash(seed), hash(0), hash(0), hash(0)}
	for i := range pool {
		for j := range pool {
			if i != j {
				x := pool[j]*mixL - hash(pool[i])*mixR
				pool[j] = x ^ x>>16
			}
		}
	}
	b := uint32(initB)
	for i := range 8 {
		x := pool[i%4] ^ b
		b *= multB
		x *= b
		out[i/2] |= uint64(x^x>>16) << (32 * (i % 2))
	}
	return out
}
