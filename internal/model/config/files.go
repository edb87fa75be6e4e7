package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/text/data"
)

// Files are the sources of data: one glob, several in sequence, or several mixed by weight.
type Files []File

// File is an absolute glob of files.
type File struct {
	Path   string
	Weight float64 // share of the tokens relative to the others; 0: not given
	Kind   string  // of the records (data.Kind); "" if unknown
}

// conversations reports whether some file has records that are never cut.
func (f Files) conversations() bool {
	return slices.ContainsFunc(f, func(e File) bool { return data.Conversation(e.Kind) })
}

// Mixed reports whether samples are drawn by weight.
func (f Files) Mixed() bool {
	return slices.ContainsFunc(f, func(e File) bool { return e.Weight > 0 })
}

// Weights returns the shares of a mixture; nil if it is none.
func (f Files) Weights() (list []float64) {
	for _, e := range f {
		if f.Mixed() {
			list = append(list, e.Weight)
		}
	}
	return list
}

// Sources returns the files in groups, each one sequence.
func (f Files) Sources() []Files {
	if f.Mixed() {
		return slices.Collect(slices.Chunk(f, 1))
	}
	return []Files{f}
}

// Names returns a name for each path: its elements without wildcards after those that all have, such as code and prose
// for code/*.bin and prose.jsonl.
func (f Files) Names() (names []string) {
	split := func(e File) []string { return strings.Split(strings.TrimPrefix(e.Path, "/"), "/") }
	same := len(split(f[0]))
	for _, e := range f {
		for i, word := range split(e) {
			if i < same && word != split(f[0])[i] {
				same = i
			}
		}
		same = min(same, len(split(e)))
	}
	seen := map[string]int{}
	for _, e := range f {
		var words []string
		for _, word := range split(e)[same:] {
			if word, _, _ = strings.Cut(word, "."); !strings.ContainsAny(word, "*?[{") && word != "" {
				words = append(words, word)
			}
		}
		name := cmp.Or(strings.Join(words, "/"), "source")
		if seen[name]++; seen[name] > 1 {
			name += fmt.Sprintf("-%d", seen[name])
		}
		names = append(names, name)
	}
	return names
}

// Globs lists the paths.
func (f Files) Globs() []string {
	var globs []string
	for _, e := range f {
		globs = append(globs, e.Path)
	}
	return globs
}

const maxFiles = 1000

// files reads a path, or a list of paths and {path, weight} entries.
func (k *key) files(n *yaml.Node) (Files, error) {
	if n.Kind == yaml.ScalarNode {
		path, err := k.text(n)
		return Files{{Path: path}}, err
	}
	if n.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("found %s; want %s", Describe(n), k.wanted())
	}
	if len(n.Content) == 0 || len(n.Content) > maxFiles {
		return nil, fmt.Errorf("found a list of %d; want 1 to %d paths", len(n.Content), maxFiles)
	}
	list := make(Files, len(n.Content))
	for i, e := range n.Content {
		if err := k.file(e, &list[i]); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i+1, err)
		}
	}
	if list.Mixed() {
		for i := range list {
			if list[i].Weight == 0 {
				list[i].Weight = 1
			}
		}
	}
	return list, nil
}

func (k *key) file(n *yaml.Node, f *File) (err error) {
	if n.Kind == yaml.ScalarNode {
		f.Path, err = k.text(n)
		return err
	}
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("found %s; want a path, or {path: …, weight: …}", Describe(n))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i].Value, n.Content[i+1]
		if seen[name] {
			return fmt.Errorf("%s is given twice; remove one", clipped(name))
		}
		seen[name] = true
		switch name {
		case "path":
			f.Path, err = k.text(value)
		case "weight":
			f.Weight, err = k.number(value)
			if err == nil && !(f.Weight > 0 && f.Weight <= maxWeight) {
				err = fmt.Errorf("weight %g is out of range; want a number in (0, %g]", f.Weight, float64(maxWeight))
			}
		default:
			err = fmt.Errorf("unknown key %s; an entry has path and weight", quoted(name))
		}
		if err != nil {
			return err
		}
	}
	if !seen["path"] {
		return errors.New("path is missing; write {path: …, weight: …}")
	}
	return nil
}

// maxWeight keeps the precision of a float64 sufficient for shares.
const maxWeight = 1e9

func (f Files) value() any {
	if len(f) == 1 && f[0].Weight == 0 {
		return f[0].Path
	}
	list := make([]any, len(f))
	for i, e := range f {
		if list[i] = e.Path; e.Weight > 0 {
			list[i] = map[string]any{"path": e.Path, "weight": e.Weight}
		}
	}
	return list
}
