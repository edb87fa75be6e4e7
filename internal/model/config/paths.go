package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/text/data"
)

// A disk is the file system during loading. Fuzz tests replace it.
type disk struct {
	isDir, isFile func(path string) bool
	glob          func(pattern string) ([]string, error)
	kind          func(path, format string) (string, error)
	workDir       func() (string, error)
	readConfig    func(dir string) (*hf.Config, error)
	locate        func(name string) (dir string, err error)
	eos           func(tokenizer, model string) (hf.EOS, error)
	readAdapter   func(dir string) (*hf.LoRA, error)
}

var osDisk = disk{
	isDir: isDir, isFile: isFile, glob: files.Glob, kind: data.Kind, workDir: os.Getwd,
	readConfig: hf.ReadConfig, locate: hf.Locate, eos: hf.FindEOS, readAdapter: hf.ReadAdapter,
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

func isFile(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && !fi.IsDir()
}

// paths resolves the relative paths of a config.
type paths struct {
	disk    disk
	fileDir string // absolute
	workDir string
	// was is model.from of the file; now is that of a flag. A file that is gone with was may be in now.
	was, now string
}

func newPaths(file string, disk disk) paths {
	workDir, _ := disk.workDir()
	p := paths{disk: disk, workDir: cmp.Or(workDir, "."), fileDir: filepath.Dir(file)}
	if !filepath.IsAbs(p.fileDir) {
		p.fileDir = filepath.Join(p.workDir, p.fileDir)
	}
	return p
}

// find makes a path absolute: in the config's directory if it exists there, else in the working directory; for flags in
// the other order. If neither exists, it looks in the new place of a moved model; then tried names both.
func (p paths) find(path string, flag bool, exists func(string) bool) (abs, tried string) {
	if abs, tried = p.findHere(path, flag, exists); tried != "" && p.was != "" {
		rest, inside := strings.CutPrefix(filepath.Clean(path), p.was+"/")
		if moved := filepath.Join(p.now, rest); inside && exists(moved) {
			return moved, ""
		}
	}
	return abs, tried
}

// findModel works like find. It also takes the Hub id of a model in the local cache, and otherwise returns the error of
// hf.Locate.
func (p paths) findModel(name string, flag bool, exists func(string) bool) (abs, tried string, err error) {
	if abs, tried = p.find(name, flag, exists); tried != "" {
		if dir, bad := p.disk.locate(name); bad != nil || dir != "" && exists(dir) {
			return cmp.Or(dir, abs), map[bool]string{true: tried}[bad != nil], bad
		}
	}
	return abs, tried, nil
}

func (p paths) findHere(path string, flag bool, exists func(string) bool) (abs, tried string) {
	if filepath.IsAbs(path) {
		if abs = filepath.Clean(path); !exists(abs) {
			tried = clipped(abs)
		}
		return abs, tried
	}
	dirs := []string{p.fileDir, p.workDir}
	if flag {
		dirs[0], dirs[1] = dirs[1], dirs[0]
	}
	for _, dir := range dirs {
		if abs := filepath.Join(dir, path); exists(abs) {
			return abs, ""
		}
	}
	tried = clipped(path) + " in " + dirs[0]
	if dirs[0] != dirs[1] {
		tried += " or " + dirs[1]
	}
	if strings.HasPrefix(path, "~") || strings.HasPrefix(path, "$") {
		tried += " (~ and $ are not expanded)"
	}
	return filepath.Join(dirs[1], path), tried
}

// literal escapes a path for a glob.
var literal = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `{`, `\{`, `}`, `\}`).Replace

// findGlob resolves a pattern like find. If a file, or a directory of datasets, has that exact name, the pattern is
// literal. The directories in front of it are always literal.
func (p paths) findGlob(pattern string, flag bool) (abs, tried string) {
	exact := func(path string) bool { return p.disk.isFile(path) || p.isDataset(path) }
	if abs, tried = p.find(pattern, flag, exact); tried == "" {
		return literal(abs), ""
	}
	quoted := paths{disk: p.disk, fileDir: literal(p.fileDir), workDir: literal(p.workDir)}
	return quoted.find(pattern, flag, func(abs string) bool { return len(p.files(abs)) > 0 })
}

func (p paths) files(pattern string) []string {
	matches, err := p.disk.glob(pattern)
	if err != nil {
		return nil // a malformed pattern matches nothing; globFault reports it
	}
	var files []string
	for _, m := range matches {
		if p.disk.isFile(m) {
			files = append(files, m)
		} else if p.isDataset(m) {
			saved, _ := p.disk.glob(literal(m) + "/*.arrow")
			files = append(files, saved...)
		}
	}
	return files
}

// isDataset reports whether the library datasets has saved a directory.
func (p paths) isDataset(path string) bool {
	return p.disk.isDir(path) && p.disk.isFile(filepath.Join(path, "state.json"))
}

var dataPaths = []string{"data.path", "data.validation.path"}

// resolvePaths makes the paths of data absolute and reports missing files.
func (l *loader) resolvePaths() {
	if dir := &l.cfg.Data.Cache; *dir != "" && !filepath.IsAbs(*dir) {
		*dir = filepath.Join(map[bool]string{true: l.workDir, false: l.fileDir}[l.where.of("data.cache").line == 0], *dir)
	}
	for _, path := range dataPaths {
		files := l.filesOf(path)
		for i := range files {
			if !l.ok(path) {
				break
			}
			field := &files[i].Path
			given := *field
			if given == "" {
				l.add(path, "it is empty; %s", dataWanted)
				break
			}
			abs, tried := l.findGlob(given, l.where.of(path).line == 0)
			if *field = abs; tried != "" && !l.opts.NoFiles {
				l.add(path, "%s", l.globFault(given, abs, tried))
			}
		}
	}
}

func (l *loader) filesOf(path string) Files {
	if path == "data.path" {
		return l.cfg.Data.Path
	}
	return l.cfg.Data.Validation.Path
}

// findKinds reads the first record of each source, and sets what depends on it. data.pack_documents stays auto if a
// source cannot be read, and data.overlong also if sources differ.
func (l *loader) findKinds() {
	d := &l.cfg.Data
	format := strings.TrimPrefix(d.Format, "auto")
	auto, known, whole := false, true, map[bool]bool{}
	for _, path := range dataPaths {
		files := l.filesOf(path)
		for i := range files {
			for _, name := range l.files(files[i].Path) {
				// The run reports the error.
				if files[i].Kind, _ = l.disk.kind(name, format); files[i].Kind != "" {
					break
				}
			}
			kind := files[i].Kind
			auto = auto || path == "data.path" && data.PackedByDefault(kind)
			known, whole[data.Conversation(kind)] = known && kind != "", true
		}
	}
	if known && d.Pack == nil {
		d.Pack = &auto
	}
	if known && len(whole) == 1 && d.Overlong == "auto" {
		d.Overlong = map[bool]string{true: "drop", false: "split"}[whole[true]]
	}
	d.PackDocuments = d.Packs() || d.Whole(d.Path) || d.Whole(d.Validation.Path)
}

func (l *loader) globFault(given, abs, tried string) string {
	if _, err := l.disk.glob(abs); errors.Is(err, path.ErrBadPattern) {
		return "the pattern " + clipped(given) + ` is malformed; put \ before a [ or { that is part of a name`
	} else if err != nil {
		return fmt.Sprintf("the files of %s cannot be listed: %v", clipped(given), err)
	}
	for _, dir := range []string{abs, filepath.Join(l.fileDir, given)} {
		if l.disk.isFile(filepath.Join(dir, "dataset_dict.json")) {
			return clipped(given) + " has several splits; name one, such as " + clipped(filepath.Join(given, "train"))
		}
		if l.disk.isDir(dir) {
			ext := ".txt"
			if in, _ := l.disk.glob(literal(dir) + "/*.*"); len(in) > 0 {
				ext = filepath.Ext(in[0])
			}
			return clipped(given) + " is a directory; write a glob of its files, such as " + clipped(given+"/*"+ext)
		}
	}
	for _, dir := range []string{abs, filepath.Join(literal(l.fileDir), given)} {
		if len(l.files(dir+".idx")) > 0 {
			return "no file " + tried + ", but there is a pair of that name; write " + clipped(given) + ".bin"
		}
	}
	return "no file " + tried + "; a glob must match at least one"
}

const dataWanted = "name files of tokens or text, such as corpus/*.bin"

func (l *loader) checkData() {
	for _, path := range dataPaths {
		for _, source := range l.filesOf(path) {
			if !l.ok(path) {
				break
			}
			files := l.files(source.Path)
			if l.opts.NoFiles {
				files = []string{source.Path}
			}
			kind := l.kindOf(path, files)
			dataRules(l.cfg, l.faults, path, kind == "tokens", l.indexed(source.Path), kind == "text",
				l.fromRead && !l.opts.NoFiles)
		}
	}
	recordRules(l.cfg, l.faults)
}

// indexed reports whether every .bin of a pattern has an .idx with the ends of documents (Megatron-LM). Without files
// it returns true.
func (l *loader) indexed(pattern string) bool {
	return !slices.ContainsFunc(l.files(pattern), func(f string) bool {
		stem, ok := strings.CutSuffix(f, ".bin")
		return ok && !l.disk.isFile(stem+".idx")
	})
}

// kindOf returns the kind of files by data.FileKind; "" without files, and after a fault. An .idx belongs to the .bin
// of that name (Megatron-LM).
func (l *loader) kindOf(path string, files []string) (kind string) {
	example := map[string]string{}
	for _, f := range files {
		example[data.FileKind(f)] = f
	}
	idx := example[""]
	if delete(example, ""); idx != "" && len(example) == 0 {
		l.add(path, "%s is an index; name the .bin beside it", clipped(idx))
	}
	if len(example) > 1 {
		l.add(path, "the glob matches files of different kinds: %s; narrow it to one",
			strings.Join(slices.Sorted(maps.Values(example)), ", "))
		return ""
	}
	for kind = range example {
	}
	return kind
}
