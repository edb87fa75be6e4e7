package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// edit changes a file of a checkpoint.
func edit(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	data := must.Have(os.ReadFile(path))
	must.Do(t, os.WriteFile(path, change(data), 0o644))
}

const shard1 = "shard-00001-of-00002.safetensors"

// TestDamage damages the newest checkpoint in many ways. Each time Latest reports the damage and opens the older one.
func TestDamage(t *testing.T) {
	change := func(name string, to func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, dir string) { edit(t, filepath.Join(dir, name), to) }
	}
	flip := func(at func(n int) int) func(*testing.T, string) {
		return change(shard1, func(b []byte) []byte { b[at(len(b))] ^= 0x10; return b })
	}
	before := func(name string) func(*testing.T, string) { // takes the file of the step before
		return func(t *testing.T, dir string) {
			edit(t, filepath.Join(dir, name), func([]byte) []byte {
				b, _ := os.ReadFile(filepath.Join(filepath.Dir(dir), dirName(1), name))
				return b
			})
		}
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		reason string
	}{
		{"a bit of the data", flip(func(n int) int { return n - 3 }), "checksum"},
		{"a bit of a shard's header", flip(func(int) int { return 20 }), "safetensors file shard-00001"},
		{"a bit of a shard's length", flip(func(int) int { return 0 }), "safetensors file shard-00001"},
		{"a shard cut short", change(shard1, func(b []byte) []byte { return b[:len(b)-4] }), "bytes, the manifest says"},
		{"a shard that is too long", change(shard1, func(b []byte) []byte { return append(b, 0) }),
			"bytes, the manifest says"},
		{"a shard that is empty", change(shard1, func(b []byte) []byte { return nil }), "0 bytes, the manifest says"},
		{"no shard", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, shard1)) }, "no such file"},
		{"a link for a shard", func(t *testing.T, dir string) {
			os.Rename(filepath.Join(dir, shard1), filepath.Join(dir, "x"))
			os.Symlink("x", filepath.Join(dir, shard1))
		}, "not a regular file"},
		{"no manifest", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, manifestName)) }, "no such file"},
		{"a manifest cut short", change(manifestName, func(b []byte) []byte { return b[:len(b)/2] }), "unexpected end"},
		{"a manifest of zeros", change(manifestName, func(b []byte) []byte { return make([]byte, len(b)) }),
			"invalid character"},
		{"a manifest of another step", before(manifestName), "its step is 1"},
		{"a bit of the manifest that nothing else knows", change(manifestName, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"tokens": 256`), []byte(`"tokens": 257`), 1)
		}), "it has changed since it was written"},
		{"a shard of the step before", before(shard1), "checksum"},
		{"nothing of it left", func(t *testing.T, dir string) { os.RemoveAll(dir) }, "which does not exist"},
	} {
		dir, params := saved(t, Options{}, 1, 2)
		newest := filepath.Join(dir, dirName(2))
		c.damage(t, newest)
		step, reasons := latestStep(t, dir, params)
		if step != 1 || len(reasons) != 1 || !strings.Contains(reasons[0], c.reason) ||
			!strings.Contains(reasons[0], dirName(2)) {
			t.Errorf("%s: step %d, passed over %q, want step 1 and a reason with %q", c.name, step, reasons, c.reason)
		}
		// The damaged one must not load by name either.
		_, own := small(1)
		if err := loadFrom(t, newest, params, own[0], fill(nil, own[0], 0)...); !errors.Is(err, ErrNotWhole) {
			t.Errorf("%s: Load = %v, want ErrNotWhole", c.name, err)
		}
	}
}

// TestBefore resumes in a directory from before generations existed.
func TestBefore(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "before"))))
	params, _ := small(2)
	checkLatest(t, "before a save", dir, params, 2, 0)
	saved(t, Options{Dir: rooted(dir), RunID: "after-0"}, 3)
	checkLatest(t, "after a save", dir, params, 3, 0)
}

// TestReadsWhatItNeeds checks that damage to a shard does not stop a rank that reads nothing from it.
func TestReadsWhatItNeeds(t *testing.T) {
	dir, params := saved(t, Options{}, 1)
	step := filepath.Join(dir, dirName(1))
	edit(t, filepath.Join(step, shard1), func(b []byte) []byte { b[len(b)-1] ^= 1; return b })
	_, ranges := small(2)
	if err := loadFrom(t, step, params, ranges[0], fill(nil, ranges[0], 0)...); err != nil {
		t.Errorf("Load of the half in the whole shard: %v", err)
	}
	if err := loadFrom(t, step, params, ranges[1], fill(nil, ranges[1], 0)...); !errors.Is(err, ErrNotWhole) {
		t.Errorf("Load of the half in the damaged shard: %v, want ErrNotWhole", err)
	}
}

func TestLatest(t *testing.T) {
	set := func(dir, text string) { os.WriteFile(filepath.Join(dir, latestName), []byte(text), 0o644) }
	for _, c := range []struct {
		name    string
		prepare func(dir string)
		want    int64
		reasons int
	}{
		{"as it was written", func(dir string) {}, 3, 0},
		{"latest is missing", func(dir string) { os.Remove(filepath.Join(dir, latestName)) }, 3, 0},
		{"latest is empty", func(dir string) { set(dir, "") }, 3, 1},
		{"latest leads out", func(dir string) { set(dir, "../checkpoints/step-00000001") }, 3, 1},
		{"latest was set back by hand", func(dir string) { set(dir, "step-00000001") }, 1, 0},
		{"the one it names is set aside", func(dir string) {
			set(dir, "step-00000002\n")
			os.Rename(filepath.Join(dir, dirName(2)), filepath.Join(dir, dirName(2)+".old-dead"))
		}, 2, 0},
		{"set back to a damaged one", func(dir string) {
			set(dir, "step-00000002\n")
			os.Remove(filepath.Join(dir, dirName(2), manifestName))
		}, 1, 1},
		{"only a later one is whole", func(dir string) {
			set(dir, "step-00000002\n")
			os.Remove(filepath.Join(dir, dirName(1), manifestName))
			os.Remove(filepath.Join(dir, dirName(2), manifestName))
		}, 3, 2},
		{"what is no checkpoint is let be", func(dir string) {
			os.Mkdir(filepath.Join(dir, "step-00000009.tmp-dead"), 0o755)
			os.Mkdir(filepath.Join(dir, "step-x"), 0o755)
			os.WriteFile(filepath.Join(dir, "step-00000010"), nil, 0o644)
		}, 3, 0},
	} {
		dir, params := saved(t, Options{}, 1, 2, 3)
		c.prepare(dir)
		checkLatest(t, c.name, dir, params, c.want, c.reasons)
	}
}

func TestLatestNone(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		if _, reasons, err := Latest(t.Context(), path); !errors.Is(err, ErrNone) || len(reasons) > 0 {
			t.Errorf("Latest(%s) = %v, %q, want ErrNone", path, err, reasons)
		}
	}
	if name, err := OfStep(dir, 1); !errors.Is(err, ErrNone) {
		t.Errorf("OfStep in an empty directory = %q, %v, want ErrNone", name, err)
	}
	full, _ := saved(t, Options{}, 1, 2)
	for step := range int64(2) {
		os.Remove(filepath.Join(full, dirName(step+1), manifestName))
	}
	if _, reasons, err := Latest(t.Context(), full); !errors.Is(err, ErrNoneWhole) || len(reasons) != 2 {
		t.Errorf("Latest where nothing is whole = %v, %q, want ErrNoneWhole and two reasons", err, reasons)
	}
	for step := range int64(2) {
		os.RemoveAll(filepath.Join(full, dirName(step+1)))
	}
	if _, reasons, err := Latest(t.Context(), full); !errors.Is(err, ErrNoneWhole) || len(reasons) != 1 {
		t.Errorf("Latest where the one that latest names is gone = %v, %q, want ErrNoneWhole and a reason", err,
			reasons)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	whole, _ := saved(t, Options{}, 1)
	if _, _, err := Latest(ctx, whole); !errors.Is(err, context.Canceled) || errors.Is(err, ErrNotWhole) {
		t.Errorf("Latest with a cancelled context = %v", err)
	}
}

// TestNewerVersion checks that a checkpoint of a newer cprun is refused. Latest must not silently fall back to an older
// one either.
func TestNewerVersion(t *testing.T) {
	dir, _ := saved(t, Options{}, 1, 2)
	edit(t, filepath.Join(dir, dirName(2), manifestName), func(b []byte) []byte {
		return bytes.Replace(b, []byte(`"version": 2`), []byte(`"version": 3`), 1)
	})
	for name, err := range map[string]error{
		"Open":   func() error { _, err := Open(filepath.Join(dir, dirName(2))); return err }(),
		"Latest": func() error { _, _, err := Latest(t.Context(), dir); return err }(),
	} {
		if !errors.Is(err, ErrVersion) || errors.Is(err, ErrNotWhole) ||
			!strings.Contains(fmt.Sprint(err), "version 3") {
			t.Errorf("%s = %v, want ErrVersion", name, err)
		}
	}
}

func TestFind(t *testing.T) {
	run := t.TempDir()
	dir, params := saved(t, Options{Dir: rooted(filepath.Join(run, "checkpoints"))}, 1, 2)
	for path, want := range map[string]int64{run: 2, dir: 2, filepath.Join(dir, latestName): 2,
		filepath.Join(dir, dirName(1)): 1} {
		c, _, err := Find(t.Context(), path)
		if err != nil {
			t.Errorf("Find(%s): %v", path, err)
			continue
		}
		if checkContent(t, c, params); c.Manifest.Step != want {
			t.Errorf("Find(%s) = step %d, want %d", path, c.Manifest.Step, want)
		}
		c.Close()
	}
	if _, _, err := Find(t.Context(), filepath.Join(run, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Find of nothing = %v, want that it does not exist", err)
	}
	edit(t, filepath.Join(dir, dirName(1), shard1), func(b []byte) []byte { b[len(b)-1] ^= 1; return b })
	if _, _, err := Find(t.Context(), filepath.Join(dir, dirName(1))); !errors.Is(err, ErrNotWhole) {
		t.Errorf("Find of a damaged one = %v, want ErrNotWhole", err)
	}
}

// TestMismatch checks that one error lists all differences to a model.
func TestMismatch(t *testing.T) {
	dir, params := saved(t, Options{}, 1)
	other := []Param{{Name: "new", Shape: []int{2}}}
	at := int64(2)
	for _, p := range params {
		switch p.Name {
		case "norm":
			continue
		case "embed":
			p.Shape = []int{4, 5}
		}
		p.Offset = at
		span, _ := p.span()
		at = span.Hi
		other = append(other, p)
	}
	own := Range{0, at}
	err := loadFrom(t, filepath.Join(dir, dirName(1)), other, own, fill(nil, own, 0)...)
	for _, want := range []string{"new [2] is missing", "embed is [5 4] in the checkpoint and [4 5] in the model",
		"norm [4] is not in the model"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Load into another model = %v, want %q", err, want)
		}
	}
	_, ranges := small(2)
	err = loadFrom(t, filepath.Join(dir, dirName(1)), params, ranges[0],
		Field{"momentum", make([]float32, ranges[0].Len())})
	if err == nil || !strings.Contains(err.Error(), `no field "momentum"`) {
		t.Errorf("Load of a field that is not there = %v", err)
	}
}

func TestReadOutside(t *testing.T) {
	dir, _ := saved(t, Options{}, 1)
	c := must.Have(Open(filepath.Join(dir, dirName(1))))
	defer c.Close()
	for _, r := range []struct {
		param  string
		offset int64
		n      int
	}{{"embed", -1, 1}, {"embed", 15, 6}, {"embed", 20, 1}, {"none", 0, 1}} {
		if err := c.Read(t.Context(), r.param, FieldParam, r.offset, make([]float32, r.n)); err == nil {
			t.Errorf("Read(%s, %d, %d elements) gave no error", r.param, r.offset, r.n)
		}
	}
}

// loadFrom opens a checkpoint, loads from it and closes it.
func loadFrom(t *testing.T, dir string, params []Param, want Range, fields ...Field) error {
	t.Helper()
	c, err := Open(dir)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Load(t.Context(), params, want, fields...)
}
