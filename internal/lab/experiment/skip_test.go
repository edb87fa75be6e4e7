package experiment

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

const skipGrid = `base: train.yaml
grid:
  data.seq_len: [1K, 128K]
  parallel.context: [auto, 2]
  parallel.algorithm: [ring, allgather, ulysses]
  train.deterministic: [true, false]
  optimizer.betas: [[0.9, 0.95], [0.9, 0.99]]
  log.prometheus: ["", ":9"]
skip: [%s]
`

func TestSkip(t *testing.T) {
	is := func(key, value string) func(c *Cell) bool { return func(c *Cell) bool { return c.Text(key) == value } }
	for entry, want := range map[string]func(c *Cell) bool{
		"{data.seq_len: 131072}": is("data.seq_len", "131072"),
		"{data.seq_len: 1K, parallel.algorithm: [allgather, ulysses]}": func(c *Cell) bool {
			return c.Text("data.seq_len") == "1024" && c.Text("parallel.algorithm") != "ring"
		},
		"{parallel.context: auto}":          is("parallel.context", "auto"),
		"{parallel.context: [2, 4]}":        is("parallel.context", "2"),
		"{train.deterministic: false}":      is("train.deterministic", "false"),
		"{optimizer.betas: [[0.9, 0.990]]}": is("optimizer.betas", "[0.9,0.99]"),
		`{log.prometheus: ""}`:              is("log.prometheus", ""),
		"{data.seq_len: 1K}, {parallel.algorithm: ring}": func(c *Cell) bool {
			return c.Text("data.seq_len") == "1024" || c.Text("parallel.algorithm") == "ring"
		},
	} {
		e, err := load(t, fmt.Sprintf(skipGrid, entry))
		if err != nil {
			t.Errorf("%s: %v", entry, err)
			continue
		}
		cells := e.Cells()
		for i := range cells {
			if got := cells[i].Status == Skipped; got != want(&cells[i]) {
				t.Errorf("%s: cell %s is left out: %v", entry, cells[i].ID, got)
			}
		}
	}
}

// A wrong entry is an error with its line, key and the nearest choice. The error for a condition of the older form
// contains the map that replaces it.
func TestSkipRefuses(t *testing.T) {
	for entry, want := range map[string][]string{
		"{nproc: 1}":                           {`"nproc"`, "data.seq_len"},
		"{parallel.algoritm: ring}":            {"parallel.algorithm?"},
		"{parallel.algorithm: allgater}":       {"allgather?"},
		"{parallel.context: 8}":                {"parallel.context", `"8"`, "auto, 2"},
		"{data.seq_len: [2K, 4K]}":             {"data.seq_len", `"2048, 4096"`},
		"{data.seq_len: 1K, data.seq_len: 1K}": {"data.seq_len", "twice"},
		"{data.seq_len: []}":                   {"data.seq_len"},
		"{}":                                   {"map"},
		"null":                                 {"map"},
		"[data.seq_len]":                       {"map"},
		"data.seq_len == 1K && parallel.algorithm != ring": {"{data.seq_len: 1K, parallel.algorithm: [allgather, " +
			"ulysses]}"},
		`"data.seq_len==1K&&parallel.algorithm == 'ring'"`: {"{data.seq_len: 1K, parallel.algorithm: ring}"},
		"data.seq_len >= 1K && parallel.algorithm != ring": {skipSample},
		"data.seq_len == 1K || parallel.algorithm != ring": {skipSample},
		"nproc == 1": {skipSample},
	} {
		_, err := load(t, fmt.Sprintf(skipGrid, entry))
		for _, text := range append(want, "scale.yaml:9") {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v; want %q", entry, err, text)
			}
		}
	}
}

// A directory with the older form of skip in cells.jsonl resumes.
func TestOlderSkipResumes(t *testing.T) {
	older := []byte(`{"version":1,"experiment":{"grid":"a","skip":"nproc == 1 && parallel.algorithm != ring"}}
{"cell":"1-a","run":1,"status":"ok"}
`)
	h, runs, err := parseLog(older)
	if err != nil || !slices.Equal(ids(runs), []string{"1-a"}) || len((Identity{"grid": "a"}).differ(h.Identity)) > 0 {
		t.Errorf("header %v, runs %v, error %v", h, runs, err)
	}
}
