package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

// families lists the fixtures of families, written by scripts/oracle/families.py.
func families(t *testing.T) (names []string) {
	entries, err := os.ReadDir(filepath.Join(parityDir, "../families"))
	if err != nil || len(entries) < 7 {
		t.Fatalf("%d families, %v", len(entries), err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// A small model of each family follows ten steps of transformers, on one rank and on several with three layouts.
func TestFamiliesFollowTransformers(t *testing.T) {
	for _, name := range families(t) {
		dir := "../families/" + name
		e := readExpect(t, dir)
		for _, v := range []struct {
			ranks int
			set   string
		}{
			{1, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: striped, algorithm: allgather}"},
			{2, "parallel={layout: contiguous, algorithm: ulysses}"},
			{2, "memory={recompute: full, shard: parameters}"},
		} {
			cfg := load(t, parityYAML(dir, e), v.ranks, v.set)
			what := fmt.Sprintf("%s, %d ranks, %s", name, v.ranks, v.set)
			follows(t, what, mustRun(t, cfg, v.ranks, train.Options{}).steps, e, "families")
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
		cfg := load(t, parityYAML(dir, e), 1, "train.global_batch_size=2", "train.micro_batch_size="+size,
			"data.validation={path: "+path+", every: 1, samples: 3}")
		got := mustRun(t, cfg, 1, train.Options{}).steps
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
// length, others beside them in a sample are not. The second table of gemma3 restarts with each document.
func TestRotaryTablesOfDocuments(t *testing.T) {
	for _, name := range []string{"phi3", "gemma3"} {
		t.Run(name, func(t *testing.T) { testDocuments(t, "../families/"+name) })
	}
}

// testDocuments compares four ranks with one.
func testDocuments(t *testing.T, dir string) {
	e := readExpect(t, dir).begin()
	set := []string{"data.pack_documents=true", "data.eos_token_id=60"}
	e.Loss, e.GradNorm = nil, nil
	for _, s := range mustRun(t, load(t, parityYAML(dir, e), 1, set...), 1, train.Options{}).steps {
		e.Loss, e.GradNorm = append(e.Loss, float64(s.Loss)), append(e.GradNorm, float64(s.GradNorm))
	}
	for _, layout := range []string{"striped", "document"} {
		cfg := load(t, parityYAML(dir, e), 4, append(set, "parallel={layout: "+layout+", algorithm: allgather}")...)
		follows(t, layout, mustRun(t, cfg, 4, train.Options{}).steps, e, "fp32")
	}
}
