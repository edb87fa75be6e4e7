package data

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// open1 opens lines of .jsonl as one file of ids.
func open1(t testing.TB, lines ...string) (*Dataset, error) {
	return Open(sourceOf(t, in{"a.jsonl": strings.Join(lines, "\n")}, "*", -1, 256))
}

// Targets follow the causal loss of transformers: the logits of place i predict label i+1.
func TestMasksChooseTargets(t *testing.T) {
	for _, tc := range []struct{ record, targets string }{
		{`{"input_ids":[1,2,3,4,5]}`, "[2 3 4 5]"},
		{`{"input_ids":[1,2,3,4,5],"completion_mask":[0,0,0,1,1]}`, "[-1 -1 4 5]"}, // 3, of the prompt, predicts 4
		{`{"input_ids":[1,2,3,4,5],"completion_mask":[1,1,1,1,1]}`, "[2 3 4 5]"},
		{`{"input_ids":[1,2,3,4,5],"completion_mask":[1,0,0,0,1]}`, "[-1 -1 -1 5]"}, // nothing predicts the first token
		{`{"input_ids":[1,2,3,4,5],"assistant_masks":[0,1,1,0,1]}`, "[2 3 -1 5]"},
		{`{"input_ids":[1,2,3,4,5],"loss_mask":[0,1,0,1,0]}`, "[2 -1 4 -1]"},
		{`{"input_ids":[1,2,3,4,5],"completion_mask":[0,0,1,1,1],"assistant_masks":[0,1,1,0,1]}`, "[-1 3 -1 5]"},
		{`{"input_ids":[1,2,3,4,5],"labels":[1,9,-100,4,5],"completion_mask":[0,1,1,1,0]}`, "[9 -1 4 -1]"},
		{`{"input_ids":[1,2,3,4,5,0,0],"attention_mask":[1,1,1,1,1,0,0],"completion_mask":[0,0,1,1,1,1,1],` +
			`"labels":[1,2,3,4,5,-100,6],"position_ids":[0,1,2,3,4,1,1]}`, "[-1 3 4 5]"},
		{`{"input_ids":[1,2,3,4,5],"attention_mask":[1,1,1,1,1],"labels":null,"loss_mask":null,"chosen":null,` +
			`"target_x":null}`, "[2 3 4 5]"},
	} {
		d := must.Have(open1(t, tc.record))
		l := must.Have(New(d, Plan{SeqLen: 5, Whole: true}))
		if got := fmt.Sprint(gather(t, l, 0, partition.Zigzag{}, 2).targets[:4]); got != tc.targets {
			t.Errorf("%s: targets %s, want %s", tc.record, got, tc.targets)
		}
	}
}

func TestKeysThatWouldChangeTargetsAreRefused(t *testing.T) {
	for record, want := range map[string]string{
		`{"input_ids":[1,2],"completion_mask":[1]}`:        "1 completion_mask for 2 input_ids",
		`{"input_ids":[1,2],"loss_mask":[1,2]}`:            "loss_mask[1] is 2; want 0 or 1",
		`{"input_ids":[1,2],"assistant_masks":[0.5,1]}`:    `"assistant_masks" is not a list of integers`,
		`{"input_ids":[1,2],"attention_mask":[0,1]}`:       "attention_mask[0] is 0 and a later entry is 1",
		`{"input_ids":[1,2],"attention_mask":[1,-1]}`:      "attention_mask[1] is -1",
		`{"input_ids":[1,2],"position_ids":[0,2]}`:         "position_ids[1] is 2",
		`{"input_ids":[1,2],"position_ids":[0]}`:           "1 position_ids for 2 input_ids",
		`{"input_ids":[1,2],"weight_mask":[1,1]}`:          `"weight_mask"`,
		`{"input_ids":[1,2],"soft_labels":[1,1]}`:          `"soft_labels"`,
		`{"input_ids":[1,2],"target_ids":[1,1]}`:           `"target_ids"`,
		`{"text":"a","loss_weights":[1]}`:                  `"loss_weights"`,
		`{"text":"a","loss_mask":[1]}`:                     `"loss_mask" without "input_ids"`,
		`{"prompt":"a","chosen":"b","rejected":"c"}`:       `"chosen"`,
		`{"text":"a","rejected":"c"}`:                      `"rejected"`,
		`{"messages":[{"role":"user","content":"a"}]}`:     "without its targets",
		`{"conversations":[{"from":"human","value":"a"}]}`: "without its targets",
		`{"instruction":"a","input":"","output":"b"}`:      `rename them to "prompt" and "completion"`,
		`{"content":"a"}`:                                  `no key "text", "input_ids", "messages"`,
	} {
		_, err := open1(t, `{"text":"x"}`, record)
		if err == nil || !strings.Contains(err.Error(), "a.jsonl: line 2: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", record, err, want)
		}
	}
}

func TestKeysThatChangeNothingAreListedOnce(t *testing.T) {
	for _, records := range [][]string{
		{`{"text":"abc","label":1}`, `{"text":"x","label":0,"url":"y"}`},
		{`{"input_ids":[1,2],"position_ids":[0,1],"token_type_ids":[0,0]}`,
			`{"input_ids":[3],"special_tokens_mask":[1],"token_type_ids":[0]}`, `{"text":"x","label":1}`},
	} {
		d := must.Have(open1(t, records...))
		want := []string{"label", "position_ids", "special_tokens_mask", "token_type_ids"}
		if len(records) == 2 {
			want = []string{"label", "url"}
		}
		if got := d.Ignored(); !slices.Equal(got, want) {
			t.Errorf("%v: ignored are %v, want %v", records, got, want)
		}
	}
}

// The loader agrees with a plain reading of random records.
func TestTargetsAreThoseOfAPlainReading(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	bits := func(n int) []int {
		m := make([]int, n)
		for i := range m {
			m[i] = rng.IntN(2)
		}
		return m
	}
	for round := range 50 {
		var lines []string
		var want []int32 // the label of each token except padding
		var ids []int32
		for range 1 + rng.IntN(6) {
			n, pad := rng.IntN(8), rng.IntN(3)
			r := map[string]any{"attention_mask": append(slices.Repeat([]int{1}, n), make([]int, pad)...)}
			list, labels := make([]int32, n+pad), make([]int32, n+pad)
			for i := range list {
				list[i] = int32(rng.IntN(256))
				if labels[i] = list[i]; rng.IntN(4) == 0 {
					labels[i] = Ignore
				}
			}
			r["input_ids"] = list
			keep := slices.Clone(list)
			if rng.IntN(2) == 0 {
				r["labels"] = labels
				copy(keep, labels)
			}
			for _, key := range []string{"completion_mask", "loss_mask", "assistant_masks"} {
				if rng.IntN(3) > 0 {
					continue
				}
				m := bits(n + pad)
				r[key] = m
				for i := range keep {
					if m[i] == 0 {
						keep[i] = Ignore
					}
				}
			}
			text := must.Have(json.Marshal(r))
			lines, ids, want = append(lines, string(text)), append(ids, list[:n]...), append(want, keep[:n]...)
		}
		d := must.Have(open1(t, lines...))
		got := make([]int32, d.Len())
		must.Do(t, d.readLabels(got, 0))
		if len(ids) > 0 && (!slices.Equal(all(t, d), ids) || !slices.Equal(got, want)) {
			t.Fatalf("round %d: %s\nlabels %v, want %v", round, strings.Join(lines, "\n"), got, want)
		}
	}
}
