package attend

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// scoreCases returns the files of scripts/oracle/scores.py, with results computed in float64 over the whole matrix of
// scores.
func scoreCases(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.safetensors")
	if err != nil || len(paths) == 0 {
		t.Fatal("no cases", err)
	}
	return paths
}

// stored returns the results in a case.
func stored(t *testing.T, path string) map[string][]float32 {
	t.Helper()
	all := results(t, path)
	maps.DeleteFunc(all, func(name string, _ []float32) bool { return !slices.Contains(resultTensors, name) })
	return all
}

// Every result of every case, for all numbers of ranks, layouts, algorithms and backends. Each layout and algorithm
// runs with half of the numbers of ranks, even or odd, and the slow backend with half of these. With one rank, the
// layout does not matter.
func TestScoresOfEveryLayout(t *testing.T) {
	most, turns := 6, 2
	if testing.Short() { // each layout and algorithm with one number of ranks
		most, turns = 5, 4
	}
	for _, path := range scoreCases(t) {
		want := stored(t, path)
		for ranks := 1; ranks <= most; ranks++ {
			for l, layout := range []partition.LayoutName{"contiguous", "zigzag", "striped", "document"} {
				if layout == "document" && strings.Contains(path, "cross") {
					continue // it needs equal numbers of queries and keys
				}
				for i, algorithm := range ring.Algorithms {
					if ranks == 1 && l > 0 || ranks > 1 && (ranks+i+l)%turns != 1 {
						continue
					}
					specs := []Spec{{Strategy: ring.Strategy{Backend: "flash"}, DType: "fp32"},
						{Strategy: ring.Strategy{Backend: "reference"}, DType: "fp64"}}
					for _, s := range specs[:1+(ranks/2+i)%2] {
						s.Layout, s.Algorithm = layout, algorithm
						got, _ := run(t, path, ranks, s)
						same(t, fmt.Sprintf("%s, %d ranks, %+v", filepath.Base(path), ranks, s), got, want, 2e-5)
					}
				}
			}
		}
	}
}

// same compares results, with a tolerance relative to the largest element of each tensor.
func same(t *testing.T, what string, got, want map[string][]float32, tolerance float64) {
	t.Helper()
	if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want))) {
		t.Fatalf("%s: results %v, want %v", what, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
	for name, w := range want {
		if err := near.Within(got[name], w, near.Infinities, tolerance); err != nil {
			t.Fatalf("%s: %s: %v", what, name, err)
		}
	}
}

func TestMalformedScores(t *testing.T) {
	for _, c := range []struct {
		what   string
		shapes shapes
		meta   map[string]string
		says   []string
	}{
		{"a sink of three heads", good.with("sink", 3), nil, []string{`tensor "sink"`, "[3]", "[4]"}},
		{"a sink of one axis more", good.with("sink", 1, 4), nil, []string{`tensor "sink"`, "[1 4]"}},
		{"a sink without elements", good.with("sink", 0), nil, []string{`tensor "sink"`, "empty"}},
		{"a sink and the word", good.with("sink", 4), map[string]string{"sink": "off_by_one"}, []string{`tensor "sink"`,
			`metadata "sink"`}},
		{"slopes of another length", good.with("alibi_slopes", 2), nil, []string{`tensor "alibi_slopes"`, "[2]",
			"[4]"}},
		{"a bias of three axes", good.with("bias", 4, 9, 9), nil, []string{`tensor "bias"`, "[4 9 9]", "seq_kv"}},
		{"a bias of two heads", good.with("bias", 2, 2, 9, 9), nil, []string{`tensor "bias"`, "1 or 4"}},
		{"a bias of another batch", good.with("bias", 3, 4, 9, 9), nil, []string{`tensor "bias"`, "1 or 2"}},
		{"a bias of fewer keys", good.with("bias", 1, 1, 9, 8), nil, []string{`tensor "bias"`, "[1 1 9 8]"}},
		{"a largest logit of what", good, map[string]string{"max_logit": "all"}, []string{`metadata "max_logit"`,
			"true or false"}},
		{"another word", good, map[string]string{"sink": "learnable"}, []string{`metadata "sink"`, "off_by_one"}},
	} {
		_, err := Open(write(t, c.shapes, c.meta))
		if err == nil {
			t.Errorf("%s: not refused", c.what)
			continue
		}
		for _, w := range c.says {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", c.what, err, w)
			}
		}
	}
}

// Without dout there is no gradient of a sink.
func TestSinkWithoutDout(t *testing.T) {
	got, _ := run(t, write(t, good.with("dout").with("sink", 4), nil), 2, Spec{Strategy: ring.Strategy{Layout: "zigzag",
		Algorithm: "ring", Backend: "flash"}, DType: "fp32"})
	if len(got) != 2 || got["out"] == nil || got["lse"] == nil {
		t.Errorf("results %v, want out and lse alone", slices.Sorted(maps.Keys(got)))
	}
}

// Ranks without rows have no score terms and no results.
func TestScoresOfRanksWithoutRows(t *testing.T) {
	few := shapes{
		"q": {2, 3, 4, 8}, "k": {2, 3, 2, 8}, "v": {2, 3, 2, 6}, "dout": {2, 3, 4, 6},
		"sink": {4}, "alibi_slopes": {4}, "bias": {1, 4, 3, 3},
	}
	path := write(t, few, map[string]string{"causal": "true", "max_logit": "true"})
	want, _ := run(t, path, 1, Spec{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring",
		Backend: "reference"}, DType: "fp64"})
	if len(want) != len(resultTensors) {
		t.Fatalf("results %v, want %v", slices.Sorted(maps.Keys(want)), resultTensors)
	}
	for _, algorithm := range ring.Algorithms {
		for _, backend := range []string{"flash", "reference"} {
			s := Spec{Strategy: ring.Strategy{Layout: "striped", Algorithm: algorithm, Backend: backend}, DType: "fp32"}
			got, _ := run(t, path, 6, s)
			same(t, fmt.Sprintf("%+v", s), got, want, 2e-5)
		}
	}
}

// Slopes, slices of a bias and largest scores follow their heads: with groups of all sizes that exchange heads, more
// ranks than heads, grouped queries, and biases shared by samples or heads.
func TestScoresTradeWithTheirHeads(t *testing.T) {
	masks := []map[string]string{
		{"causal": "true"},
		{"causal": "true", "window": "6"}, // few remote rows: a halo
		{"docs": "[[9, 14], [16, 7]]", "causal": "true"},
		{"slices": "[[0, 12, 0, 20, \"causal\"], [12, 23, 3, 23, \"full\"]]"},
		{"window": "5,3", "softcap": "2"},
	}
	biases := [][]int{{1, 1}, {2, 1}, {1, 0}, {2, 0}, nil} // batch and heads; 0: all
	turn := 0
	for _, heads := range [][2]int{{8, 2}, {6, 6}, {3, 1}, {4, 4}} {
		for _, ranks := range []int{2, 3, 4, 8} {
			for inner := 1; inner <= ranks; inner++ {
				if ranks%inner != 0 {
					continue
				}
				turn++
				h, kv := heads[0], heads[1]
				s := shapes{"q": {2, 23, h, 8}, "k": {2, 23, kv, 8}, "v": {2, 23, kv, 6}, "dout": {2, 23, h, 6},
					"alibi_slopes": {h}}
				if b := biases[turn%len(biases)]; b != nil {
					s["bias"] = []int{b[0], max(b[1], h*(1-b[1])), 23, 23}
				}
				meta := maps.Clone(masks[turn/2%len(masks)])
				meta["max_logit"] = "true"
				path := write(t, s, meta)
				want, _ := run(t, path, 1, Spec{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring",
					Backend: "reference"}, DType: "fp64"})
				layout := []partition.LayoutName{"zigzag", "striped", "contiguous"}[turn%3]
				with := Spec{Strategy: ring.Strategy{Algorithm: "hierarchical", Inner: inner, Layout: layout, Backend: "flash"},
					DType: "fp32"}
				if inner == ranks {
					with.Algorithm, with.Inner = "ulysses", 0
				}
				got, _ := run(t, path, ranks, with)
				same(t, fmt.Sprintf("%v %v, %d ranks, %+v", s, meta, ranks, with), got, want, 2e-5)
			}
		}
	}
}
