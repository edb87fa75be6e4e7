package experiment

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/config"
)

// Defaults of an experiment.
const (
	defaultWarmup = 3
	defaultRepeat = 1
	defaultLimit  = 10 * time.Minute
)

// Bounds of an experiment. Larger values are probably typos.
const (
	maxCells  = 10000
	maxRepeat = 1000
	maxCount  = 1 << 20
)

// Experiment is a resolved experiment.yaml.
type Experiment struct {
	Path, Name string // path of the file; its name without extension
	Base       string // the base config, as written
	BasePath   string // its resolved path
	Set        map[string]any
	Grid       []Axis
	Warmup     int           // steps before the counted ones
	Repeat     int           // runs per cell
	Limit      time.Duration // limit of one run; 0: none

	skip      []skipped
	setFlags  []string                     // Set as arguments of --set, in the order of the file
	gridFlags map[string]map[string]string // arguments of --set by key and Text of the value
	doc       *config.Document
	lines     map[string]*yaml.Node // position of each key of Set and Grid
}

// ownKeys are axes of a grid that are not config keys.
var ownKeys = []string{"nproc", "nnodes", "device"}

var fields = []string{"base", "set", "grid", "skip", "warmup", "repeat", "limit"}

const (
	least  = "an experiment needs base and grid, see docs/scale.md"
	wanted = "base, grid and the other keys in docs/scale.md"
)

// Load reads an experiment.yaml. The error is config.Errors with every fault, in the order of lines. Load does not
// check the configs of the cells.
func Load(path string) (*Experiment, error) {
	text, err := files.Read(path, config.MaxFile)
	if err != nil {
		return nil, config.Errors{{File: path, Msg: fmt.Sprintf("the experiment is not readable: %v", err)}}
	}
	e := parse(path, text)
	if e.doc.Err() == nil {
		e.findBase()
	}
	return e, e.doc.Err()
}

func parse(path string, text []byte) *Experiment {
	e := &Experiment{
		Path: path, Name: strings.TrimSuffix(filepath.Base(path), filepath.Ext(path)), Set: map[string]any{},
		Warmup: defaultWarmup, Repeat: defaultRepeat, Limit: defaultLimit,
		gridFlags: map[string]map[string]string{}, lines: map[string]*yaml.Node{},
		doc: config.ReadDocument(path, text, least, wanted),
	}
	if e.doc.Root == nil {
		return e
	}
	given := map[string]*yaml.Node{}
	for i := 0; i+1 < len(e.doc.Root.Content) && !e.doc.Full(); i += 2 {
		name, value := e.doc.Root.Content[i], e.doc.Root.Content[i+1]
		switch key := name.Value; {
		case name.Kind != yaml.ScalarNode || !slices.Contains(fields, key):
			e.doc.Faultf(name, key, "unknown key; %s", e.unknown(name))
		case given[key] != nil:
			e.doc.Faultf(name, key, "given twice")
		default:
			given[key] = value
		}
	}
	e.read(given)
	return e
}

func (e *Experiment) unknown(name *yaml.Node) string {
	if config.UnknownKey(name.Value) == "" || config.IsSection(name.Value) {
		return "put keys of the config below set or grid"
	}
	return nearestOf(name.Value, fields)
}

func (e *Experiment) read(given map[string]*yaml.Node) {
	if n := given["base"]; n == nil {
		e.doc.Faultf(nil, "base", "missing; it names the config of the cells")
	} else if n.Kind != yaml.ScalarNode || config.IsNull(n) {
		e.doc.Faultf(n, "base", "found %s; want the path of a config", config.Describe(n))
	} else {
		e.Base = n.Value
		e.lines["base"] = n
	}
	if n := given["set"]; n != nil && !config.IsNull(n) {
		e.readSet(n, "")
	}
	if n := given["grid"]; n == nil {
		e.doc.Faultf(nil, "grid", "missing; it lists the values of at least one key, such as data.seq_len: [1K, 2K]")
	} else {
		e.readGrid(n)
	}
	if n := given["skip"]; n != nil && !config.IsNull(n) {
		e.readSkip(n)
	}
	e.count(given["warmup"], "warmup", 0, maxCount, &e.Warmup)
	e.count(given["repeat"], "repeat", 1, maxRepeat, &e.Repeat)
	if n := given["limit"]; n != nil {
		d, err := config.ParseTime(n.Value)
		if n.Kind != yaml.ScalarNode {
			err = fmt.Errorf("found %s; want a time such as 10m", config.Describe(n))
		}
		if err != nil {
			e.doc.Faultf(n, "limit", "%v", err)
		}
		e.Limit = d
		e.lines["limit"] = n
	}
	e.lines["warmup"] = given["warmup"]
	for _, axis := range e.Grid {
		if _, both := e.Set[axis.Key]; both {
			e.doc.Faultf(e.lines["grid."+axis.Key], axis.Key,
				"it is also in set; remove one of the two")
		}
	}
}

func (e *Experiment) count(n *yaml.Node, key string, low, high int64, to *int) (ok bool) {
	if n == nil {
		return true
	}
	v, err := config.ParseSize(n.Value)
	switch {
	case n.Kind != yaml.ScalarNode || n.ShortTag() == "!!bool" || config.IsNull(n):
		e.doc.Faultf(n, key, "found %s; want an integer", config.Describe(n))
	case err != nil:
		e.doc.Faultf(n, key, "%v", err)
	case v < low || v > high:
		e.doc.Faultf(n, key, "%d is out of range; want %d to %d", v, low, high)
	default:
		*to = int(v)
		return true
	}
	return false
}

// readSet reads keys for every cell, by path or nested as in a config.
func (e *Experiment) readSet(n *yaml.Node, section string) {
	if n.Kind != yaml.MappingNode {
		e.doc.Faultf(n, "set"+dot(section), "found %s; want keys of the config, such as {train.steps: 20}",
			config.Describe(n))
		return
	}
	for i := 0; i+1 < len(n.Content) && !e.doc.Full(); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		path := strings.TrimPrefix(dot(section)+dot(name.Value), ".")
		if config.IsSection(path) && !config.IsNull(value) {
			e.readSet(value, path)
			continue
		}
		if _, twice := e.Set[path]; twice {
			e.doc.Faultf(name, path, "given twice")
			continue
		}
		if config.IsSection(path) {
			e.Set[path], e.lines[path], e.setFlags = nil, name, append(e.setFlags, path+"=null")
			continue
		}
		if v, flag, ok := e.value(path, name, value); ok {
			e.Set[path], e.lines[path], e.setFlags = v, name, append(e.setFlags, flag)
		}
	}
}

func dot(name string) string {
	if name == "" {
		return ""
	}
	return "." + name
}

func (e *Experiment) value(path string, name, n *yaml.Node) (value any, flag string, ok bool) {
	if slices.Contains(ownKeys, path) {
		e.doc.Faultf(name, path, "not a config key; put it below grid, or pass --%s", path)
		return nil, "", false
	}
	if msg := config.UnknownKey(path); msg != "" {
		e.doc.Faultf(name, path, "%s", msg)
		return nil, "", false
	}
	value, flag, err := config.ReadValue(path, n)
	if err != nil {
		e.doc.Faultf(n, path, "%v", err)
		return nil, "", false
	}
	if text, isText := value.(string); isText {
		if abs := e.beside(path, text); abs != text {
			value, flag = abs, path+"="+abs
		}
	}
	return value, flag, true
}

var pathKeys = []string{"data.path", "data.validation.path", "data.tokenizer", "model.from"}

// beside resolves a path relative to the directory of the experiment, if the file exists there; else it returns the
// value.
func (e *Experiment) beside(key, text string) string {
	if !slices.Contains(pathKeys, key) || filepath.IsAbs(text) {
		return text
	}
	abs, err := filepath.Abs(filepath.Join(filepath.Dir(e.Path), text))
	if err != nil {
		return text
	}
	if found, _ := filepath.Glob(abs); len(found) > 0 {
		return abs
	}
	return text
}

func (e *Experiment) readGrid(n *yaml.Node) {
	if n.Kind != yaml.MappingNode || len(n.Content) == 0 {
		e.doc.Faultf(n, "grid", "found %s; want keys with lists of values, such as data.seq_len: [1K, 2K]",
			config.Describe(n))
		return
	}
	cells := 1
	for i := 0; i+1 < len(n.Content) && !e.doc.Full(); i += 2 {
		name, list := n.Content[i], n.Content[i+1]
		key := name.Value
		if e.lines["grid."+key] != nil {
			e.doc.Faultf(name, key, "given twice")
			continue
		}
		e.lines["grid."+key] = name
		if !slices.Contains(ownKeys, key) && config.UnknownKey(key) != "" {
			text := config.UnknownKey(key)
			if meant := config.Nearest(key, ownKeys); meant != "" {
				text = "unknown key; did you mean " + meant + "?"
			}
			e.doc.Faultf(name, key, "%s", text)
			continue
		}
		if list.Kind != yaml.SequenceNode || len(list.Content) == 0 {
			e.doc.Faultf(name, key, "found %s; want a list of values, at least one", config.Describe(list))
			continue
		}
		axis := Axis{Key: key}
		e.gridFlags[key] = map[string]string{}
		for _, v := range list.Content {
			if !e.doc.Full() {
				e.addValue(&axis, name, v)
			}
		}
		e.Grid = append(e.Grid, axis)
		if cells *= max(1, len(axis.Values)); cells > maxCells {
			e.doc.Faultf(name, key, "the grid has more than %d cells; remove values, or split the experiment",
				maxCells)
			return
		}
	}
}

func (e *Experiment) addValue(axis *Axis, name, n *yaml.Node) {
	value, flag, ok := e.axisValue(axis.Key, name, n)
	if !ok {
		return
	}
	if _, twice := e.gridFlags[axis.Key][Text(value)]; twice {
		e.doc.Faultf(n, axis.Key, "%s is in the list twice", quote(Text(value)))
		return
	}
	e.gridFlags[axis.Key][Text(value)] = flag
	axis.Values = append(axis.Values, value)
}

func (e *Experiment) axisValue(key string, name, n *yaml.Node) (value any, flag string, ok bool) {
	switch key {
	case "device":
		if !slices.Contains(devices, n.Value) {
			e.doc.Faultf(n, key, "%s is not a device; %s", quote(n.Value), nearestOf(n.Value, devices))
			return nil, "", false
		}
		return n.Value, "", true
	case "nproc", "nnodes":
		count := 0
		ok = e.count(n, key, 1, maxCount, &count)
		return int64(count), "", ok
	}
	return e.value(key, name, n)
}

var devices = []string{"auto", "cpu", "cuda"}

// findBase finds the base config in the directory of the experiment, else in the working directory.
func (e *Experiment) findBase() {
	e.BasePath = e.Base
	if filepath.IsAbs(e.Base) {
		return
	}
	beside := filepath.Join(filepath.Dir(e.Path), e.Base)
	if _, err := os.Stat(beside); err == nil {
		e.BasePath = beside
	} else if _, err := os.Stat(e.Base); errors.Is(err, os.ErrNotExist) {
		e.doc.Faultf(e.lines["base"], "base",
			"no file %s, and none in the working directory; paths are relative to the experiment's directory", beside)
	}
}

// Place adds the lines of this file to the faults of a cell's config. It returns other errors unchanged.
func (e *Experiment) Place(err error) error {
	if list := (config.Errors)(nil); errors.As(err, &list) {
		return e.doc.Locate(err, e.lineOf)
	}
	return err
}

// Refuse returns the experiment's error with the faults of all cells, if none can run.
func (e *Experiment) Refuse(faults ...error) error {
	for _, err := range faults {
		e.doc.Add(e.doc.Locate(err, e.lineOf))
	}
	return e.doc.Err()
}

// Faultf returns the experiment's error with a fault at one of its own keys.
func (e *Experiment) Faultf(key, format string, args ...any) error {
	e.doc.Faultf(e.lines[key], key, format, args...)
	return e.doc.Err()
}

func (e *Experiment) lineOf(path string) int {
	for _, key := range []string{"grid." + path, path} {
		if n := e.lines[key]; n != nil {
			return n.Line
		}
	}
	return 0
}
