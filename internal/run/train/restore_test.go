package train

import (
	"encoding/json"
	"testing"
)

// A count of validations in a checkpoint is not negative, and is restored.
func TestCountsOfValidationsAreRestored(t *testing.T) {
	for text, want := range map[string]int{`{"lowest": 2.5, "since": 0}`: 0, `{"lowest": null, "since": 3}`: 3,
		`{"since": -1}`: -1, `[]`: -1} {
		var e earlyStop
		err := e.restore(map[string]json.RawMessage{earlyStopState: json.RawMessage(text)})
		if (err != nil) != (want < 0) || err == nil && e.Since != want {
			t.Errorf("%s: %d, %v, want %d", text, e.Since, err, want)
		}
	}
	var e earlyStop
	if err := e.restore(nil); err != nil || e != (earlyStop{}) {
		t.Errorf("none: %+v, %v", e, err)
	}
}

// A sample is computed in the fewest rows of at most 64 lengths, in whole pieces of all ranks.
func TestRowsOfASample(t *testing.T) {
	for _, tc := range []struct{ seqLen, ranks, tokens, want int }{
		{256, 2, 1, 4}, {256, 2, 4, 4}, {256, 2, 5, 8}, {256, 2, 256, 256}, // 64 lengths of 4
		{257, 2, 5, 8}, {257, 2, 9, 16}, {257, 2, 257, 257}, // of 8
		{512, 2, 8, 8}, {512, 2, 9, 16}, {513, 2, 12, 12}, {513, 2, 13, 24},
		{10, 3, 7, 10}, {10, 3, 6, 6}, {3, 4, 1, 3},
	} {
		if got := rowsFor([]int{tc.tokens}, tc.seqLen, tc.ranks); got != tc.want {
			t.Errorf("%d tokens of %d on %d ranks in %d rows, want %d", tc.tokens, tc.seqLen, tc.ranks, got, tc.want)
		}
		lengths := map[int]bool{}
		for n := 1; n <= tc.seqLen; n++ {
			lengths[rowsFor([]int{n}, tc.seqLen, tc.ranks)] = true
		}
		if len(lengths) > 64 {
			t.Errorf("seq_len %d on %d ranks: %d lengths", tc.seqLen, tc.ranks, len(lengths))
		}
	}
}
