package checkpoint

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/safetensors"
)

// golden returns the manifest of a small checkpoint in version 1, which has no checksum of its own.
func golden(t testing.TB) []byte { return manifestFile(t, "manifest-1.json") }

func manifestFile(t testing.TB, name string) []byte {
	t.Helper()
	return must.Have(os.ReadFile(filepath.Join("testdata", name)))
}

// TestGolden checks that version 1 can be read, and that version 2 is written byte for byte as before.
func TestGolden(t *testing.T) {
	data := manifestFile(t, "manifest-2.json")
	m := must.Have(ParseManifest(data))
	old, err := ParseManifest(golden(t))
	if err != nil || !reflect.DeepEqual(old.Meta, m.Meta) || !reflect.DeepEqual(old.Files, m.Files) {
		t.Errorf("version 1 is read as %+v, %v", old, err)
	}
	if m.Step != 100 || m.Seeds["train"] != 1 || len(m.Files) != 2 ||
		m.Files[1].Entries[0] != (Entry{"model.norm.weight", 2, 2}) {
		t.Errorf("ParseManifest = %+v", m)
	}
	again, err := m.encode()
	if err != nil || !bytes.Equal(again, data) {
		t.Errorf("encode = %s, %v, want\n%s", again, err, data)
	}
}

func TestManifestRefuses(t *testing.T) {
	for _, c := range []struct{ name, old, new, want string }{
		{"another format", `"cprun-checkpoint"`, `"other"`, `format "other"`},
		{"version 0", `"version": 1`, `"version": 0`, "version 0"},
		{"a newer version", `"version": 1`, `"version": 7`, "version 7"},
		{"a negative step", `"step": 100`, `"step": -1`, "step -1"},
		{"fewer samples than steps", `"samples": 200`, `"samples": 99`, "samples 99"},
		{"more samples than tokens", `"samples": 200`, `"samples": 4611686018427387904`, "step <= samples <= tokens"},
		{"a negative generation", `"step": 100`, `"generation": -1, "step": 100`, "generation -1"},
		{"more tokens than there are", `"tokens": 819200`, `"tokens": 9223372036854775807`,
			"step <= samples <= tokens"},
		{"another config", `cosine`, `linear`, "config_sha256"},
		{"a shape that overflows", `[
    4
   ]`, `[4294967296, 4294967296]`, "more elements than can be counted"},
		{"a negative length", `[
    4
   ]`, `[-4]`, "negative length"},
		{"another element type", `"F32"`, `"F64"`, "F64"},
		{"a file elsewhere", `shard-00000-of-00002.safetensors`, `../x`, "plain name"},
		{"an absolute file", `shard-00000-of-00002.safetensors`, `/etc/passwd`, "plain name"},
		{"the manifest as a shard", `shard-00000-of-00002.safetensors`, `manifest.json`, "plain name"},
		{"a file twice", `shard-00000-of-00002`, `shard-00001-of-00002`, "listed twice"},
		{"a checksum that is none", `"sha256": "0`, `"sha256": "g`, "checksum"},
		{"negative bytes", `"bytes": 88`, `"bytes": -88`, "-88 bytes"},
		{"an unknown tensor", `"tensor": "model.norm.weight"`, `"tensor": "model.norm.bias"`, "of no parameter"},
		{"a part outside", `"length": 2`, `"length": 5`, "5 elements from 0 on are not in its 4"},
		{"a part that overflows", `"offset": 2`, `"offset": 9223372036854775807`, "not in its 4"},
		{"a gap", `"length": 2`, `"length": 1`, "begins at element 2, not at 1"},
		{"an overlap", `"offset": 2`, `"offset": 1`, "begins at element 1, not at 2"},
		{"no fields", `[
  "param",
  "exp_avg"
 ]`, `[]`, "fields"},
		{"a field twice", `"exp_avg"
`, `"param"
`, "fields"},
		{"a field that no shard has", `"exp_avg"
`, `"exp_avg", "exp_avg_sq"
`, "hold 0 of 4"},
	} {
		data := golden(t)
		if !bytes.Contains(data, []byte(c.old)) {
			t.Errorf("%s: the manifest has no %q", c.name, c.old)
			continue
		}
		_, err := ParseManifest(bytes.Replace(data, []byte(c.old), []byte(c.new), 1))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// A shard has at most MaxHeader bytes of header after the 8 of its length. Further bytes that no tensor owns are
// refused.
func TestManifestCountsTheHeader(t *testing.T) {
	m := must.Have(ParseManifest(golden(t)))
	f := &m.Files[0]
	f.Bytes = safetensors.MaxHeader + 8
	for _, e := range f.Entries {
		f.Bytes += e.Length * elementSize
	}
	if _, err := m.index(); err != nil {
		t.Errorf("the largest header is refused: %v", err)
	}
	f.Bytes++
	if _, err := m.index(); err == nil || !strings.Contains(err.Error(), f.Name) {
		t.Errorf("one byte more: %v", err)
	}
}

// Extra state that is not JSON is an error, and no manifest is written.
func TestManifestOfBadState(t *testing.T) {
	m := must.Have(ParseManifest(golden(t)))
	m.Extra = map[string]json.RawMessage{"data": json.RawMessage("{")}
	if text, err := m.encode(); err == nil {
		t.Errorf("encode = %s", text)
	}
}

// TestEveryBit checks that a manifest with any one bit flipped is refused.
func TestEveryBit(t *testing.T) {
	data := manifestFile(t, "manifest-2.json")
	for i := range data {
		for bit := range 8 {
			data[i] ^= 1 << bit
			if _, err := ParseManifest(data); err == nil {
				t.Fatalf("bit %d of byte %d: %s is taken", bit, i, data[max(i-20, 0):min(i+20, len(data))])
			}
			data[i] ^= 1 << bit
		}
	}
}

// TestTensorNames checks that a parameter cannot have the tensor name of another's field.
func TestTensorNames(t *testing.T) {
	m := newManifest(Meta{}, []Param{{Name: "a", Shape: []int{0}}, {Name: "a.exp_avg", Shape: []int{0}}},
		[]Field{{Name: FieldParam}, {Name: "exp_avg"}})
	if _, err := m.index(); err == nil || !strings.Contains(err.Error(), `"a.exp_avg"`) {
		t.Errorf("index = %v, want that a.exp_avg stands twice", err)
	}
}

// FuzzManifest checks that no text makes the parser panic, and that a parsed manifest survives a round trip.
func FuzzManifest(f *testing.F) {
	f.Add(golden(f))
	f.Add(manifestFile(f, "manifest-2.json"))
	f.Add([]byte(`{"format":"cprun-checkpoint","version":1}`))
	f.Add([]byte(`{"format":"cprun-checkpoint","version":99}`))
	f.Add([]byte(`{"format":"cprun-checkpoint","version":1,"config_sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","fields":["param"],"params":[{"name":"a","shape":[0],"dtype":"F32"}],"extra":{"data":{"a":[1, 2]}}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseManifest(data)
		if err != nil {
			return
		}
		text, err := m.encode()
		if err != nil {
			t.Fatalf("encode of what was parsed: %v", err)
		}
		again, err := ParseManifest(text)
		if err != nil {
			t.Fatalf("parse of what was encoded: %v\n%s", err, text)
		}
		third, err := again.encode()
		if err != nil || !bytes.Equal(third, text) {
			t.Errorf("encoded twice:\n%s\n%s\n%v", text, third, err)
		}
		m.Extra, again.Extra = nil, nil // the encoder changes white space in them
		if !reflect.DeepEqual(m.Files, again.Files) || m.Step != again.Step {
			t.Errorf("%+v became %+v", m, again)
		}
	})
}
