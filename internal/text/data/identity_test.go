package data

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// A resume finds out which files have changed and how, wherever they are.
func TestIdentitySaysWhatHasChanged(t *testing.T) {
	long := strings.Repeat("x", 3*maxEnds)
	identity := func(dir string, records int) *Identity {
		source := Source{Paths: []string{filepath.Join(dir, "*.txt")}, Tokenizer: asBytes}
		return must.Have(Identify([]Source{source}, int64(records)))
	}
	make := func(files map[string]string) (string, *Identity) {
		dir := put(t, files)
		text := must.Have(json.Marshal(identity(dir, len(files))))
		kept := &Identity{}
		must.Do(t, json.Unmarshal(text, kept))
		return dir, kept
	}
	_, was := make(map[string]string{"a.txt": "one", "b.txt": long, "c.txt": "three"})
	for _, c := range []struct {
		files map[string]string
		want  []string // each names a file and the change, in order
	}{
		{map[string]string{"a.txt": "one", "b.txt": long, "c.txt": "three"}, nil},
		{map[string]string{"p.txt": "one", "q.txt": long, "r.txt": "three"}, nil}, // renamed
		{map[string]string{"a.txt": "one!", "b.txt": long, "c.txt": "three"}, []string{"a.txt grew from 3 to 4"}},
		{map[string]string{"a.txt": "none", "b.txt": long, "c.txt": "three"}, []string{"a.txt has changed, and has 4"}},
		{map[string]string{"a.txt": "on", "b.txt": long, "c.txt": "three"}, []string{"a.txt has 2 bytes, not 3"}},
		{map[string]string{"a.txt": "one", "b.txt": "y" + long[1:], "c.txt": "three"}, []string{"b.txt has changed"}},
		{map[string]string{"a.txt": "one", "b.txt": long[1:] + "y", "c.txt": "three"}, []string{"b.txt has changed"}},
		{map[string]string{"a.txt": "one", "b.txt": long + "y", "c.txt": "three"},
			[]string{"b.txt grew from 3145728 to 3145729"}},
		{map[string]string{"a.txt": "one", "c.txt": "three"}, []string{"b.txt is missing", "2 files, not 3", "2 records, not 3"}},
		{map[string]string{"a.txt": "one", "b.txt": long, "c.txt": "three", "d.txt": ""},
			[]string{"d.txt is added", "4 files, not 3", "4 records, not 3"}},
	} {
		dir, _ := make(c.files)
		id := identity(dir, len(c.files))
		got, err := id.Changes(was)
		if err != nil || len(got) != len(c.want) {
			t.Errorf("%q, %v, want %q", got, err, c.want)
			continue
		}
		for i := range got {
			if !strings.Contains(got[i], c.want[i]) {
				t.Errorf("%q, want %q", got[i], c.want[i])
			}
		}
		id.Records = -1
		if again, _ := id.Changes(was); len(again) > len(got) {
			t.Errorf("without a count of the records: %q", again)
		}
		if id.Records = 9; c.want == nil {
			if got, _ := id.Changes(was); len(got) != 1 || got[0] != "9 records, not 3" {
				t.Errorf("other records in equal files: %q", got)
			}
		}
	}
	// Many files keep a list of the first, and a digest of all. Fewer bytes of each are read.
	many, changed := map[string]string{}, ""
	for i := range 2*firstKept + 100 {
		changed = fmt.Sprintf("%03d.txt", i)
		many[changed] = "text"
	}
	dir, was := make(many)
	if len(was.First) != firstKept || was.Count != int64(len(many)) {
		t.Errorf("%d of %d files are listed", len(was.First), was.Count)
	}
	id := identity(dir, int(was.Records))
	if got, err := id.Changes(was); err != nil || len(got) != 0 {
		t.Errorf("equal files: %q, %v", got, err)
	}
	must.Do(t, os.WriteFile(filepath.Join(dir, changed), []byte("tex!"), 0o666))
	must.Do(t, id.read(minEnds))
	if got, err := id.Changes(was); err != nil || len(got) != 1 || !strings.Contains(got[0], fmt.Sprint(firstKept)) {
		t.Errorf("a change after the list: %q, %v", got, err)
	}
	was.Ends = minEnds // as recorded with more files: read again in pieces of that size
	if got, err := id.Changes(was); err != nil || len(got) != 1 {
		t.Errorf("with other ends: %q, %v", got, err)
	}
}
