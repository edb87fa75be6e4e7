package data

import (
	"cmp"
	"math/bits"
	"slices"
)

// packWindow bounds the documents that are packed together.
const packWindow = 64 << 10

// A pack is documents of a dataset in samples, each whole.
type pack struct {
	starts []int64 // of the documents, in tokens
	lens   []int32
	order  []int32 // documents of sample 0, of sample 1, …
	first  []int64 // place of each sample's first document in order; last, the number of documents
}

// newPack distributes documents over samples of at most SeqLen tokens, or one a sample without PackDocuments.
func newPack(starts []int64, lens []int32, p Plan) *pack {
	k := &pack{starts: starts, lens: lens, order: make([]int32, 0, len(lens))}
	n := int64(len(lens))
	shuffled := newPermutation(max(1, n), p.Seed, -1)
	for lo := int64(0); lo < n; lo += packWindow {
		window := make([]int32, min(packWindow, n-lo))
		for i := range window {
			window[i] = int32(lo) + int32(i)
			if p.Shuffle {
				window[i] = int32(shuffled.at(lo + int64(i)))
			}
		}
		for _, docs := range fit(window, lens, p) {
			k.first = append(k.first, int64(len(k.order)))
			k.order = append(k.order, docs...)
		}
	}
	k.first = append(k.first, n)
	return k
}

// of returns the documents of a sample.
func (k *pack) of(sample int64) []int32 { return k.order[k.first[sample]:k.first[sample+1]] }

// fit packs the documents of a window best-fit decreasing: the longest first, each into the sample with the least room
// for it. Documents in a sample, and samples by their first documents, keep the order of the window.
func fit(window, lens []int32, p Plan) (samples [][]int32) {
	if !p.PackDocuments {
		return slices.Collect(slices.Chunk(window, 1))
	}
	places := make([]int, len(window))
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int { return cmp.Compare(lens[window[b]], lens[window[a]]) })
	var bins [][]int // of places in the window
	room := newRoom(p.SeqLen)
	for _, at := range places {
		n := int(lens[window[at]])
		left, bin := room.take(n)
		if bin < 0 {
			left, bin = p.SeqLen, len(bins)
			bins = append(bins, nil)
		}
		bins[bin] = append(bins[bin], at)
		room.put(left-n, bin)
	}
	for _, b := range bins {
		slices.Sort(b)
	}
	slices.SortFunc(bins, func(a, b []int) int { return cmp.Compare(a[0], b[0]) })
	for _, b := range bins {
		docs := make([]int32, len(b))
		for i, at := range b {
			docs[i] = window[at]
		}
		samples = append(samples, docs)
	}
	return samples
}

// A room finds the bin with the least room for a document. A bit of levels[0] marks a room that some bin has left. A
// bit of a higher level marks a word of the level below that has a bit.
type room struct {
	levels [][]uint64
	bins   map[int][]int // by room left
}

func newRoom(most int) *room {
	r := &room{bins: map[int][]int{}}
	for n := most + 1; ; n = (n + 63) / 64 {
		r.levels = append(r.levels, make([]uint64, (n+63)/64))
		if n <= 64 {
			return r
		}
	}
}

func (r *room) put(left, bin int) {
	r.bins[left] = append(r.bins[left], bin)
	for _, words := range r.levels {
		words[left/64] |= 1 << (left % 64)
		left /= 64
	}
}

// take removes a bin with the least room of at least n, the newest of several; -1: there is none.
func (r *room) take(n int) (left, bin int) {
	if left = r.next(n); left < 0 {
		return 0, -1
	}
	list := r.bins[left]
	bin, list = list[len(list)-1], list[:len(list)-1]
	if r.bins[left] = list; len(list) == 0 {
		delete(r.bins, left)
		for at, level := left, 0; level < len(r.levels); at, level = at/64, level+1 {
			if r.levels[level][at/64] &^= 1 << (at % 64); r.levels[level][at/64] != 0 {
				break
			}
		}
	}
	return left, bin
}

// next returns the first set bit from n on; -1: none.
func (r *room) next(n int) int {
	for level := 0; level < len(r.levels); level++ {
		words := r.levels[level]
		if n/64 >= len(words) {
			return -1
		}
		if w := words[n/64] >> (n % 64); w != 0 {
			n += bits.TrailingZeros64(w)
			for ; level > 0; level-- {
				n = 64*n + bits.TrailingZeros64(r.levels[level-1][n])
			}
			return n
		}
		n = n/64 + 1
	}
	return -1
}

// Lengths counts documents by length: entry i, those of more than 2^(i-1) tokens, up to 2^i.
type Lengths [64]int64

func (l *Lengths) add(tokens int64) { l[bits.Len64(uint64(max(1, tokens)-1))]++ }

// Share is the share of documents that fit in samples of a length.
type Share struct {
	SeqLen int     `json:"seq_len"` // of a sample
	Kept   float64 `json:"kept"`    // 0 to 1
}

// Kept returns the share of documents for powers of two, from the largest up to seqLen to the first that keeps all.
func (l *Lengths) Kept(seqLen int) (list []Share) {
	kept, all := int64(0), int64(0)
	for _, n := range l {
		all += n
	}
	for i, n := range l {
		if kept += n; i >= bits.Len(uint(seqLen))-1 {
			if list = append(list, Share{1 << i, float64(kept) / float64(all)}); kept == all {
				break
			}
		}
	}
	return list
}
