package state

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
)

// While work reads a bucket, the next ones are gathered, as far as there are slots. One that is still in memory is not
// gathered again.
func TestGathersRunAhead(t *testing.T) {
	cfg := &hf.Config{
		Architecture: hf.Llama, VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 5,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6,
	}
	flat := model.NewLayout(cfg, 2)
	for slots, step := range map[int][]int{
		2: {3, 4, 5, flat.Head(), 3, 2, 1, flat.Embedding()},
		3: {4, 5, flat.Head(), 2, 1, flat.Embedding()},
	} {
		var gathered []int
		r := Residence{Flat: flat, Slot: func(b int) int { return StageOf(flat, b, slots) }, Holds: map[int]int{},
			Gather: func(b int) error {
				gathered = append(gathered, b)
				return nil
			}}
		first := []int{flat.Embedding(), flat.Vectors(), 1, 2, 3, 4, 5}
		for _, b := range first {
			if err := r.Fill(b); err != nil {
				t.Fatal(err)
			}
		}
		pass := []int{flat.Embedding(), flat.Vectors(), 1, 2, 3, 4, 5, flat.Head(), 5, 4, 3, 2, 1}
		uses, early := append(slices.Concat(pass, pass), flat.Embedding()), 0
		for i, next := range uses[1:] {
			before := len(gathered)
			if err := r.Use(uses[i], next); err != nil {
				t.Fatal(err)
			}
			if now := gathered[before:]; slices.Contains(now, uses[i]) {
				t.Errorf("%d slots: bucket %d, use %d, is gathered when it is used", slots, uses[i], i)
			} else if len(now) > 0 && now[len(now)-1] != next {
				early++
			}
		}
		if want := slices.Concat(first[:2+slots], step, step); !slices.Equal(gathered, want) {
			t.Errorf("%d slots: gathers of %v, want %v", slots, gathered, want)
		}
		if want := 8 * (slots - LeastSlots); early != want {
			t.Errorf("%d slots: %d gathers two ahead, want %d", slots, early, want)
		}
	}
}
