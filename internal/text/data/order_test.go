package data

import (
	"slices"
	"testing"
)

func TestEveryEpochHasEverySampleOnce(t *testing.T) {
	for _, n := range []int64{1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 1023, 1024, 1025, 5000} {
		var before []int64
		for epoch := range int64(3) {
			l := Loader{samples: n, plan: Plan{Shuffle: true, Seed: 9}}
			var seen []int64
			for i := range n {
				seen = append(seen, l.Index(epoch*n+i))
			}
			if n > 20 && (slices.Equal(seen, before) || slices.IsSorted(seen)) {
				t.Errorf("epoch %d of %d samples is not shuffled anew", epoch, n)
			}
			before = slices.Clone(seen)
			slices.Sort(seen)
			for i, s := range seen {
				if s != int64(i) {
					t.Fatalf("epoch %d of %d samples: %v", epoch, n, seen)
				}
			}
		}
	}
	l := Loader{samples: 3}
	for n, want := range []int64{0, 1, 2, 0, 1, 2, 0} {
		if got := l.Index(int64(n)); got != want {
			t.Errorf("unshuffled, sample %d is %d, want %d", n, got, want)
		}
	}
}

// The order is part of the meaning of a checkpoint, so it must never change.
func TestTheOrderIsFixed(t *testing.T) {
	for _, tc := range []struct {
		n, seed, epoch int64
		want           []int64
	}{
		{10, 1, 0, []int64{8, 5, 0, 4, 2, 3, 9, 7, 6, 1}},
		{10, 1, 1, []int64{7, 6, 1, 8, 2, 0, 5, 4, 3, 9}},
		{1000, -5, 3, []int64{329, 898, 323, 699, 97, 629, 901, 80, 388, 602}},
	} {
		var got []int64
		for i := range int64(10) {
			got = append(got, newPermutation(tc.n, tc.seed, tc.epoch).at(i))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%+v: got %#v", tc, got)
		}
	}
}
