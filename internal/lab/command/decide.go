package command

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
)

// decider returns a Decider for a machine, with its cost table if there is one.
func (o *Options) decider(m machine.Machine) (*plan.Decider, error) {
	env, err := launch.Attention()
	if err != nil {
		return nil, &InputError{err}
	}
	return &plan.Decider{
		Machine: m, Docs: documents, Cores: coresOf(m), Costs: o.known(m),
		Disabled: backend.Disabled(env.NoFlash, env.NoFused),
	}, nil
}

func (o *Options) strategy(m machine.Machine, q plan.Question) (a plan.Answer, notes []string, err error) {
	d, err := o.decider(m)
	if err != nil {
		return a, nil, err
	}
	c, err := ask(0, func(uint8) (*backend.Choice, error) {
		a, err = d.Strategy(q)
		return a.Choice, err
	})
	return a, c.notes, err
}

// known returns the costs of a machine; nil if no table was measured on it.
func (o *Options) known(m machine.Machine) func(ranks, perHost int) planner.Costs {
	if o.Costs != nil {
		return func(ranks, perHost int) planner.Costs { return o.Costs(m, ranks, perHost) }
	}
	table := sync.OnceValue(func() plan.Costs { return o.table(m) })
	return func(ranks, perHost int) planner.Costs {
		if m.IsCPU() && m.Assumed || table().Table == nil || !table().Exact { // an assumed CPU is no particular one
			return nil
		}
		return table().Table.For(cost.Job{Ranks: ranks, PerHost: perHost, Cores: coresOf(m), Link: float64(m.Link),
			Net: float64(m.Net)})
	}
}

// coresOf returns the cores shared by the ranks of a host, or 0 on GPUs.
func coresOf(m machine.Machine) int {
	if !m.IsCPU() {
		return 0
	}
	return runtime.NumCPU()
}

// documents returns the documents of the first sample; nil without data, which other checks report.
func documents(cfg *config.Config) []int {
	docs, err := train.FirstDocuments(cfg)
	if err != nil {
		return nil
	}
	return docs
}

type chosen struct {
	*backend.Choice
	notes []string // for the user
}

// choose chooses the attention backend of a config on a machine and writes it into the config, for workers and
// plan.json.
func choose(cfg *config.Config, m machine.Machine) (chosen, error) {
	if cfg.Model.Tuning.FP8() && !m.MultipliesE4M3() {
		return chosen{}, &InputError{fmt.Errorf("precision.linears: fp8 runs on Hopper GPUs (sm90) and on CPU, and this "+
			"is %s; write bf16", m)}
	}
	c, err := ask(cfg.Attention.Debug, func(disabled uint8) (*backend.Choice, error) {
		return backend.Choose(cfg, m, disabled)
	})
	if err != nil {
		return c, err
	}
	cfg.Parallel.Backend = c.Backend.String()
	if n := cfg.Attention.SMMargin; n > 0 && (c.Backend != backends.Flash || m.Arch != 90) {
		c.notes = append(c.notes, fmt.Sprintf("attention.sm_margin %d has no effect: only flash on Hopper GPUs uses "+
			"it, and attention is %s on %s",
			n, c.Backend, m))
		// workers would refuse the key with a backend that is not auto
		cfg.Attention.SMMargin = 0
	}
	return c, nil
}

// ask calls choose with the backends that the environment disables. The environment may raise debug, the level of
// attention.debug. If no backend can run, ask returns an InputError with the rules and their fixes.
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

// notesOf returns notes for the user: the variables in effect, and the choice in the detail of level. Level 0 has
// warnings only.
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
