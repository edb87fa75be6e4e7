package train_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

// A run ends after patience validations without an improvement, with a checkpoint. A resume goes on counting, and does
// not train on unless patience is raised.
func TestEarlyStop(t *testing.T) {
	t.Parallel()
	val := textFile(t)
	for _, ranks := range fewer(2, 1) {
		dir := t.TempDir()
		run := func(dir string, from int, want string, set ...string) (last metrics.Step) {
			t.Helper()
			set = append([]string{"train.steps=9", "data.validation={path: " + val + ", every: 1}", "optimizer.lr=0"},
				set...)
			out := mustRunAhead(t, load(t, tiny, ranks, set...), ranks, train.Options{RunDir: dir, Resume: true}, ranks-1)
			if out.stopped || !strings.Contains(strings.Join(out.notices, "\n"), want) {
				t.Errorf("%d ranks, %v: stopped %t, want the notice %q in %q", ranks, set, out.stopped, want, out.notices)
			}
			if n := len(out.steps); n > 0 {
				last = out.steps[n-1]
			}
			newest, err := os.ReadFile(filepath.Join(dir, "checkpoints", "latest"))
			if want := fmt.Sprintf("step-%08d\n", from+len(out.steps)); err != nil || string(newest) != want {
				t.Errorf("%d ranks, %v: the newest checkpoint is %q, %v, want %q", ranks, set, newest, err, want)
			}
			return last
		}
		early := func(last metrics.Step, step int64) {
			t.Helper()
			if last.Step != step || !last.EarlyStop {
				t.Errorf("%d ranks: ended with %+v, want an early stop at step %d", ranks, last, step)
			}
		}
		// The weights do not change, so only the first validation improves.
		last := run(dir, 0, "", "train={steps: 3, early_stop: {patience: 3}}")
		if last.Step != 3 || last.EarlyStop {
			t.Errorf("%d ranks: ended with %+v", ranks, last)
		}
		early(run(dir, 3, "step 4: training ends early: 3 validations", "train.early_stop.patience=3"), 4)
		if last := run(dir, 4, "ended early at step 4", "train.early_stop.patience=3"); last.Step != 0 {
			t.Errorf("%d ranks: trained on to %+v", ranks, last)
		}
		early(run(dir, 4, "", "train.early_stop.patience=4"), 5)
		if last := run(dir, 5, ""); last.Step != 9 || last.EarlyStop {
			t.Errorf("%d ranks: without patience it ended with %+v", ranks, last)
		}
		if last := run(t.TempDir(), 0, "", "optimizer.lr=1e-2", "train.early_stop.patience=1"); last.Step != 9 {
			t.Errorf("%d ranks: ended with %+v, although the loss falls", ranks, last)
		}
		early(run(t.TempDir(), 0, "", "optimizer.lr=1e-2", "train.early_stop={patience: 1, min_delta: 9}"), 2)
	}
}
