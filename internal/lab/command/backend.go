package command

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// A chosen holds the attention backend of a run, and lines about it.
type chosen struct {
	*backend.Choice
	notes []string // lines for the user, at the start
}

// choose decides the attention backend of a resolved config on a machine and writes it into
// the config, so that workers and plan.json have no auto left. ways holds the choice by costs, or nil.
func choose(cfg *config.Config, m machine.Machine, ways *plan.Chosen) (chosen, error) {
	c, err := ask(cfg.Attention.Debug, func(disabled uint8) (*backend.Choice, error) {
		return backend.Choose(cfg, m, disabled)
	})
	if err != nil {
		return c, err
	}
	cfg.Parallel.Backend = c.Backend.String()
	if n := cfg.Attention.SMMargin; n > 0 && (c.Backend != backends.Flash || m.Arch != 90) {
		c.notes = append(c.notes, fmt.Sprintf("attention.sm_margin %d has no effect: flash on Hopper GPUs reads it, "+
			"and attention is %s on %s",
			n, c.Backend, m))
		// beside a backend that is not auto the key is an error, and workers read this config
		cfg.Attention.SMMargin = 0
	}
	return c, nil
}

// ask makes a choice without the backends that the environment switches off. debug is the level of
// attention.debug; the environment may ask for more. Where no backend can be had the error is an
// InputError that names the backends, the rules and their fixes.
func ask(debug int, choose func(disabled uint8) (*backend.Choice, error)) (chosen, error) {
	env, err := launch.Attention()
	if err != nil {
		return chosen{}, &InputError{err}
	}
	c, err := choose(backend.Disabled(env.NoFlash, env.NoFused))
	if err != nil {
		if line := launch.Honoured(); line != "" {
			err = fmt.Errorf("%w\n%s", err, line)
		}
		return chosen{}, &InputError{err}
	}
	return chosen{Choice: c, notes: notesOf(min(2, max(debug, env.Debug)), c.Explain)}, nil
}

// notesOf returns the lines for the user: the variables that count, and the choice at a level. Warnings have level 0.
func notesOf(level int, explain func(io.Writer, int)) (notes []string) {
	if line := launch.Honoured(); line != "" {
		notes = append(notes, line)
	}
	var b bytes.Buffer
	explain(&b, level)
	for line := range strings.Lines(b.String()) {
		notes = append(notes, strings.TrimRight(line, "\n"))
	}
	return notes
}
