package hf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

var (
	hubID  = regexp.MustCompile(`^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$`)
	commit = regexp.MustCompile(`^[0-9a-f]{6,64}$`)
)

// Hub is the local cache of huggingface_hub for Locate. The program sets it at its start.
var Hub string

// Locate returns the directory of a model that is named by a Hub id, such as Qwen/Qwen3-8B: the commit of refs/main in
// Hub. Without it, the error names the command that fetches the model. An existing path, and any other name, gives "".
// A GGUF file or directory is an error.
func Locate(name string) (dir string, err error) {
	if isGGUF(name) {
		return "", errGGUF
	}
	if _, err := os.Stat(name); err == nil || !hubID.MatchString(name) {
		return "", nil
	}
	repo := filepath.Join(Hub, "models--"+strings.ReplaceAll(name, "/", "--"))
	ref, err := files.Read(filepath.Join(repo, "refs", "main"), 100)
	if at := strings.TrimSpace(string(ref)); err == nil && commit.MatchString(at) {
		dir, err = filepath.Abs(filepath.Join(repo, "snapshots", at))
		if _, missing := os.Stat(filepath.Join(dir, "config.json")); err == nil && missing == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("neither a directory nor in the Hugging Face cache %s; fetch it: hf download %s",
		terminal.Name(Hub), name)
}

// hubName returns the Hub id of a model in a cache of huggingface_hub, or "".
func hubName(dir string) string {
	snapshots := filepath.Dir(dir)
	repo, ok := strings.CutPrefix(filepath.Base(filepath.Dir(snapshots)), "models--")
	if !ok || filepath.Base(snapshots) != "snapshots" {
		return ""
	}
	return strings.Replace(repo, "--", "/", 1)
}

var errGGUF = errors.New("a model in GGUF, which is for inference; name the Hugging Face directory that it was made " +
	"from, with config.json and *.safetensors")

// isGGUF reports whether a path is a GGUF file, or a directory with one.
func isGGUF(path string) bool {
	gguf := func(name string) bool { return strings.EqualFold(filepath.Ext(name), ".gguf") }
	list, err := os.ReadDir(path)
	if err != nil {
		return gguf(path)
	}
	return slices.ContainsFunc(list, func(e os.DirEntry) bool { return gguf(e.Name()) })
}
