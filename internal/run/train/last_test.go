package train_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/checkpoint/checkpointtest"
	"github.com/cprun/cprun/internal/run/train"
)

// The last step is validated, whatever data.validation.every is, and none without validation data.
func TestTheLastStepIsValidated(t *testing.T) {
	for _, tc := range []struct {
		set  string
		want string
	}{
		{"data.validation={path: " + textFile(t) + ", every: 3}", "[3 4]"},
		{"data.validation={path: " + textFile(t) + ", every: 9}", "[4]"},
		{"data.validation={path: " + textFile(t) + ", every: 0}", "[]"},
	} {
		at := []int64{}
		for _, s := range curve(t, tiny, 1, "train.steps=4", tc.set) {
			if s.ValLoss != nil {
				at = append(at, s.Step)
			}
		}
		if fmt.Sprint(at) != tc.want {
			t.Errorf("%s: validations after steps %v, want %s", tc.set, at, tc.want)
		}
	}
}

// A resume restores steps, tokens and the count of steps without targets, which is between 0 and the steps.
func TestCountsOfACheckpointAreRestored(t *testing.T) {
	cfg, dir := load(t, tiny, 1, "train.steps=2"), t.TempDir()
	first := mustRun(t, cfg, 1, train.Options{RunDir: dir}).steps
	path := filepath.Join(dir, "checkpoints", "step-00000002", "manifest.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for blank, right := range map[string]bool{"0": true, "2": true, "3": false, "-1": false, `"x"`: false} {
		changed := strings.Replace(string(text), `"seeds":`, `"extra": {"blank_steps": `+blank+`}, "seeds":`, 1)
		if err := os.WriteFile(path, checkpointtest.Summed([]byte(changed)), 0o666); err != nil {
			t.Fatal(err)
		}
		longer := load(t, tiny, 1, "train.steps=3")
		out, err := runLocal(t, longer, 1, train.Options{From: filepath.Dir(path), NoSave: true})
		if (err == nil) != right {
			t.Errorf("%s steps of 2 without targets: %v", blank, err)
		}
		if err == nil && (len(out.steps) != 1 || out.steps[0].Step != 3 ||
			out.steps[0].Tokens != first[1].Tokens/2*3 || out.steps[0].Epoch != 1.5) {
			t.Errorf("goes on with %+v", out.steps)
		}
	}
}
