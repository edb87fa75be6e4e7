package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
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
			got := curve(t, parityYAML(dir, e), v.ranks, v.set)
			follows(t, fmt.Sprintf("%s, %d ranks, %s", name, v.ranks, v.set), got, e, "families")
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
// length, others beside them in a sample are not. The second tables of gemma3 and ministral3 restart with each
// document.
func TestRotaryTablesOfDocuments(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"phi3", "gemma3", "ministral3"} {
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
