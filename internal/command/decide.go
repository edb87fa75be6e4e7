package command

import (
	"runtime"

	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/cost"
	"github.com/cprun/cprun/internal/job"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/train"
)

// decider chooses what a config leaves auto, by the costs of a machine where these are known.
func (o *Options) decider(m machine.Machine) (*plan.Decider, error) {
	d := &plan.Decider{Machine: m, Docs: documents, Cores: coresOf(m)}
	known, err := o.known(m)
	if err != nil {
		return nil, &InputError{err}
	}
	env, err := launch.Attention()
	if err != nil {
		return nil, &InputError{err}
	}
	d.Disabled = backend.Disabled(env.NoFlash, env.NoFused)
	d.Costs = known
	return d, nil
}

// known is the costs of a machine; it returns nil where there is no table of it.
func (o *Options) known(m machine.Machine) (func(ranks, perHost int) planner.Costs, error) {
	if o.Costs != nil {
		return func(ranks, perHost int) planner.Costs { return o.Costs(m, ranks, perHost) }, nil
	}
	none := func(_, _ int) planner.Costs { return nil }
	if m.Arch == 0 && m.Assumed {
		return none, nil // no CPU in particular
	}
	c := o.costs(m)
	if c.Table == nil || !c.Exact {
		return none, nil
	}
	return func(ranks, perHost int) planner.Costs { return c.Table.For(jobOf(m, ranks, perHost)) }, nil
}

// jobOf is what a table is asked about for so many ranks.
func jobOf(m machine.Machine, ranks, perHost int) cost.Job {
	return cost.Job{Ranks: ranks, PerHost: perHost, Cores: coresOf(m), Link: float64(m.Link), Net: float64(m.Net)}
}

// coresOf is those that the ranks of a host share; 0: each has a GPU.
func coresOf(m machine.Machine) int {
	if m.Arch != 0 {
		return 0
	}
	return runtime.NumCPU()
}

// packings is what workers choose by for each packing of documents. On GPUs they do not: memory and workspace are planned
// for the algorithm of the config.
func (o *TrainOptions) packings(chosen *plan.Chosen, ranks int) (*job.Packings, error) {
	if chosen == nil || len(chosen.Packings) == 0 || o.machine.Arch != 0 || o.Costs != nil {
		return nil, nil
	}
	c := o.costs(o.machine)
	if c.Table == nil || !c.Exact {
		return nil, nil
	}
	return &job.Packings{Table: c.Table, Job: jobOf(o.machine, ranks, o.machine.PerHost(ranks)), Ways: chosen.Packings, Shared: true}, nil
}

// documents is those of the first sample; nil where the data is not there, which is said elsewhere.
func documents(cfg *config.Config) []int {
	docs, err := train.FirstDocuments(cfg)
	if err != nil {
		return nil
	}
	return docs
}
