package experiment

import (
	"bytes"
	"reflect"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/must"
)

func TestResultsReadBack(t *testing.T) {
	none := 0.0
	want := &Results{
		Version: Version, Name: "scale", Command: "cprun scale scale.yaml", Commit: "abc", Machine: "2 cores",
		Base: "train.yaml", Device: "cpu",
		Created: time.Date(2026, 11, 22, 23, 40, 0, 0, time.UTC),
		Grid:    []Axis{{"data.seq_len", []any{1024.0, 2048.0}}, {"parallel.algorithm", []any{"ring"}}},
		Set:     map[string]any{"train.steps": 5.0},
		Cells: []Cell{{
			ID: "a", Values: map[string]any{"data.seq_len": 1024.0, "parallel.algorithm": "ring"}, Status: OK, Runs: 2,
			StepSeconds: 0.25, CommWaitSeconds: &none, Memory: &Memory{Weights: 1}, RunDirs: []string{"cells/a/1"},
		}},
	}
	var b bytes.Buffer
	must.Do(t, files.WriteJSON(&b, " ", want))
	got, err := Decode(&b)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, %v; want %+v", got, err, want)
	}
	if _, err := Decode(bytes.NewBufferString(`{"version": 99}`)); err == nil {
		t.Error("a results.json of another version was read")
	}
}

func TestText(t *testing.T) {
	for want, value := range map[string]any{
		"": nil, "1048576": int64(1 << 20), "0.0000001": 1e-7, "131072": 131072.0, "true": true, "ring": "ring",
		"[0.9,0.95]": []any{0.9, 0.95},
	} {
		if got := Text(value); got != want {
			t.Errorf("Text(%v) = %q; want %q", value, got, want)
		}
	}
}
