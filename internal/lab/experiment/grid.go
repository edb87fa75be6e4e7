package experiment

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model/config"
)

// Cells returns every combination of the grid's values; the last axis varies fastest. A cell is Skipped if an entry of
// skip matches it, else Pending.
func (e *Experiment) Cells() []Cell {
	total := 1
	for _, a := range e.Grid {
		total *= len(a.Values)
	}
	cells := make([]Cell, total)
	digits := len(fmt.Sprint(total))
	for i := range cells {
		c := &cells[i]
		c.Values, c.Status = map[string]any{}, Pending
		rest := i
		for k := len(e.Grid) - 1; k >= 0; k-- {
			a := &e.Grid[k]
			c.Values[a.Key] = a.Values[rest%len(a.Values)]
			rest /= len(a.Values)
		}
		c.ID = e.id(i+1, digits, c.Values)
		if slices.ContainsFunc(e.skip, func(s skipped) bool { return s.holds(c.Values) }) {
			c.Status = Skipped
		}
	}
	return cells
}

const maxID = 64

var notInName = regexp.MustCompile(`[^A-Za-z0-9._]`)

// id returns the name of a cell's directory: its number and its values.
func (e *Experiment) id(number, digits int, values map[string]any) string {
	name := fmt.Sprintf("%0*d", digits, number)
	for _, a := range e.Grid {
		name += "-" + notInName.ReplaceAllString(Text(values[a.Key]), "_")
	}
	return name[:min(len(name), maxID)]
}

// cellDefaults apply to every cell unless the experiment overrides them: log every step, without samples and
// TensorBoard, and train to the last step.
var cellDefaults = []string{"log.every=auto", "log.samples.every=0", "log.tensorboard=false",
	"train.early_stop.patience=0", "checkpoint.best=false"}

// noWarmup applies unless a flag names a warm-up. The warm-up of the base may be longer than a cell.
const noWarmup = "lr_schedule.warmup_steps=0"

// Flags returns the --set flags that turn the base into a cell's config. set overrides the experiment's.
func (e *Experiment) Flags(c *Cell, set []string) []string {
	flags := slices.Concat(cellDefaults, e.setFlags, set)
	for _, a := range e.Grid {
		if flag := e.gridFlags[a.Key][c.Text(a.Key)]; flag != "" {
			flags = append(flags, flag)
		}
	}
	if !slices.ContainsFunc(flags, func(f string) bool { return strings.Contains(f, "warmup_") }) {
		flags = slices.Insert(flags, 0, noWarmup)
	}
	return flags
}

// Saves reports whether the runs write checkpoints, which they do if the experiment sets a checkpoint key.
func (e *Experiment) Saves() bool {
	for key := range e.Set {
		if strings.HasPrefix(key, "checkpoint.") {
			return true
		}
	}
	return slices.ContainsFunc(e.Grid, func(a Axis) bool { return strings.HasPrefix(a.Key, "checkpoint.") })
}

// A skipped maps the keys of a skip entry to the Text of its values.
type skipped map[string][]string

func (s skipped) holds(values map[string]any) bool {
	for key, any := range s {
		if !slices.Contains(any, Text(values[key])) {
			return false
		}
	}
	return true
}

const skipSample = "{nproc: 1, parallel.algorithm: [allgather, ulysses]}"

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

func (e *Experiment) readSkipEntry(entry *yaml.Node) {
	s := skipped{}
	for i := 0; i+1 < len(entry.Content); i += 2 {
		name, list := entry.Content[i], entry.Content[i+1]
		key := name.Value
		axis := axisOf(e.Grid, key)
		switch {
		case axis == nil:
			e.doc.Faultf(name, "skip", "%s is not a key of the grid; %s", quote(key), nearestOf(key, keysOf(e.Grid)))
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

var olderClause = regexp.MustCompile(`^\s*([\w.]+)\s*(==|!=)\s*['"]?([\w.+-]+)['"]?\s*$`)

// asMap converts a condition of the older form, == and != joined by &&, to a map. For other conditions it returns a
// sample.
func (e *Experiment) asMap(condition string) string {
	var parts []string
	for clause := range strings.SplitSeq(condition, "&&") {
		m := olderClause.FindStringSubmatch(clause)
		if m == nil || axisOf(e.Grid, m[1]) == nil {
			return "a map such as " + skipSample + ": all keys must match; a list matches any of its values"
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

// Identity returns the properties that a later start must share, with the relevant flags of the command. configs holds
// the configs of the cells in order, nil for configs with faults.
func (e *Experiment) Identity(configs [][]byte, flags map[string]string) Identity {
	sum := sha256.New()
	for _, c := range configs {
		sum.Write(c)
		sum.Write([]byte{0})
	}
	id := Identity{
		"base": e.Base, "set": text(e.Set), "grid": text(e.Grid),
		"warmup": strconv.Itoa(e.Warmup), "repeat": strconv.Itoa(e.Repeat), "limit": config.FormatTime(e.Limit),
		"the cells' configs": hex.EncodeToString(sum.Sum(nil)),
	}
	maps.Copy(id, flags)
	return id
}

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("experiment: plain fields do not encode: " + err.Error())
	}
	return string(b)
}
