package plan

import (
	"errors"
	"slices"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A Decider decides how attention runs on a machine: the attention of a config (config.Options takes Decide), or one
// that a command describes.
type Decider struct {
	Machine  machine.Machine
	Costs    func(ranks, perHost int) planner.Costs // nil, or one that returns nil: not known, and the rules decide
	Disabled uint8                                  // as in backend.Choose
	// Docs returns the lengths of the documents of a packed sequence that stands for all of a run; nil, or nothing: not
	// known, and the rules decide.
	Docs func(cfg *config.Config) []int
	// Cores counts the cores that the ranks of a host share; 0: each has its own device, or it is not known.
	Cores int

	docs []int
	best *option // the choice of Decide by costs; nil: none

	// Chosen is the choice of Decide by costs; nil: none.
	Chosen *Chosen
}

// A Question is an attention with an open strategy.
type Question struct {
	// Attentions has a request for each mask of a run. Their Strategy is complete by the rules, except that the backend
	// may be open.
	Attentions []backend.Request
	// Requested is the user's strategy. Empty fields and auto are open.
	Requested ring.Strategy
	Docs      []int // lengths of the documents of a sequence
	// Ranks counts the ranks of the job, up to PerHost on each host.
	Ranks, PerHost int
	Recompute      bool // the backward pass runs the forward pass again
}

// An Answer is the strategy of a Question.
type Answer struct {
	ring.Strategy
	// Choice is the backend with its remedies.
	Choice *backend.Choice
	// Ranked lists the strategies that costs compared, the chosen one first; none: the rules decided.
	Ranked []planner.Timed
	// Ruled is the backend by the rules, if the costs took another.
	Ruled string
}

// Predicted returns the predicted seconds of attention in all layers; 0: not known.
func (a *Answer) Predicted() float64 {
	if len(a.Ranked) == 0 {
		return 0
	}
	return a.Ranked[0].Seconds
}

// Strategy decides how attention runs. All commands call it, so that they agree. The rules list the backends that can
// run it. If costs are known, the answer is the fastest strategy that the rules accept, else the rules' own.
func (d *Decider) Strategy(q Question) (Answer, error) {
	choice, err := d.rules(&q, q.Attentions[0].Strategy)
	if err != nil {
		return Answer{}, err
	}
	ruled := Answer{Strategy: q.Attentions[0].Strategy, Choice: choice}
	ruled.Backend = choice.Backend.String()
	if d.Costs == nil || slices.ContainsFunc(q.Attentions, func(r backend.Request) bool {
		return !r.Plain() || r.Documents != (len(q.Docs) > 0)
	}) {
		return ruled, nil
	}
	costs := d.Costs(q.Ranks, q.PerHost)
	if costs == nil {
		return ruled, nil
	}
	c := workloadOf(&q, planner.Topology{PerHost: q.PerHost, Shared: d.Machine.IsCPU(), Cores: d.Cores,
		Gates: d.Machine.Arch == hopper})
	asked := q.Requested
	asked.Layout, asked.Algorithm = open(asked.Layout), open(asked.Algorithm)
	names := able(choice, open(asked.Backend) == "", c.DType, costs)
	ranked, err := planner.Choose(c, planner.Strategies(c, asked, names), costs)
	if err != nil {
		return Answer{}, err
	}
	for i, t := range ranked {
		if choice, err = d.rules(&q, t.Strategy); errors.As(err, new(*backend.NoneError)) {
			continue // a rule rejects this backend for the hops of the strategy
		} else if err != nil {
			return Answer{}, err
		}
		a := Answer{Strategy: t.Strategy, Choice: choice, Ranked: slices.Insert(slices.Delete(ranked, i, i+1), 0, t)}
		if open(asked.Backend) == "" {
			t.Backend = ""
			if first, err := d.rules(&q, t.Strategy); err == nil && first.Backend != choice.Backend {
				a.Ruled = first.Backend.String()
			} else if err == nil {
				a.Choice = first // with the reasons of the rules
			}
		}
		return a, nil
	}
	return ruled, nil
}

// open returns a field of a strategy; "" if it is open.
func open[S ~string](field S) S {
	if field == "auto" {
		return ""
	}
	return field
}

func (d *Decider) rules(q *Question, s ring.Strategy) (*backend.Choice, error) {
	list := slices.Clone(q.Attentions)
	for i := range list {
		list[i].Strategy = s
	}
	return backend.Select(d.Machine, d.Disabled, list...)
}

const hopper = 90 // the architecture; flash waits for rows within a call there

func workloadOf(q *Question, on planner.Topology) planner.Workload {
	r := &q.Attentions[0]
	c := planner.Workload{
		DType: r.DType, Batch: r.Batch,
		Tokens: r.SeqQ, Docs: q.Docs, Ranks: max(1, r.ContextSize), Topology: on, Recompute: q.Recompute,
	}
	if r.Documents {
		c.Batch = 1 // samples with documents go one by one
	}
	for i := range q.Attentions {
		r := &q.Attentions[i]
		c.Layers = append(c.Layers, planner.LayerGroup{Mixer: r.Mixer(), Count: max(1, r.Layers)})
	}
	return c
}

// able lists the backends that the rules allow and that have known costs, the preferred one first. It has the reference
// only if that is preferred.
func able(choice *backend.Choice, all bool, dtype tensor.DType, costs planner.Costs) (names []string) {
	list := []backends.Backend{choice.Backend}
	if all {
		list = append(list, choice.Layers[0].Able...)
	}
	known, measured := costs.(interface {
		Has(backend string, t tensor.DType) bool
	})
	for _, b := range list {
		name := b.String()
		lacks := func(l *backends.Choice) bool { return b != choice.Backend && !slices.Contains(l.Able, b) }
		if measured && !known.Has(name, dtype) || b == backends.Reference && b != choice.Backend ||
			slices.ContainsFunc(choice.Layers, lacks) || slices.Contains(names, name) {
			continue
		}
		names = append(names, name)
	}
	return names
}
