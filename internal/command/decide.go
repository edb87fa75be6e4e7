package command

import (
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/train"
)

// decider chooses what a config leaves auto, by the costs of a machine where these are known.
func (o *Options) decider(m machine.Machine) (*plan.Decider, error) {
	d := &plan.Decider{Machine: m, Docs: documents}
	if o.Costs == nil {
		return d, nil
	}
	env, err := launch.Attention()
	if err != nil {
		return nil, &InputError{err}
	}
	d.Disabled = backend.Disabled(env.NoFlash, env.NoFused, env.NoUnfused)
	d.Costs = func(ranks, perHost int) planner.Costs { return o.Costs(m, ranks, perHost) }
	return d, nil
}

// documents is those of the first sample; nil where the data is not there, which is said elsewhere.
func documents(cfg *config.Config) []int {
	docs, err := train.FirstDocuments(cfg)
	if err != nil {
		return nil
	}
	return docs
}
