package train_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

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
			follows(t, what, mustRun(t, cfg, v.ranks, train.Options{}).steps, e, "fp32")
		}
	}
}
