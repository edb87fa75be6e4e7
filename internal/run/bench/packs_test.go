package bench

import (
	"reflect"
	"testing"
)

// The packs equal those of numpy's default_rng(42), as printed by scripts/oracle/packs.py.
func TestMagiPacksAreTheirs(t *testing.T) {
	got, err := MagiPacks(16384, 3)
	if err != nil {
		t.Fatal(err)
	}
	want := [][]int{
		{216, 1536, 1536, 762, 350, 75, 75, 150, 350, 150, 75, 30, 3072, 30, 4096, 3881},
		{326, 1536, 1536, 350, 762, 762, 350, 350, 350, 1536, 350, 2048, 3072, 30, 350, 762, 1914},
		{792, 1536, 5, 150, 75, 1536, 4096, 4096, 150, 3948},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("packs of 16384 tokens: %v, want %v", got, want)
	}
}

func TestMagiPacksRefuseOddLengths(t *testing.T) {
	for _, tokens := range []int{0, 2, 10, -4} {
		if p, err := MagiPacks(tokens, 1); err == nil {
			t.Errorf("packs of %d tokens: %v, want an error", tokens, p)
		}
	}
}
