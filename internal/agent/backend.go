package agent

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/launch"
)

// chosen is the attention backend of a run, and what is said about it.
type chosen struct {
	*backend.Choice
	notes []string // lines for the user, at the start
}

// choose decides the attention backend of a resolved config on a machine and writes it into
// the config, so that workers and plan.json have no auto left. Where none can be had the
// error is an InputError that names the backends, the rules and their fixes.
func choose(cfg *config.Config, m backend.Machine) (chosen, error) { return chooseBut(cfg, m, 0) }

// chooseBuilt is choose for a run on this machine: of what the rules allow, what this build has.
// It has no unfused attention on GPUs and does not pad or copy for cuDNN.
func chooseBuilt(cfg *config.Config, m backend.Machine) (chosen, error) {
	wanted := cfg.Attention.Backend
	c, err := choose(cfg, m)
	if err != nil || m.Arch == 0 {
		return c, err
	}
	remedy := unbuilt(c.Choice)
	if remedy != "" && wanted == attention.Auto.String() {
		cfg.Attention.Backend = wanted
		if c, err = chooseBut(cfg, m, 1<<attention.Fused); err != nil {
			return c, err
		}
		remedy = unbuilt(c.Choice)
	}
	if remedy != "" {
		return c, inputf("attention.backend %s needs the remedy %s here, which is not in this build; use flash", c.Backend, remedy)
	}
	if c.Backend == attention.Unfused {
		return c, inputf("attention.backend unfused is not in this build, and no other that is can do what the config asks for; cprun plan says why, backend by backend")
	}
	return c, nil
}

// unbuilt names a remedy of the choice that nothing executes; "" where there is none.
func unbuilt(c *backend.Choice) string {
	for _, r := range c.Remedies {
		switch k := r.Remedy.Kind; k {
		case attention.PadHeadDims, attention.PadSequence, attention.MakeContiguous:
			return k.String()
		}
	}
	return ""
}

func chooseBut(cfg *config.Config, m backend.Machine, disabled uint8) (chosen, error) {
	env, err := launch.Attention()
	if err != nil {
		return chosen{}, &InputError{err}
	}
	c, err := backend.Choose(cfg, m, disabled|backend.Disabled(env.NoFlash, env.NoFused, env.NoUnfused))
	if err != nil {
		if line := launch.Honoured(); line != "" {
			err = fmt.Errorf("%w\n%s", err, line)
		}
		return chosen{}, &InputError{err}
	}
	out := chosen{Choice: c, notes: notesOf(backend.Debug(cfg, env.Debug), c.Explain)}
	cfg.Attention.Backend = c.Backend.String()
	return out, nil
}

// notesOf is what is told at the start: the variables that count, and the choice at a level.
func notesOf(level int, explain func(io.Writer, int)) (notes []string) {
	if line := launch.Honoured(); line != "" {
		notes = append(notes, line)
	}
	if level > 0 {
		var b bytes.Buffer
		explain(&b, level)
		for line := range strings.Lines(b.String()) {
			notes = append(notes, strings.TrimRight(line, "\n"))
		}
	}
	return notes
}
