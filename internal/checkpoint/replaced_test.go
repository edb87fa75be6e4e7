package checkpoint

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A file in the place of a checkpoint's directory gives way to the checkpoint of that step, and leaves nothing.
func TestFileInPlaceOfACheckpoint(t *testing.T) {
	for _, link := range []bool{false, true} {
		dir, params := saved(t, Options{}, 1)
		path := filepath.Join(dir, "step-00000002")
		var err error
		if link {
			err = os.Symlink(t.TempDir(), path)
		} else {
			err = os.WriteFile(path, []byte("no directory"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, ranges := small(2)
		f, err := newFleet(params, ranges, Options{Dir: rooted(dir), RunID: "second", Warn: func(err error) { t.Error(err) }})
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []int64{2, 3} {
			if err := f.each(func(rank int, s *Saver) error { return s.Save(t.Context(), f.snapshot(rank, step)) }); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.close(); err != nil {
			t.Fatal(err)
		}
		if got, want := names(t, dir), []string{"latest", "step-00000001", "step-00000002", "step-00000003"}; !slices.Equal(got, want) {
			t.Errorf("link %t: directory holds %q, want %q", link, got, want)
		}
	}
}
