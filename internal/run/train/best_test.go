package train_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// checkpoints/best names the step with the lowest validation loss, also after a resume, and is kept.
func TestBest(t *testing.T) {
	t.Parallel()
	val := textFile(t)
	for _, ranks := range []int{1, 2} {
		for _, async := range []bool{false, true} {
			if testing.Short() && async != (ranks == 2) {
				continue // saves in the background on two ranks
			}
			dir := t.TempDir()
			losses := map[string]float64{}
			// The rate is good for three steps, then 0 for two, then so high that the second step is worse.
			run := func(want string, set ...string) {
				t.Helper()
				set = append([]string{"data.validation={path: " + val + ", every: 1}",
					fmt.Sprintf("checkpoint={best: true, keep: 1, async: %t}", async)}, set...)
				out := mustRunAhead(t, load(t, tiny, ranks, set...), ranks, train.Options{RunDir: dir, Resume: true}, 2)
				for _, s := range out.steps {
					losses[fmt.Sprintf("step-%08d", s.Step)] = float64(*s.ValLoss)
				}
				text, err := os.ReadFile(filepath.Join(dir, "checkpoints", "best"))
				if got := strings.TrimSpace(string(text)); err != nil || got != want {
					t.Errorf("%d ranks, async %t, %v: best is %q, %v, want %q of %v", ranks, async, set, got, err, want,
						losses)
				}
				for name, loss := range losses {
					if loss < losses[want] {
						t.Errorf("%d ranks, %v: step %s has %v, best %s has %v", ranks, set, name, loss, want, losses[want])
					}
				}
				newest := fmt.Sprintf("step-%08d", out.steps[len(out.steps)-1].Step)
				kept, err := filepath.Glob(filepath.Join(dir, "checkpoints", "step-*"))
				names := map[string]bool{want: true, newest: true}
				if err != nil || len(kept) != len(names) || !names[filepath.Base(kept[0])] {
					t.Errorf("%d ranks, %v: %v are kept, %v, want %v", ranks, set, kept, err, names)
				}
			}
			run("step-00000003", "train.steps=3")
			run("step-00000003", "train.steps=5", "optimizer.lr=0")
			run("step-00000006", "train.steps=7", "optimizer.lr=0.5")
			if err := os.Remove(filepath.Join(dir, "checkpoints", "best")); err != nil {
				t.Fatal(err)
			}
			clear(losses)
			run("step-00000008", "train.steps=9", "optimizer.lr=0")
		}
	}
}

// A resume does not go by a damaged best checkpoint, and says so.
func TestDamagedBest(t *testing.T) {
	dir, set := t.TempDir(), []string{"data.validation={path: " + textFile(t) + ", every: 1}",
		"checkpoint={best: true, keep: 1, async: false}"}
	mustRun(t, load(t, tiny, 1, append(set, "train.steps=2")...), 1, train.Options{RunDir: dir})
	mustRun(t, load(t, tiny, 1, append(set, "optimizer.lr=0", "train.steps=3")...), 1,
		train.Options{RunDir: dir, Resume: true})
	if err := os.Remove(filepath.Join(dir, "checkpoints", "step-00000002", "manifest.json")); err != nil {
		t.Fatal(err)
	}
	out := mustRun(t, load(t, tiny, 1, append(set, "optimizer.lr=0", "train.steps=4")...), 1,
		train.Options{RunDir: dir, Resume: true})
	text, err := os.ReadFile(filepath.Join(dir, "checkpoints", "best"))
	if err != nil || string(text) != "step-00000004\n" ||
		!strings.Contains(strings.Join(out.notices, "\n"), "checkpoints/best: ") {
		t.Errorf("best is %q, %v, after the notices %q", text, err, out.notices)
	}
}
