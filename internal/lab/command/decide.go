package command

import (
	"runtime"
	"sync"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
)

// decider decides how attention runs on a machine, by its costs where these are known.
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

// strategy decides how an attention runs on a machine, with lines for the user.
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

// known returns the costs of a machine; nil where no table is of it.
func (o *Options) known(m machine.Machine) func(ranks, perHost int) planner.Costs {
	if o.Costs != nil {
		return func(ranks, perHost int) planner.Costs { return o.Costs(m, ranks, perHost) }
	}
	table := sync.OnceValue(func() plan.Costs { return o.table(m) })
	return func(ranks, perHost int) planner.Costs {
		if m.IsCPU() && m.Assumed || table().Table == nil || !table().Exact { // an assumed CPU is no CPU in particular
			return nil
		}
		return table().Table.For(jobOf(m, ranks, perHost))
	}
}

// jobOf describes ranks to a cost table.
func jobOf(m machine.Machine, ranks, perHost int) cost.Job {
	return cost.Job{Ranks: ranks, PerHost: perHost, Cores: coresOf(m), Link: float64(m.Link), Net: float64(m.Net)}
}

// coresOf counts the cores that the ranks of a host share; 0: each has a GPU.
func coresOf(m machine.Machine) int {
	if !m.IsCPU() {
		return 0
	}
	return runtime.NumCPU()
}

// documents returns the documents of the first sample; nil if the data is absent, which others report.
func documents(cfg *config.Config) []int {
	docs, err := train.FirstDocuments(cfg)
	if err != nil {
		return nil
	}
	return docs
}
