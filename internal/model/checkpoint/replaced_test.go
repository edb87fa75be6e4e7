package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// A file with the name of a checkpoint's directory is replaced by the checkpoint of that step, without remains.
func TestFileInPlaceOfACheckpoint(t *testing.T) {
	for _, link := range []bool{false, true} {
		dir, _ := saved(t, Options{}, 1)
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
		f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "second", Warn: func(err error) { t.Error(err) }})
		f.mustSave(t, 2, 3)
		must.Do(t, f.close())
		checkSteps(t, fmt.Sprintf("link %t", link), dir, 1, 2, 3)
	}
}

// A checkpoint contains only the files of its own save, as the ranks wrote them.
func TestCheckpointHoldsItsOwnFiles(t *testing.T) {
	dir, _ := saved(t, Options{}, 1)
	f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "second"})
	tmp := filepath.Join(dir, "step-00000002.tmp-second")
	must.Do(t, os.MkdirAll(filepath.Join(tmp, "earlier"), 0o755))
	f.mustSave(t, 2)
	want := []string{manifestName, "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}
	if got := names(t, filepath.Join(dir, "step-00000002")); !slices.Equal(got, want) {
		t.Errorf("the checkpoint holds %q, want %q", got, want)
	}
	f.savers[1].at = func(point string) error {
		if point == "shard synced" { // another writer on the shared disk
			return os.Truncate(filepath.Join(dir, "step-00000003.tmp-second", want[2]), 100)
		}
		return nil
	}
	if err := f.save(t, 3); err == nil {
		t.Error("a checkpoint was made of a shard that is cut short")
	}
	if got := names(t, dir); slices.Contains(got, "step-00000003") {
		t.Errorf("the directory holds %q", got)
	}
	must.Do(t, f.close())
}

// A start renames nothing once a newer start is recorded, even before that one has removed any file.
func TestNoNameAfterANewerStart(t *testing.T) {
	dir := t.TempDir()
	old := beginner(t, dir, "old", 1)
	old.mustSave(t, 1)
	old.savers[0].at = func(point string) error {
		if point == "manifest written" {
			record(t, &hooked{store: must.Have(diskOf(rooted(dir), nil))}, 2)
		}
		return nil
	}
	if err := old.save(t, 2); !errors.Is(err, ErrSuperseded) {
		t.Errorf("the save of the old start: %v", err)
	}
	checkSteps(t, "after the save", dir, 1)
}
