package train_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/metrics"
)

// families lists the fixtures of families, written by scripts/oracle/families.py.
func families(t *testing.T) (names []string) {
	entries, err := os.ReadDir(filepath.Join(parityDir, "../families"))
	if err != nil || len(entries) < 12 {
		t.Fatalf("%d families, %v", len(entries), err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// A small model of each family follows ten steps of transformers, on one rank and on several with three layouts.
func TestFamiliesFollowTransformers(t *testing.T) {
	t.Parallel()
	for f, name := range families(t) {
		dir := "../families/" + name
		e := readExpect(t, dir)
		for i, v := range []struct {
			ranks int
			set   string
		}{
			{1, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: striped, algorithm: allgather}"},
			{2, "parallel={layout: contiguous, algorithm: ulysses}"},
			{2, "memory={recompute: full, shard: parameters}"},
		} {
			if testing.Short() && f > 0 && i > 0 && i != 1+f%4 {
				continue // one family in all ways, the others on one rank and in one way, in turn
			}
			bound := "families"
			if strings.HasSuffix(name, "-linear") {
				bound, v.set = "linear", strings.Replace(v.set, "striped", "contiguous", 1)
			}
			got := curve(t, parityYAML(dir, e), v.ranks, v.set)
			follows(t, fmt.Sprintf("%s, %d ranks, %s", name, v.ranks, v.set), got, e, bound)
		}
	}
}

// The loss of balance follows transformers. The counts of its choices are over all tokens of a step, however they are
// divided. scripts/oracle/balance.py writes the fixtures.
func TestBalanceFollowsTransformers(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen3_next"} {
		dir := "../families/" + name
		text, err := os.ReadFile(filepath.Join(parityDir, dir, "balance.json"))
		if err != nil {
			t.Fatal(err)
		}
		var e expect
		var more struct {
			Coef    float64   `json:"coef"`
			AuxLoss []float64 `json:"aux_loss"`
		}
		if err := errors.Join(json.Unmarshal(text, &e), json.Unmarshal(text, &more)); err != nil {
			t.Fatal(err)
		}
		e.Steps, e.GradClip = len(e.Loss), 1
		set := append(balanced(more.Coef), "train.global_batch_size=2")
		for i, v := range []struct {
			ranks int
			set   string
		}{
			{1, "train.micro_batch_size=2"}, {1, "train.micro_batch_size=1"}, {2, "train.micro_batch_size=1"},
			{2, "parallel.data=2"}, {4, "train.micro_batch_size=2"},
			{4, "memory={recompute: full, shard: parameters}"},
		} {
			if testing.Short() && name != "qwen3_moe" && i%2 > 0 {
				continue
			}
			got := curve(t, parityYAML(dir, e), v.ranks, append(set, v.set)...)
			what := fmt.Sprintf("%s, %d ranks, %s", name, v.ranks, v.set)
			follows(t, what, got, e, "families")
			for i, s := range got {
				if !(math.Abs(float64(*s.AuxLoss)-more.AuxLoss[i]) <= 1e-5) {
					t.Errorf("%s: step %d has loss of balance %v, want %v", what, i+1, *s.AuxLoss, more.AuxLoss[i])
				}
			}
		}
	}
}

// balanced returns the flags of a loss of balance.
func balanced(coef float64) []string {
	return []string{"model.output_router_logits=true", fmt.Sprintf("model.router_aux_loss_coef=%g", coef)}
}

// Rows that fill packed samples choose experts, but do not count.
func TestBalanceOfPackedDocuments(t *testing.T) {
	t.Parallel()
	dir := "../families/qwen3_moe"
	e := readExpect(t, dir).begin(shortSteps)
	var text strings.Builder
	for i, n := range []int{37, 51, 40, 3, 90, 11, 64, 29, 77, 5, 60, 33} {
		ids := make([]string, n)
		for k := range ids {
			ids[k] = fmt.Sprint((i*31 + k*k*7 + k) % 90)
		}
		fmt.Fprintf(&text, "{\"input_ids\": [%s]}\n", strings.Join(ids, ", "))
	}
	set := append(balanced(0.5), "data.path="+writeFile(t, "documents.jsonl", text.String()), "data.pack_documents=true",
		"data.overlong=drop", "data.seq_len=96", "train.global_batch_size=2")
	one := curve(t, parityYAML(dir, e), 1, append(set, "train.micro_batch_size=2")...)
	if one[0].Tokens >= 2*96 {
		t.Errorf("%d tokens in the first step: no row fills a sample", one[0].Tokens)
	}
	for _, more := range []string{"train.micro_batch_size=2", "train.micro_batch_size=1", "parallel.layout=striped"} {
		got := curve(t, parityYAML(dir, e), 4, append(set, more)...)
		follows(t, more, got, expectOf(one), "families")
		for i, s := range got {
			if off := float64(*s.AuxLoss - *one[i].AuxLoss); !(math.Abs(off) <= 1e-5) {
				t.Errorf("%s: step %d has loss of balance %v, want %v", more, i+1, *s.AuxLoss, *one[i].AuxLoss)
			}
		}
	}
}

// Batches of another size, such as the last of a validation, have their own second rotary table.
func TestTwoRotaryTablesForAnyBatch(t *testing.T) {
	dir := "../families/gemma3"
	e := readExpect(t, dir)
	e.Steps = 3
	var want []metrics.Step
	for _, size := range []string{"1", "2"} {
		path := absolute(filepath.Join(parityDir, dir, "tokens.bin"))
		got := curve(t, parityYAML(dir, e), 1, "train.global_batch_size=2", "train.micro_batch_size="+size,
			"data.validation={path: "+path+", every: 1, samples: 3}")
		for i := range want {
			off := math.Abs(float64(got[i].Loss-want[i].Loss)) + math.Abs(float64(*got[i].ValLoss-*want[i].ValLoss))
			if len(got) != len(want) || !(off <= 1e-5) {
				t.Errorf("micro batches of %s: step %+v, want %+v", size, got[i], want[i])
			}
		}
		want = got
	}
}

// The length of a token's document selects longrope's factors on any rank: some documents are longer than the trained
// length, others beside them in a sample are not. The second tables of gemma3, gemma4 and ministral3 restart with each
// document.
func TestRotaryTablesOfDocuments(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"phi3", "gemma3", "gemma4_text", "gemma4_text-dense", "ministral3"} {
		t.Run(name, func(t *testing.T) { testDocuments(t, "../families/"+name) })
	}
}

// testDocuments compares four ranks with one.
func testDocuments(t *testing.T, dir string) {
	e := readExpect(t, dir).begin(shortSteps)
	set := []string{"data.pack_documents=true", "data.eos_token_id=60"}
	yaml := parityYAML(dir, e)
	one := expectOf(curve(t, yaml, 1, set...))
	for _, layout := range []string{"striped", "document"} {
		got := curve(t, yaml, 4, append(set, "parallel={layout: "+layout+", algorithm: allgather}")...)
		follows(t, layout, got, one, "fp32")
	}
}

// As in transformers, the lookup gives the row of pad_token_id no gradient; the head of a tied model does.
// scripts/oracle/padding.py writes the fixtures.
func TestTheRowOfPaddingFollowsTransformers(t *testing.T) {
	for _, name := range []string{"llama", "gemma2-tied"} {
		dir := "../padding/" + name
		e := readExpect(t, dir)
		for ranks, set := range map[int]string{1: "train.micro_batch_size=1", 2: "memory={shard: parameters}"} {
			follows(t, fmt.Sprintf("%s, %d ranks", name, ranks), curve(t, parityYAML(dir, e), ranks, set), e, "families")
		}
	}
}
