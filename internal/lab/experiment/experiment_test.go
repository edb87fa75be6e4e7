package experiment

import (
	"encoding/csv"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/readable"
)

// load reads an experiment with an existing base.
func load(t *testing.T, text string) (*Experiment, error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"scale.yaml": text, "train.yaml": "", "text.txt": "text"} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	return Load(filepath.Join(dir, "scale.yaml"))
}

func TestLoad(t *testing.T) {
	e := must.Have(load(t, `
base: train.yaml
set: {train.steps: 20, data: {seed: 3, path: text.txt}, checkpoint.interval: 5m}
grid:
  data.seq_len: [1K, 2048]
  nproc: [1, 2]
  parallel.algorithm: [ring, allgather]
  optimizer.betas: [[0.9, 0.95]]
skip: [{nproc: 1, parallel.algorithm: allgather}]
warmup: 4
repeat: 2
limit: 90s
`))
	beside := filepath.Join(filepath.Dir(e.Path), "text.txt")
	if want := (map[string]any{"train.steps": int64(20), "data.seed": int64(3), "data.path": beside,
		"checkpoint.interval": "5m"}); !reflect.DeepEqual(e.Set, want) {
		t.Errorf("set is %v; want %v", e.Set, want)
	}
	if e.Name != "scale" || e.Warmup != 4 || e.Repeat != 2 || e.Limit != 90*time.Second || !e.Saves() {
		t.Errorf("got %+v", e)
	}
	cells := e.Cells()
	if len(cells) != 8 {
		t.Fatalf("%d cells", len(cells))
	}
	var skipped []string
	for i := range cells {
		if cells[i].Status == Skipped {
			skipped = append(skipped, cells[i].ID)
		}
	}
	if want := []string{"2-1024-1-allgather-_0.9_0.95_", "6-2048-1-allgather-_0.9_0.95_"}; !slices.Equal(skipped,
		want) {
		t.Errorf("skipped are %v; want %v", skipped, want)
	}
	flags := strings.Join(e.Flags(&cells[4], []string{"train.steps=30"}), " ")
	want := "train.steps=20 data.seed=3 data.path=" + beside + " checkpoint.interval=5m train.steps=30 " +
		"data.seq_len=2048 parallel.algorithm=ring optimizer.betas=[0.9, 0.95]"
	if !strings.HasSuffix(flags, want) || !strings.HasPrefix(flags, "lr_schedule.warmup_steps=0 ") {
		t.Errorf("flags are %s; want at the end %s", flags, want)
	}
	if flags := e.Flags(&cells[4], []string{"lr_schedule.warmup_ratio=0.1"}); strings.Contains(strings.Join(flags, " "),
		"warmup_steps") {
		t.Errorf("flags of a cell with a warm-up: %s", flags)
	}
}

// All faults are reported at once, each with its line, key and fix.
func TestLoadTellsAllFaults(t *testing.T) {
	_, err := load(t, `bas: train.yaml
set: {train.stepz: 3, nproc: 2, train.seed: no}
grid:
  data.seq_lenn: [1K]
  parallel.algorithm: [rign, ring, ring]
  nprok: [1]
  nproc: [0, two]
  device: [gpu]
  memory.shard: none
  data.seq_len: []
skip: [{nproc: 1}, {device: tpu}, 3]
warmup: x
repeat: 0
limit: 10
extra: 1
`)
	if err == nil {
		t.Fatal("no fault was found")
	}
	for _, want := range []string{
		"scale.yaml:1: bas: unknown key; did you mean base?", "scale.yaml:1: base: missing",
		"scale.yaml:2: train.stepz: unknown key; did you mean train.steps?",
		"scale.yaml:2: nproc: ", "scale.yaml:2: train.seed:",
		"scale.yaml:4: data.seq_lenn: unknown key; did you mean data.seq_len?",
		`scale.yaml:5: parallel.algorithm: "rign" is not a choice; did you mean ring?`,
		"scale.yaml:5: parallel.algorithm: \"ring\" is in the list twice",
		"scale.yaml:6: nprok: unknown key; did you mean nproc?",
		"scale.yaml:7: nproc: 0 is out of range", "scale.yaml:7: nproc: \"two\" is not an integer",
		`scale.yaml:8: device: "gpu"`,
		"scale.yaml:9: memory.shard: found the text \"none\"; want a list",
		"scale.yaml:10: data.seq_len: found a list",
		`scale.yaml:11: device: "tpu"`, "scale.yaml:12: warmup:",
		"scale.yaml:13: repeat: 0 is out of range", "scale.yaml:14: limit: 10 has no unit",
		"scale.yaml:15: extra: unknown key",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("it does not say %q:\n%v", want, err)
		}
	}
	for text, want := range map[string]string{
		"":                                       "the file is empty",
		"- base":                                 "found a list",
		"base: nothing.yaml\ngrid: {nproc: [1]}": "no file",
		"base: train.yaml\nset: {train.steps: 3}\ngrid: {train.steps: [1, 2]}": "train.steps: ",
		"base: train.yaml\ngrid: {nproc: [1]}\n---\nbase: x":                   "a second YAML document",
		"base: train.yaml\ngrid: {model: [1]}":                                 "it is a section",
	} {
		if _, err := load(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
	}
}

func TestSettle(t *testing.T) {
	cells := []Cell{{ID: "a", Status: Pending}, {ID: "b", Status: Pending}, {ID: "c", Status: Pending},
		{ID: "d", Status: Skipped}}
	count := func(steps ...float64) *Counted {
		return &Counted{StepSeconds: steps, TokensPerSecond: []float64{10}, MemoryBytes: int64(steps[0])}
	}
	Settle(cells, []Run{
		{Cell: "a", Run: 1, Status: Failed, Dir: "x", Counted: count(100)}, // replaced below
		{Cell: "a", Run: 2, Status: OK, Dir: "cells/a/2", Counted: count(5, 4)},
		{Cell: "a", Run: 1, Status: OK, Dir: "cells/a/1", Counted: count(1, 3)},
		{Cell: "b", Run: 1, Status: OK, Dir: "cells/b/1", Counted: count(1)},
		{Cell: "c", Run: 1, Status: OutOfMemory, Error: "too much", Plan: Plan{Memory: &Memory{Weights: 3,
			Workspace: 4}}},
	}, 2)
	a, b, c := cells[0], cells[1], cells[2]
	if a.Status != OK || a.StepSeconds != 3.5 || a.StepSecondsMin != 1 || a.StepSecondsMax != 5 || a.MemoryBytes != 5 ||
		a.Runs != 2 ||
		!slices.Equal(a.RunDirs, []string{"cells/a/1", "cells/a/2"}) || a.CommWaitSeconds != nil {
		t.Errorf("two good runs: %+v", a)
	}
	if b.Status != Pending || b.Runs != 1 {
		t.Errorf("one good run of two: %+v", b)
	}
	if c.Status != OutOfMemory || c.Error != "too much" || c.Runs != 0 || c.PlannedMemoryBytes != 7 {
		t.Errorf("one that was not started: %+v", c)
	}
	if cells[3].Status != Skipped {
		t.Errorf("one that is left out: %+v", cells[3])
	}
}

func TestCSV(t *testing.T) {
	wait := 0.0
	r := &Results{Grid: []Axis{{"data.seq_len", nil}, {"nproc", nil}}, Cells: []Cell{
		{Values: map[string]any{"data.seq_len": int64(131072), "nproc": int64(2)},
			Choices: Choices{"flash", "zigzag", "full"}, Status: OK, StepSeconds: 1e-7, TokensPerSecond: 1e9,
			MemoryBytes: 1 << 40, CommWaitSeconds: &wait},
		{Values: map[string]any{"data.seq_len": int64(1), "nproc": int64(1)}, Status: Skipped},
		{Values: map[string]any{"data.seq_len": int64(1), "nproc": int64(2)}, Status: Failed,
			Error: `a "quoted", long` + "\nreason"},
	}}
	var b strings.Builder
	must.Do(t, r.WriteCSV(&b))
	rows := must.Have(csv.NewReader(strings.NewReader(b.String())).ReadAll())
	want := [][]string{
		strings.Split("data.seq_len,nproc,backend,layout,recompute,status,tokens_per_second,"+
			"tokens_per_second_per_device,tflops_per_device,mfu,step_seconds,step_seconds_min,step_seconds_max,"+
			"memory_bytes,planned_memory_bytes,comm_wait_seconds,predicted_step_seconds,error", ","),
		{"131072", "2", "flash", "zigzag", "full", "ok", "1000000000", "", "", "", "0.0000001", "", "", "1099511627776",
			"", "0", "", ""},
		{"1", "2", "", "", "", "failed", "", "", "", "", "", "", "", "", "", "", "", "a \"quoted\", long\nreason"},
	}
	if !reflect.DeepEqual(rows, want) {
		t.Errorf("got\n%v\nwant\n%v", rows, want)
	}
	table := r.Table()
	head := []string{"data.seq_len", "nproc", "backend", "layout", "recompute", "status", "step s", "tok/s", "GiB"}
	lines := [][]string{{"128K", "2", "flash", "zigzag", "full", "ok", readable.Number(1e-7), "1,000,000,000",
		readable.Number(1024)}, {"1", "2", "", "", "", "failed", "", "", ""}}
	if !slices.Equal(table.Head, head) || !reflect.DeepEqual(table.Rows, lines) || len(table.Notes) != 1 ||
		!strings.HasPrefix(table.Notes[0], "seq_len=1 nproc=2  failed: a ") {
		t.Errorf("table %q", table)
	}
}
