package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// The best checkpoint stays beyond Keep, until another one is better. A damaged or missing one is reported.
func TestBestIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoints")
	if _, err := Best(t.Context(), dir); !errors.Is(err, ErrNone) {
		t.Errorf("no directory: %v, want ErrNone", err)
	}
	f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "first", Keep: 2})
	if _, err := Best(t.Context(), dir); !errors.Is(err, ErrNone) {
		t.Errorf("no best: %v, want ErrNone", err)
	}
	for _, tc := range []struct {
		step int64
		best bool
		kept []int64
	}{{1, true, []int64{1}}, {2, false, []int64{1, 2}}, {3, false, []int64{1, 2, 3}}, {4, false, []int64{1, 3, 4}},
		{5, true, []int64{4, 5}}, {6, false, []int64{5, 6}}, {7, false, []int64{5, 6, 7}}} {
		f.best = tc.best
		f.mustSave(t, tc.step)
		want := []string{"best", "latest"}
		for _, step := range tc.kept {
			want = append(want, dirName(step))
		}
		if got := names(t, dir); !slices.Equal(got, want) {
			t.Errorf("after step %d: %q, want %q", tc.step, got, want)
		}
	}
	must.Do(t, f.close())
	for _, path := range []string{"best", dirName(5)} {
		c, _, err := Find(t.Context(), filepath.Join(dir, path))
		if err != nil {
			t.Fatal(err)
		}
		checkContent(t, c, f.params)
		if c.Close(); c.Manifest.Step != 5 {
			t.Errorf("%s is step %d, want 5", path, c.Manifest.Step)
		}
	}
	must.Do(t, os.Remove(filepath.Join(dir, dirName(5), manifestName)))
	if _, err := Best(t.Context(), dir); !errors.Is(err, ErrNotWhole) {
		t.Errorf("a damaged best: %v, want ErrNotWhole", err)
	}
	must.Do(t, os.RemoveAll(filepath.Join(dir, dirName(5))))
	if _, err := Best(t.Context(), dir); !errors.Is(err, ErrNone) {
		t.Errorf("a removed best: %v, want ErrNone", err)
	}
}
