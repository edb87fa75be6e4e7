package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/checkpoint/checkpointtest"
)

// FuzzLatest checks that, for any content of the file latest, each checkpoint of the directory is tried once and
// nothing else is.
func FuzzLatest(f *testing.F) {
	for _, text := range []string{"step-00000002\n", "", "step-00000009", "../step-00000001", "step-00000002.old-x",
		"\x00\xff\x1b[31m", strings.Repeat("x", 5000)} {
		f.Add([]byte(text))
	}
	dir := f.TempDir()
	names := []string{"step-00000001", "step-00000002", "step-00000002.old-x", "step-00000003"}
	for _, name := range names {
		must.Do(f, os.Mkdir(filepath.Join(dir, name), 0o700))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		must.Do(t, os.WriteFile(filepath.Join(dir, latestName), text, 0o600))
		root := rooted(dir)
		defer root.Close()
		d := must.Have(reopen(root))
		defer d.Close()
		all := must.Have(list(d))
		order, missing := candidates(d, all)
		reason := errText(missing)
		if got := slices.Sorted(slices.Values(order)); !slices.Equal(got, names) {
			t.Errorf("latest %q: %q are tried", text, order)
		}
		if len(reason) > 1000 {
			t.Errorf("latest %.40q: a reason of %d bytes", text, len(reason))
		}
		if c, reasons, err := LatestIn(t.Context(), root); !errors.Is(err, ErrNoneWhole) || len(reasons) < len(names) {
			t.Errorf("latest %.40q: %v, %q, %v", text, c, reasons, err)
		}
	})
}

// An attacker with write access to the run directory may place links there before the run.
func TestSavesFollowNoLink(t *testing.T) {
	for _, name := range []string{
		latestName, latestName + ".tmp-first", "step-00000001.tmp-first", "step-00000001", "step-00000001.old-first",
		"step-00000001.tmp-first/manifest.json", "step-00000001.tmp-first/shard-00000-of-00002.safetensors",
	} {
		t.Run(name, func(t *testing.T) {
			dir, outside := t.TempDir(), t.TempDir()
			target := filepath.Join(outside, "target")
			if strings.HasPrefix(name, "step") && !strings.Contains(name, "/") {
				target = outside
			}
			path := filepath.Join(dir, name)
			must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must.Do(t, os.Symlink(target, path))
			params, ranges := small(2)
			f, err := newFleet(params, ranges, Options{Dir: rooted(dir), RunID: "first"})
			if err == nil {
				// It may be refused.
				_ = f.save(t, 1)
				_ = f.close()
			}
			if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
				t.Errorf("outside there are %v, %v", left, err)
			}
		})
	}
}

func TestPipesAmongCheckpoints(t *testing.T) {
	dir, params := saved(t, Options{}, 1, 2)
	for _, name := range []string{latestName, "step-00000002/manifest.json",
		"step-00000001/shard-00000-of-00002.safetensors"} {
		path := filepath.Join(dir, name)
		must.Do(t, errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)))
		c, reasons, err := Latest(t.Context(), dir)
		if len(reasons) == 0 {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			checkContent(t, c, params)
			c.Close()
		}
	}
	must.Have(Lock(rooted(dir), ""))
	must.Do(t, errors.Join(os.Remove(filepath.Join(dir, ".lock")),
		unix.Mkfifo(filepath.Join(dir, ".lock"), 0o600)))
	if _, err := Lock(rooted(dir), ""); err == nil {
		t.Error("a pipe was locked")
	}
}

// A manifest that claims more bytes than its files have is refused before any allocation.
func TestManifestClaimsNoMoreThanItsFiles(t *testing.T) {
	dir, _ := saved(t, Options{}, 1)
	path := filepath.Join(dir, "step-00000001", manifestName)
	text := must.Have(os.ReadFile(path))
	big := strings.NewReplacer(`"length": 4`, `"length": 1099511627776`, "    4\n",
		"    1099511627776\n").Replace(string(text))
	if big == string(text) {
		t.Fatal("the manifest has no parameter of 4 elements")
	}
	if _, err := ParseManifest(checkpointtest.Summed([]byte(big))); err == nil ||
		!strings.Contains(err.Error(), "more elements than its") {
		t.Errorf("%v", err)
	}
	many := `{"format":"cprun-checkpoint","version":1,"fields":[` + strings.Repeat(`"",`, maxValues) + `""]}`
	if _, err := ParseManifest([]byte(many)); err == nil || !strings.Contains(err.Error(), "values; at most") {
		t.Errorf("%v", err)
	}
}
