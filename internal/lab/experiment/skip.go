package experiment

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model/config"
)

// skipped is an entry of skip: the values of its keys, as Text returns them.
type skipped map[string][]string

// holds reports whether the entry leaves out a cell with these values: all keys match.
func (s skipped) holds(values map[string]any) bool {
	for key, any := range s {
		if !slices.Contains(any, Text(values[key])) {
			return false
		}
	}
	return true
}

const skipSample = "{nproc: 1, parallel.algorithm: [allgather, ulysses]}"

// readSkip reads the entries that leave out cells.
func (e *Experiment) readSkip(n *yaml.Node) {
	if n.Kind != yaml.SequenceNode {
		e.doc.Faultf(n, "skip", "found %s; want a list of maps, such as [%s]", config.Describe(n), skipSample)
		return
	}
	for _, entry := range n.Content {
		switch {
		case e.doc.Full():
			return
		case entry.Kind == yaml.ScalarNode && entry.Value != "":
			e.doc.Faultf(entry, "skip", "found the text %s; want %s", quote(entry.Value), e.asMap(entry.Value))
		case entry.Kind != yaml.MappingNode || len(entry.Content) == 0:
			e.doc.Faultf(entry, "skip", "found %s; want a map such as %s", config.Describe(entry), skipSample)
		default:
			e.readSkipEntry(entry)
		}
	}
}

// readSkipEntry reads one entry, whose values are those that the grid would take.
func (e *Experiment) readSkipEntry(entry *yaml.Node) {
	s := skipped{}
	for i := 0; i+1 < len(entry.Content); i += 2 {
		name, list := entry.Content[i], entry.Content[i+1]
		key := name.Value
		axis := axisOf(e.Grid, key)
		switch {
		case axis == nil:
			e.doc.Faultf(name, "skip", "%s is no key of the grid; %s", quote(key), nearestOf(key, keysOf(e.Grid)))
			return
		case s[key] != nil:
			e.doc.Faultf(name, "skip", "%s is given twice", key)
			return
		}
		values := []*yaml.Node{list}
		if list.Kind == yaml.SequenceNode {
			values = list.Content
		}
		for _, v := range values {
			value, _, ok := e.axisValue(key, name, v)
			if !ok {
				return
			}
			s[key] = append(s[key], Text(value))
		}
		choices := axis.texts()
		if !slices.ContainsFunc(s[key], func(v string) bool { return slices.Contains(choices, v) }) {
			e.doc.Faultf(list, "skip", "%s is never %s, so the entry matches no cell; %s", key,
				quote(strings.Join(s[key], ", ")), nearestOf(strings.Join(s[key], ", "), choices))
			return
		}
	}
	e.skip = append(e.skip, s)
}

// olderClause is a comparison of skip's older form.
var olderClause = regexp.MustCompile(`^\s*([\w.]+)\s*(==|!=)\s*['"]?([\w.+-]+)['"]?\s*$`)

// asMap returns the map that replaces a condition of the older form, or a sample where the condition has more than
// == and != joined by &&.
func (e *Experiment) asMap(condition string) string {
	var parts []string
	for clause := range strings.SplitSeq(condition, "&&") {
		m := olderClause.FindStringSubmatch(clause)
		if m == nil || axisOf(e.Grid, m[1]) == nil {
			return "a map such as " + skipSample + ": all keys of it match, a list is any of its values"
		}
		value := m[3]
		if m[2] == "!=" {
			others := slices.DeleteFunc(axisOf(e.Grid, m[1]).texts(), func(v string) bool { return v == value })
			value = "[" + strings.Join(others, ", ") + "]"
		}
		parts = append(parts, m[1]+": "+value)
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// nearestOf says what a word may have been meant to be.
func nearestOf(word string, choices []string) string {
	if meant := config.Nearest(word, choices); meant != "" {
		return "did you mean " + meant + "?"
	}
	return "there are " + strings.Join(choices, ", ")
}

func quote(s string) string { return `"` + terminal.Clip(terminal.Name(s), 60) + `"` }

func axisOf(grid []Axis, key string) *Axis {
	for i := range grid {
		if grid[i].Key == key {
			return &grid[i]
		}
	}
	return nil
}

// texts returns the values as Text does.
func (a *Axis) texts() (list []string) {
	for _, v := range a.Values {
		list = append(list, Text(v))
	}
	return list
}

func keysOf(grid []Axis) (keys []string) {
	for i := range grid {
		keys = append(keys, grid[i].Key)
	}
	return keys
}
