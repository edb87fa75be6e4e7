package data

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// traces returns lengths like agent traces have: median 38K, 95 % up to 71K, at most 184K.
func traces(n int, seed uint64) []int32 {
	r, lens := rand.New(rand.NewPCG(seed, 1)), make([]int32, n)
	sigma := math.Log(71.0/38) / 1.645
	for i := range lens {
		lens[i] = int32(min(184<<10, 38*1024*math.Exp(sigma*r.NormFloat64())))
	}
	return lens
}

// reasoning returns lengths like solved problems have: median 12.4K, mean 18.4K, 99 % up to 84.7K.
func reasoning(n int, seed uint64) []int32 {
	r, lens := rand.New(rand.NewPCG(seed, 2)), make([]int32, n)
	for i := range lens {
		lens[i] = int32(min(128<<10, 12.4*1024*math.Exp(0.89*r.NormFloat64())))
	}
	return lens
}

// firstFit returns the samples of first-fit decreasing, with fractions of a sample as floats.
func firstFit(lens []int32, size int) (bins int) {
	sorted := slices.Clone(lens)
	slices.SortFunc(sorted, func(a, b int32) int { return int(b - a) })
	var left []float64
	for _, n := range sorted {
		share := float64(n) / float64(size)
		at := slices.IndexFunc(left, func(f float64) bool { return f >= share })
		if at < 0 {
			at, left = len(left), append(left, 1)
		}
		left[at] -= share
	}
	return len(left)
}

func startsOf(lens []int32) (starts []int64) {
	at := int64(0)
	for _, n := range lens {
		starts, at = append(starts, at), at+int64(n)
	}
	return starts
}

// Every document is in one sample, none is too long, and first-fit decreasing makes no fewer.
func TestPackingKeepsDocumentsWhole(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	uniform := func(n, most int) []int32 {
		lens := make([]int32, n)
		for i := range lens {
			lens[i] = 1 + random.Int32N(int32(most))
		}
		return lens
	}
	for name, tc := range map[string]struct {
		lens []int32
		size int
	}{
		"none":      {nil, 4},
		"one":       {[]int32{4}, 4},
		"ones":      {slices.Repeat([]int32{1}, 100), 1},
		"halves":    {slices.Repeat([]int32{33}, 7), 64},
		"uniform":   {uniform(3000, 64), 64},
		"small":     {uniform(3000, 20), 4100},
		"traces":    {fitting(traces(2000, 1), 128<<10), 128 << 10},
		"reasoning": {fitting(reasoning(2000, 1), 64<<10), 64 << 10},
	} {
		for _, shuffle := range []bool{false, true} {
			k := newPack(startsOf(tc.lens), tc.lens, Plan{SeqLen: tc.size, Shuffle: shuffle, PackDocuments: true, Seed: 3})
			if got := slices.Sorted(slices.Values(k.order)); len(got) != len(tc.lens) ||
				len(slices.Compact(got)) != len(tc.lens) {
				t.Fatalf("%s: %d of %d documents", name, len(got), len(tc.lens))
			}
			for s := range len(k.first) - 1 {
				used := 0
				for _, doc := range k.order[k.first[s]:k.first[s+1]] {
					used += int(tc.lens[doc])
				}
				if used > tc.size || used == 0 {
					t.Fatalf("%s: a sample of %d tokens; the most is %d", name, used, tc.size)
				}
			}
			if got, most := len(k.first)-1, firstFit(tc.lens, tc.size); got > most {
				t.Errorf("%s: %d samples, first-fit decreasing makes %d", name, got, most)
			}
		}
	}
}

func fitting(lens []int32, size int) []int32 {
	return slices.DeleteFunc(lens, func(n int32) bool { return int(n) > size })
}

// The packing of agent traces wastes little, also at the ends of windows.
func TestPackingOfTracesIsDense(t *testing.T) {
	lens := fitting(traces(packWindow+1000, 7), 128<<10)
	k := newPack(startsOf(lens), lens, Plan{SeqLen: 128 << 10, Shuffle: true, PackDocuments: true})
	total := int64(0)
	for _, n := range lens {
		total += int64(n)
	}
	samples := int64(len(k.first) - 1)
	waste := 1 - float64(total)/float64(samples*128<<10)
	if waste > 0.02 {
		t.Errorf("waste %.4f", waste)
	}
}

// A room finds the same bins as a plain search.
func TestRoomsFindTheBestFit(t *testing.T) {
	for _, most := range []int{1, 63, 64, 65, 4095, 4096, 300000} {
		r, random := newRoom(most), rand.New(rand.NewPCG(1, uint64(most)))
		var plain [][2]int // room and bin
		for step := range 2000 {
			n := 1 + random.IntN(most)
			left, bin := r.take(n)
			best := -1
			for i, p := range plain {
				if p[0] >= n && (best < 0 || p[0] <= plain[best][0]) {
					best = i
				}
			}
			if best < 0 != (bin < 0) || best >= 0 && plain[best] != [2]int{left, bin} {
				t.Fatalf("most %d, step %d: room %d in bin %d, want %v", most, step, left, bin, best)
			}
			if best >= 0 {
				plain = slices.Delete(plain, best, best+1)
				if left -= n; left == 0 {
					continue
				}
			} else {
				left, bin = random.IntN(most+1), step
			}
			plain = append(plain, [2]int{left, bin})
			r.put(left, bin)
		}
	}
}

// packed opens records of these lengths with masks; token i of record k is k % 200, and its target is masked if i is a
// multiple of 3.
func packed(t *testing.T, p Plan, lens ...int) *Loader {
	t.Helper()
	var lines []string
	for k, n := range lens {
		ids, mask := slices.Repeat([]int{k % 200}, n), make([]int, n)
		for i := range mask {
			mask[i] = min(1, i%3)
		}
		line := must.Have(json.Marshal(map[string]any{"input_ids": ids, "loss_mask": mask}))
		lines = append(lines, string(line))
	}
	d := must.Have(open1(t, lines...))
	p.Whole = true
	return must.Have(New(d, p))
}

// An epoch has the targets of all records that fit, each once, whatever the packing.
func TestEpochsHaveEveryRecordOnce(t *testing.T) {
	lens := []int{5, 16, 3, 9, 30, 1, 7, 12, 4, 4, 17, 8, 2, 6}
	for _, p := range []Plan{
		{SeqLen: 16, PackDocuments: true}, {SeqLen: 16, PackDocuments: true, Shuffle: true, Seed: 4},
		{SeqLen: 16}, {SeqLen: 16, Shuffle: true},
	} {
		l := packed(t, p, lens...)
		if n, of := l.Dropped(); n != 2 || !reflect.DeepEqual(of.Kept(20), []Share{{16, 12.0 / 14}, {32, 1}}) {
			t.Errorf("%+v: %d dropped, kept %v", p, n, of.Kept(20))
		}
		if l.Samples() < 12 != p.PackDocuments || l.Tokens() != 77 || l.Alike() {
			t.Errorf("%+v: %d samples, %d tokens, alike %v", p, l.Samples(), l.Tokens(), l.Alike())
		}
		for epoch := range int64(2) {
			seen, targets := map[int32]int{}, int64(0)
			for n := range l.Samples() {
				s := l.Index(epoch*l.Samples() + n)
				got, docs, at := gather(t, l, s, partition.Zigzag{}, 2), l.Docs(s), 0
				valid := 0
				for _, n := range docs {
					seen[got.ids[at]] += n
					for i := range n {
						want := got.ids[at+i]
						if got.positions[at+i] != i || got.ids[at+i] != got.ids[at] {
							t.Fatalf("%+v: %+v", p, got)
						}
						if i+1 == n || (i+1)%3 == 0 {
							want = -1
						} else {
							valid++
						}
						if got.targets[at+i] != want {
							t.Fatalf("%+v: target %d of %v", p, at+i, got.targets)
						}
					}
					at += n
				}
				for ; at < p.SeqLen; at++ {
					if got.targets[at] != -1 || got.ids[at] != 0 {
						t.Fatalf("%+v: the end of %+v", p, got)
					}
				}
				if targets += int64(valid); l.Valid(s) != valid {
					t.Errorf("%+v: %d targets, want %d", p, l.Valid(s), valid)
				}
			}
			for k, n := range lens {
				if n <= p.SeqLen && seen[int32(k)] != n || n > p.SeqLen && seen[int32(k)] != 0 {
					t.Errorf("%+v, epoch %d: %d tokens of record %d", p, epoch, seen[int32(k)], k)
				}
			}
			if l.Targets() != targets {
				t.Errorf("%+v: %d targets, want %d", p, l.Targets(), targets)
			}
		}
	}
}

// The packing depends on seed and data; without shuffle, samples are in the order of their first records.
func TestPackingIsRepeatable(t *testing.T) {
	lens := []int{5, 16, 3, 9, 1, 7, 12, 4, 4, 8, 2, 6}
	docs := func(p Plan) string {
		k := packed(t, p, lens...).pack
		return fmt.Sprint(k.order, k.first)
	}
	plain := docs(Plan{SeqLen: 16, PackDocuments: true})
	if want := "[0 2 4 8 1 3 5 6 7 9 10 11] [0 4 5 7 9 12]"; plain != want {
		t.Errorf("%s, want %s", plain, want)
	}
	one := docs(Plan{SeqLen: 16, PackDocuments: true, Shuffle: true, Seed: 1})
	if one != docs(Plan{SeqLen: 16, PackDocuments: true, Shuffle: true, Seed: 1}) || one == plain ||
		one == docs(Plan{SeqLen: 16, PackDocuments: true, Shuffle: true, Seed: 2}) {
		t.Errorf("the order does not depend on the seed alone: %s", one)
	}
}
