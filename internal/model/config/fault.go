package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// A Fault is one mistake in a config, with its place, key and fix.
type Fault struct {
	File string // the path from the caller, or the flag: "--set train.steps=0"
	Line int    // from 1; 0 for a flag
	Key  string // full path, such as "data.seq_len"; may be empty
	Msg  string
}

// String returns "file:line: key: message". It omits unknown parts.
func (f Fault) String() string {
	var b strings.Builder
	b.WriteString(terminal.Name(f.File))
	if f.Line > 0 {
		fmt.Fprintf(&b, ":%d", f.Line)
	}
	if f.Key != "" {
		b.WriteString(": " + terminal.Name(f.Key))
	}
	return b.String() + ": " + f.Msg
}

// Errors lists the faults of a config: first those of the file, by line, then those of flags.
type Errors []Fault

// Error returns one line for each fault.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.String()
	}
	return strings.Join(lines, "\n")
}

// maxFaults bounds the printed faults: a file that is not a config would fill the terminal.
const maxFaults = 100

// faults collects faults. Later rules skip a faulty key, so that one mistake is reported once.
type faults struct {
	where *positions
	list  Errors
	bad   map[string]bool
}

func newFaults(where *positions) *faults {
	return &faults{where: where, bad: map[string]bool{}}
}

// add adds a fault at the key's place.
func (f *faults) add(path, format string, args ...any) {
	f.addAt(f.where.of(path), path, format, args...)
}

func (f *faults) addAt(p position, path, format string, args ...any) {
	f.bad[path] = true
	f.list = append(f.list, Fault{File: p.file, Line: p.line, Key: path, Msg: fmt.Sprintf(format, args...)})
}

// ok reports whether none of the keys has a fault.
func (f *faults) ok(paths ...string) bool {
	return !slices.ContainsFunc(paths, func(p string) bool { return f.bad[p] })
}

// within reports whether a key of one of the sections, or the section itself, has a fault.
func (f *faults) within(sections ...string) bool {
	for key := range f.bad {
		for _, s := range sections {
			if key == s || strings.HasPrefix(key, s+".") {
				return true
			}
		}
	}
	return false
}

func (f *faults) err() error {
	if len(f.list) == 0 {
		return nil
	}
	list := slices.Clone(f.list)
	slices.SortStableFunc(list, func(a, b Fault) int {
		if (a.Line == 0) != (b.Line == 0) {
			return b.Line - a.Line // flags, which have no line, come last
		}
		return a.Line - b.Line
	})
	if extra := len(list) - maxFaults; extra > 0 {
		last := list[maxFaults]
		list = append(list[:maxFaults], Fault{File: last.File, Line: last.Line,
			Msg: fmt.Sprintf("%d more faults follow from here", extra)})
	}
	return list
}

// Fault returns err with the place of the key, like an error of Load. It is for faults found later, such as in a file
// that the key names.
func (c *Config) Fault(key string, err error) error {
	f := newFaults(c.where)
	f.add(key, "%s", err)
	return f.err()
}

// Warn adds a warning about a key.
func (c *Config) Warn(key, text string) {
	f := newFaults(c.where)
	f.add(key, "%s", text)
	c.Warnings = append(c.Warnings, f.list...)
}

// Given reports whether the file or a flag set a key.
func (c *Config) Given(key string) bool { return c.where.given(key) }

type position struct {
	file string
	line int
}

// positions records the place of every key and section, also for faults found after loading.
type positions struct {
	file string
	keys map[string]position
}

// of returns the place of a key. If it was not written, it returns the place of model.from if config.json may set the
// key, else of its section, else the start of the file.
func (p *positions) of(path string) position {
	if p == nil {
		return position{file: "config"}
	}
	if at, ok := p.keys[path]; ok {
		return at
	}
	if strings.HasPrefix(path, "model.") {
		if at, ok := p.keys["model.from"]; ok {
			return at
		}
	}
	for i := strings.LastIndexByte(path, '.'); i > 0; i = strings.LastIndexByte(path[:i], '.') {
		if at, ok := p.keys[path[:i]]; ok {
			return at
		}
	}
	return position{file: p.file, line: 1}
}

// given reports whether the key or section itself was written.
func (p *positions) given(path string) bool {
	if p == nil {
		return false
	}
	_, ok := p.keys[path]
	return ok
}
