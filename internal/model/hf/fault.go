package hf

import (
	"fmt"
	"slices"
	"strings"
)

// Fault is one thing wrong with a config.json.
type Fault struct {
	Key string // as in "rope_parameters.factor"; empty for the whole file
	Msg string
}

// ConfigError is all Faults of the config.json at Path.
type ConfigError struct {
	Path   string
	Faults []Fault
}

// Error returns one line a fault, each with the file.
func (e *ConfigError) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = e.Path + ": " + f.Msg
		if f.Key != "" {
			lines[i] = e.Path + ": " + f.Key + ": " + f.Msg
		}
	}
	return strings.Join(lines, "\n")
}

type faults []Fault

func (f *faults) add(key, format string, args ...any) {
	// One mistake is told once: a rule about a key whose value was unreadable says nothing.
	if !f.has(key) {
		*f = append(*f, Fault{key, fmt.Sprintf(format, args...)})
	}
}

func (f faults) has(key string) bool {
	return slices.ContainsFunc(f, func(g Fault) bool { return g.Key == key })
}
