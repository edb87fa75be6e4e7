package hf

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Modules selects modules as PEFT does: by their names or the last parts of these, or by a regular expression of the
// whole name. The zero value selects none.
type Modules struct {
	Names  []string // whole names, or their last parts
	Regexp string   // in place of Names
}

// IsZero reports whether neither names nor an expression are given. An empty list of names is given.
func (m Modules) IsZero() bool { return m.Names == nil && m.Regexp == "" }

// match reports whether a module is selected.
func (m Modules) match(module string) bool {
	if m.Regexp != "" {
		return matches(m.Regexp, module)
	}
	return slices.ContainsFunc(m.Names, func(name string) bool { return namesModule(name, module) })
}

// namesModule reports whether a target of PEFT names a module: by its full name, or by its last parts.
func namesModule(target, module string) bool {
	return target == module || strings.HasSuffix(module, "."+target)
}

// MarshalJSON returns the value of PEFT's files: a string, a list, or null.
func (m Modules) MarshalJSON() ([]byte, error) {
	if m.Regexp != "" {
		return json.Marshal(m.Regexp)
	}
	return json.Marshal(m.Names)
}

// UnmarshalJSON implements json.Unmarshaler. It sorts the names.
func (m *Modules) UnmarshalJSON(raw []byte) error {
	if len(raw) > 0 && raw[0] == '"' {
		return json.Unmarshal(raw, &m.Regexp)
	}
	err := json.Unmarshal(raw, &m.Names)
	slices.Sort(m.Names)
	m.Names = slices.Compact(m.Names)
	return err
}

// Patterns map modules to numbers. The first key that is a regular expression of a module's last parts applies.
type Patterns []Pattern

// A Pattern is an entry of Patterns.
type Pattern struct {
	Key   string  // a regular expression
	Value float64 // rank or alpha
}

// of returns the number of a module.
func (p Patterns) of(module string, missing float64) float64 {
	for _, e := range p {
		if matches(lastParts(e.Key), module) {
			return e.Value
		}
	}
	return missing
}

func lastParts(key string) string { return `(.*\.)?(` + key + `)` }

// layersOf returns the expression of the modules inside a list of layers.
func layersOf(list string) string { return lastParts(list) + `\.\d+\..*` }

// MarshalJSON returns an object with the keys in their order.
func (p Patterns) MarshalJSON() ([]byte, error) {
	out := []byte("{")
	for i, e := range p {
		key, err := json.Marshal(e.Key)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendFloat(append(append(out, key...), ':'), e.Value, 'f', -1, 64)
	}
	return append(out, '}'), nil
}

// UnmarshalJSON keeps the order of an object's keys.
func (p *Patterns) UnmarshalJSON(raw []byte) error {
	var values map[string]float64
	if err := json.Unmarshal(raw, &values); err != nil {
		return err
	}
	d := json.NewDecoder(strings.NewReader(string(raw)))
	for {
		token, err := d.Token()
		if err != nil {
			return nil // the end: Unmarshal has read it all
		}
		if key, ok := token.(string); ok {
			*p = append(*p, Pattern{key, values[key]})
		}
	}
}

// differing lists syntax that has another meaning, or none, in Python.
var differing = []string{"{,", "[:", `\p`, `\P`, `\Q`, `\C`, `\x{`, "(?<", "(?U", "(?-", "(?i-"}

var expressions sync.Map // compiled, by text

// expression compiles a regular expression in Python's syntax, for whole names.
func expression(text string) (*regexp.Regexp, error) {
	if have, ok := expressions.Load(text); ok {
		return have.(*regexp.Regexp), nil
	}
	compiled, err := regexp.Compile(`^(?:` + text + `)$`)
	if i := slices.IndexFunc(differing, func(s string) bool { return strings.Contains(text, s) }); i >= 0 {
		err = fmt.Errorf("%s is not supported", differing[i])
	}
	if err != nil {
		return nil, fmt.Errorf("%s; write a regular expression without lookarounds, back references and extensions of "+
			"Python, or names", terminal.Clip(err.Error(), 100))
	}
	expressions.Store(text, compiled)
	return compiled, nil
}

// matches reports whether an expression, which CheckTuning has checked, is of the whole name.
func matches(text, name string) bool {
	r, err := expression(text)
	return err == nil && r.MatchString(name)
}
