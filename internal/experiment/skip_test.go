package experiment

import (
	"strings"
	"testing"
)

var skipGrid = []Axis{
	{"data.seq_len", []any{int64(1024), int64(131072)}},
	{"nproc", []any{int64(1), int64(2)}},
	{"parallel.algorithm", []any{"ring", "allgather"}},
	{"train.deterministic", []any{true, false}},
	{"optimizer.lr", []any{0.1, 0.01}},
}

func TestSkip(t *testing.T) {
	cell := map[string]any{"data.seq_len": int64(131072), "nproc": int64(2), "parallel.algorithm": "ring", "train.deterministic": true, "optimizer.lr": 0.1}
	for text, want := range map[string]bool{
		"nproc == 2":                              true,
		"nproc != 2":                              false,
		"data.seq_len >= 128K":                    true,
		"data.seq_len<128K":                       false,
		"128K <= data.seq_len":                    true,
		"nproc > 1 && parallel.algorithm == ring": true,
		"parallel.algorithm == 'ring'":            true,
		"parallel.algorithm != ring || nproc == 1 || train.deterministic == true": true,
		"nproc == 1 || nproc == 2 && data.seq_len == 1K":                          false,
		"(nproc == 1 || nproc == 2) && data.seq_len == 128K":                      true,
		"((nproc == 1))":               false,
		"nproc < data.seq_len":         true,
		"optimizer.lr <= 0.1":          true,
		"optimizer.lr > 1.0e-2":        true,
		"train.deterministic == false": false,
	} {
		s, err := ParseSkip(text, skipGrid)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := s.Holds(cell); got != want {
			t.Errorf("%s is %v", text, got)
		}
	}
}

func TestSkipSaysWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "it ends where a key or a value is wanted",
		"nproc":                          "a comparison is wanted",
		"nproc = 2":                      `"=" is no operator`,
		"nproc == ":                      "it ends where",
		"nproc == 2 &&":                  "it ends where",
		"nproc == 2 nproc == 1":          "stands where && or || or the end is wanted",
		"(nproc == 2":                    "a ( is not closed",
		"nproc == 2)":                    `")" stands where`,
		"nnodes == 2":                    `"nnodes" is no key of the grid`,
		"parallel.algoritm == ring":      "did you mean parallel.algorithm?",
		"parallel.algorithm == allgater": "did you mean allgather?",
		"parallel.algorithm == 3":        "is never",
		"nproc == ring":                  "nproc is never",
		"ring == ring":                   "names no key of the grid",
		"nproc == 'two":                  "not closed",
		"&& nproc == 2":                  `"&&" stands where`,
		strings.Repeat("(", 5000):        "the most is",
	} {
		if _, err := ParseSkip(text, skipGrid); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v; want %q", text, err, want)
		}
	}
}

// FuzzSkip: a condition is refused, or holds for a cell or does not, and says the same of the same cell.
func FuzzSkip(f *testing.F) {
	for _, s := range []string{"nproc == 2 && (data.seq_len > 1K || parallel.algorithm != 'ring')", "((((", "nproc<=1||1<2", `"a"==nproc`, "train.deterministic == true"} {
		f.Add(s)
	}
	cell := map[string]any{"data.seq_len": int64(1024), "nproc": int64(2), "parallel.algorithm": "ring", "train.deterministic": true, "optimizer.lr": 0.1}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSkip(text, skipGrid)
		if err != nil {
			if err.Error() == "" {
				t.Error("a fault without words")
			}
			return
		}
		// In parentheses it means the same.
		again, err := ParseSkip("("+text+")", skipGrid)
		if err != nil && len(text)+2 <= maxSkip {
			t.Fatalf("%q is a condition, and in parentheses: %v", text, err)
		}
		if err == nil && again.Holds(cell) != s.Holds(cell) {
			t.Errorf("%q holds %v, in parentheses %v", text, s.Holds(cell), again.Holds(cell))
		}
	})
}
