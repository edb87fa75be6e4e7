package hf

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A Hub id gives the commit of refs/main in the cache. Links to blobs are followed; a cache without that commit is an
// error.
func TestModelsByName(t *testing.T) {
	defer func() { Hub = "" }()
	config, err := os.ReadFile("testdata/tiny-llama/config.json")
	if err != nil {
		t.Fatal(err)
	}
	put := func(hub, ref string) string {
		repo := filepath.Join(hub, "models--org--tiny")
		at := filepath.Join(repo, "snapshots", "0123abcd")
		if err := errors.Join(os.MkdirAll(at, 0o777), os.MkdirAll(filepath.Join(repo, "refs"), 0o777),
			os.MkdirAll(filepath.Join(repo, "blobs"), 0o777), os.WriteFile(filepath.Join(repo, "blobs", "x"), config, 0o666),
			os.Symlink("../../blobs/x", filepath.Join(at, "config.json")),
			os.WriteFile(filepath.Join(repo, "refs", "main"), []byte(ref), 0o666)); err != nil {
			t.Fatal(err)
		}
		return at
	}
	fetch := "fetch it: hf download org/tiny"
	missing := func(what string) {
		t.Helper()
		if dir, err := Locate("org/tiny"); err == nil || !strings.HasSuffix(err.Error(), Hub+"; "+fetch) {
			t.Errorf("%s: %q, %v", what, dir, err)
		}
	}
	Hub = filepath.Join(t.TempDir(), "none")
	missing("no cache")
	Hub = t.TempDir()
	missing("an empty cache")
	want := put(Hub, "0123abcd\n")
	dir, err := Locate("org/tiny")
	if dir != want || err != nil {
		t.Fatalf("%q, %v; want %s", dir, err, want)
	}
	if c, err := ReadConfig(dir); err != nil || c.Architecture != "llama" {
		t.Errorf("%v, %v", c, err)
	}
	if _, err := OpenWeights(dir); err == nil || !strings.HasSuffix(err.Error(), "; fetch them: hf download org/tiny") {
		t.Errorf("a model without weights: %v", err)
	}
	for _, ref := range []string{"9999ffff", "../snapshots/0123abcd", ""} {
		Hub = t.TempDir()
		put(Hub, ref)
		missing("refs/main " + ref)
	}
	for _, name := range []string{"tiny", "a/b/c", "../tiny", "./tiny", "/org/tiny", "org/.tiny", "org/",
		"testdata/tiny-llama"} {
		if dir, err := Locate(name); dir != "" || err != nil {
			t.Errorf("%s: %q, %v", name, dir, err)
		}
	}
}

// A model in GGUF is refused by name, as a file and as a directory.
func TestGGUFIsNamed(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"x.GGUF", "readme.md"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadConfig(dir); !errors.Is(err, errGGUF) {
		t.Errorf("a directory: %v", err)
	}
	for _, name := range []string{dir, filepath.Join(dir, "x.GGUF"), "org/nosuch.gguf"} {
		if _, err := Locate(name); !errors.Is(err, errGGUF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	config, err := os.ReadFile("testdata/tiny-llama/config.json")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), config, 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ReadConfig(dir); err != nil {
		t.Errorf("a GGUF beside a model: %v", err)
	}
}
