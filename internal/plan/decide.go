package plan

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Decider chooses what a config leaves auto by what it would cost. Its Decide is for config.Options.
type Decider struct {
	Machine  machine.Machine
	Costs    func(ranks, perHost int) planner.Costs // nil, or one that returns nil: nothing is known, and nothing is decided
	Disabled uint8                                  // as in backend.Choose
	// Docs returns the lengths of the documents of a packed sequence that stands for all; nil, or nothing: not known, and
	// nothing is decided for packed documents.
	Docs func(cfg *config.Config) []int
	// Cores are those that the ranks of a host share; 0: each has a device of its own, or it is not known.
	Cores int

	docs []int

	// Chosen is what Decide has found; nil: nothing.
	Chosen *Chosen
}

// Chosen is what was chosen, and what it was chosen over.
type Chosen struct {
	// Seconds of attention in one optimizer step, forward and backward, on the slowest rank.
	Seconds float64 `json:"seconds_per_step"`
	// Groups are the sizes of context and data groups that were compared, the chosen one first.
	Groups []Groups `json:"groups"`
	// Models are the layouts and backends, likewise; seconds of all layers for one micro batch.
	Models []planner.Model `json:"models"`
	// Layers are the ways of each kind of layers, likewise; seconds of one layer for one micro batch.
	Layers []LayerWays `json:"layers"`
	// Backend is the backend of attention where costs took another than the rules have, which is Ruled; "": they did not.
	Backend string `json:"backend,omitempty"`
	Ruled   string `json:"ruled,omitempty"`
	// Kinds are what the layers of some windows do that run by another algorithm than the config says; see Apart.
	Kinds map[int]planner.Way `json:"kinds,omitempty"`
	// Packings are the ways that each packing of documents chooses from; none: all run as the config says.
	Packings []planner.Way `json:"packings,omitempty"`
}

// Groups are sizes of the groups of ranks.
type Groups struct {
	Context int     `json:"context"`
	Data    int     `json:"data"`
	Seconds float64 `json:"seconds_per_step"` // of attention
	// TooLarge says that the memory has no room for it. Of groups that would take longer nobody has asked.
	TooLarge bool `json:"too_large,omitempty"`
}

// LayerWays are the ways of the layers with one window.
type LayerWays struct {
	Window int             `json:"window"` // keys before a query's own; -1: all
	Layers int             `json:"layers"`
	Ranked []planner.Timed `json:"ranked"`
	// Apart says that these layers would be faster by the first of Ranked, and run as the others do. Own says that they run by
	// it, and the others as the config says.
	Apart bool `json:"apart,omitempty"`
	Own   bool `json:"own,omitempty"`
	// Refused is what rejects the backend of all layers for the hops that these would have by the first of Ranked, where that is
	// why they run as the others do.
	Refused []Rejected `json:"refused,omitempty"`
}

// Decide fills parallel.context, data, layout, algorithm, inner and gather_heads, and attention.backend, where a config
// leaves them auto and costs are known. It leaves everything as it is otherwise, for the rules of package config.
func (d *Decider) Decide(cfg *config.Config, ranks, hosts int) error {
	if d == nil || d.Costs == nil {
		return nil
	}
	perHost := ranks
	if hosts > 1 && ranks%hosts == 0 {
		perHost = ranks / hosts
	}
	costs := d.Costs(ranks, perHost)
	if costs == nil {
		return nil
	}
	if cfg.Data.PackDocuments {
		if d.Docs != nil {
			d.docs = d.Docs(cfg)
		}
		if len(d.docs) == 0 {
			return nil
		}
	}
	found, err := d.groups(cfg, ranks, perHost, costs)
	if err != nil || len(found) == 0 {
		return err
	}
	best := found[0]
	d.Chosen = best.explained(found)
	if cfg.Data.PackDocuments && cfg.Parallel.Algorithm == "auto" {
		d.Chosen.Packings = planner.Shortlist(best.way)
	}
	if best.names(cfg) {
		d.Chosen.Backend, d.Chosen.Ruled = best.way.Backend, best.ruled
	}
	best.apply(cfg)
	return nil
}

// First returns the documents that Decide has gone by; nil: it asked for none, or there were none.
func (d *Decider) First() []int {
	if d == nil {
		return nil
	}
	return d.docs
}

// option is one size of the groups, and the best that attention does with it.
type option struct {
	Groups
	choice planner.Choice
	way    planner.Way         // of all layers
	kinds  map[int]planner.Way // of those that run by another
	ruled  string              // the backend that the rules would take

	refused map[int][]Rejected // why some do not, as LayerWays has it
}

// groups finds the best of each size of groups, the fastest that fits first.
func (d *Decider) groups(cfg *config.Config, ranks, perHost int, costs planner.Costs) (list []option, err error) {
	for data := 1; data <= ranks; data++ {
		unit := cfg.Train.MicroBatchSize * data
		if ranks%data != 0 || cfg.Train.GlobalBatchSize%unit != 0 || cfg.Parallel.Data > 0 && data != cfg.Parallel.Data ||
			cfg.Parallel.Context > 0 && ranks/data != cfg.Parallel.Context {
			continue
		}
		o := option{Groups: Groups{Context: ranks / data, Data: data}}
		known, err := d.option(cfg, &o, perHost, costs)
		if err != nil {
			return nil, err
		}
		if known {
			o.Seconds *= float64(cfg.Train.GlobalBatchSize / unit)
			list = append(list, o)
		}
	}
	margin := planner.Place{Shared: d.Machine.Arch == 0}.Margin()
	for len(list) > 1 { // the first that is as fast as any, of those that fit
		least := math.Inf(1)
		for _, o := range list {
			if !o.TooLarge {
				least = min(least, o.Seconds)
			}
		}
		i := slices.IndexFunc(list, func(o option) bool { return !o.TooLarge && o.Seconds*(1-margin) <= least })
		if i < 0 {
			i = 0 // none fits, which is said later; most ranks a sequence take least
			list[i].TooLarge = false
		}
		best := list[i]
		fits, err := d.fits(cfg, ranks, &best)
		if err != nil {
			return nil, err
		}
		if list[i].TooLarge = !fits; fits || least == math.Inf(1) {
			best.TooLarge = !fits
			list = slices.Delete(list, i, i+1)
			slices.SortStableFunc(list, func(a, b option) int { return cmp.Compare(a.Seconds, b.Seconds) })
			return slices.Insert(list, 0, best), nil
		}
	}
	return list, nil
}

// fits reports whether a run by that option has memory enough.
func (d *Decider) fits(cfg *config.Config, ranks int, o *option) (bool, error) {
	c, ok := d.resolved(cfg, o)
	if !ok {
		return false, nil
	}
	c.Attention.Backend = o.way.Backend // whose workspace counts
	demand, err := demandOf(c, d.Machine, o.kinds, nil)
	if err != nil {
		return false, err
	}
	m, err := fit(c, ranks, d.Machine, demand)
	return m.Fits, err
}

// resolved is a config as it is with the option; false: the option breaks a rule.
func (d *Decider) resolved(cfg *config.Config, o *option) (*config.Config, bool) {
	c := *cfg
	o.apply(&c)
	return &c, c.Resolve(o.Context*o.Data, d.Machine.Device()) == nil
}

// apart has kinds of layers run by algorithms of their own that are faster for them, where the backend of all layers takes the
// hops that they then have. Packings of documents choose by themselves.
func (d *Decider) apart(cfg *config.Config, o *option) (err error) {
	if cfg.Parallel.Algorithm != "auto" || cfg.Data.PackDocuments {
		return nil
	}
	c, ok := d.resolved(cfg, o)
	if !ok {
		return nil
	}
	taken := map[int]planner.Way{}
	o.refused = map[int][]Rejected{}
	o.kinds, o.Seconds = o.choice.Apart(o.way, func(window int, own planner.Way) bool {
		with := maps.Clone(taken)
		with[window] = own
		ok, against, e := d.takes(c, with, own.Backend)
		switch {
		case e != nil:
			err = e
		case ok:
			taken = with
		default:
			o.refused[window] = against
		}
		return ok
	})
	return err
}

// takes reports whether a run of a resolved config whose layers are of these kinds gets that backend, and if not, what rejects it.
// The answer is that which the launcher gets when it asks for the run.
func (d *Decider) takes(cfg *config.Config, kinds map[int]planner.Way, name string) (ok bool, against []Rejected, err error) {
	choice, err := backend.ChooseByWindow(cfg, ByWindow(cfg, kinds), d.Machine, d.Disabled)
	var all []backends.Rejection
	var why string // where no rule rejects that backend
	switch none := (*backends.NoBackendError)(nil); {
	case err == nil && choice.Backend.String() == name:
		return true, nil, nil
	case err == nil:
		all, why = choice.Rejected, fmt.Sprintf("auto takes %s, %s", choice.Backend, choice.Reason)
	case errors.As(err, &none):
		all, why = none.Rejected, err.Error()
	case errors.As(err, new(*backend.NoneError)):
		why = err.Error()
	default:
		return false, nil, err
	}
	all = slices.DeleteFunc(slices.Clone(all), func(r backends.Rejection) bool { return r.Backend.String() != name })
	if len(all) == 0 {
		return false, []Rejected{{Backend: name, Reason: why}}, nil
	}
	return false, rejectedOf(all), nil
}

// option chooses for groups of one size; false: nothing is known.
func (d *Decider) option(cfg *config.Config, o *option, perHost int, costs planner.Costs) (bool, error) {
	c := d.caseOf(cfg, o.Context, perHost)
	asked := planner.Asked{
		Layout: word(cfg.Parallel.Layout), Algorithm: word(cfg.Parallel.Algorithm), Inner: cfg.Parallel.Inner,
		GatherHeads: cfg.Parallel.GatherHeads, Gather: cfg.Parallel.Gather, Documents: cfg.Data.PackDocuments,
	}
	var preferred string
	var err error
	if asked.Backends, preferred, err = d.backends(cfg, o, c.DType, costs); err != nil || len(asked.Backends) == 0 {
		return false, err
	}
	if o.choice, err = planner.Choose(c, planner.Ways(c, asked), costs); err != nil || !o.choice.Known {
		return false, err
	}
	o.way, o.Seconds = o.choice.Best()
	o.ruled = preferred
	return true, d.apart(cfg, o)
}

// Case returns the attention of a config's layers over a context group of so many ranks, of sequences without documents.
func Case(cfg *config.Config, dtype tensor.DType, context int, at planner.Place) planner.Case {
	c := planner.Case{
		Attention: planner.Attention{
			DType: dtype, Deterministic: cfg.Train.Deterministic, Batch: cfg.Train.MicroBatchSize,
			Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads, Dim: cfg.Model.HeadDim, DimV: cfg.Model.HeadDim,
		},
		Tokens: cfg.Data.SeqLen, Ranks: context, At: at, Recompute: cfg.Memory.Recompute == "full",
	}
	if cfg.Data.PackDocuments {
		c.Batch = 1 // samples with documents go one by one
	}
	for _, w := range windowsOf(cfg) {
		c.Kinds = append(c.Kinds, planner.Kind{Window: w.window, Layers: int(w.layers)})
	}
	return c
}

func (d *Decider) caseOf(cfg *config.Config, context, perHost int) planner.Case {
	c := Case(cfg, computeType(cfg, d.Machine), context, planner.Place{PerHost: perHost, Shared: d.Machine.Arch == 0, Cores: d.Cores})
	c.Docs = d.docs
	return c
}

// computeType is the type that a config computes in, also before it is resolved.
func computeType(cfg *config.Config, m machine.Machine) tensor.DType {
	switch {
	case cfg.Precision.Compute != "auto":
		return backend.DType(cfg)
	case m.Arch == 0:
		return tensor.F32
	}
	return tensor.BF16
}

// word is what a key says; "" for auto.
func word(s string) string {
	if s == "auto" {
		return ""
	}
	return s
}

// measured is costs that know which backends they are of.
type measured interface {
	Has(backend string, t tensor.DType) bool
}

// backends lists those that can run attention in groups of that size and whose cost is known, and the one that the
// rules prefer. It asks for a ring in a zigzag; what is chosen is asked for again before a run begins.
func (d *Decider) backends(cfg *config.Config, o *option, dtype tensor.DType, costs planner.Costs) (list []string, preferred string, err error) {
	c := *cfg
	c.Parallel.Context, c.Parallel.Data = o.Context, o.Data
	if err := c.Resolve(o.Context*o.Data, d.Machine.Device()); err != nil {
		return nil, "", nil // config says what is wrong
	}
	choice, err := backend.Choose(&c, d.Machine, d.Disabled)
	if err != nil {
		return nil, "", ignore[*backend.NoneError](err)
	}
	preferred = choice.Backend.String()
	able := []backends.Backend{choice.Backend}
	if cfg.Attention.Backend == "auto" {
		able = append(able, choice.Layers[0].Able...)
	}
	for _, b := range able {
		name := b.String()
		if m, ok := costs.(measured); ok && !m.Has(name, dtype) || slices.Contains(list, name) || b == backends.Reference && b != choice.Backend {
			continue
		}
		if slices.ContainsFunc(choice.Layers, func(l *backends.Choice) bool { return b != choice.Backend && !slices.Contains(l.Able, b) }) {
			continue
		}
		list = append(list, name)
	}
	return list, preferred, nil
}

// ignore drops an error that is said elsewhere.
func ignore[T error](err error) error {
	if errors.As(err, new(T)) {
		return nil
	}
	return err
}

// names reports whether the config leaves the backend open, and costs take another than the rules.
func (o *option) names(cfg *config.Config) bool {
	return cfg.Attention.Backend == "auto" && o.way.Backend != o.ruled
}

// apply writes the option where a config leaves it open.
func (o *option) apply(cfg *config.Config) {
	p := &cfg.Parallel
	p.Context, p.Data = o.Context, o.Data
	if p.Layout == "auto" {
		p.Layout = o.way.Layout
	}
	if p.Algorithm == "auto" {
		p.Algorithm, p.GatherHeads = o.way.Algorithm, o.way.GatherHeads
	}
	if p.Algorithm == "allgather" && p.Gather == ring.Auto {
		p.Gather = o.way.When()
	}
	if p.Algorithm == "hierarchical" && p.Inner == 0 {
		p.Inner = o.way.Inner
	}
	if o.names(cfg) {
		cfg.Attention.Backend = o.way.Backend
	}
}

// explained is the option over the others.
func (o *option) explained(all []option) *Chosen {
	c := &Chosen{Seconds: o.Seconds, Models: o.choice.Ranked, Kinds: o.kinds}
	for _, x := range all {
		c.Groups = append(c.Groups, x.Groups)
	}
	for _, k := range o.choice.Kinds {
		_, own := o.kinds[k.Window]
		c.Layers = append(c.Layers, LayerWays{Window: k.Window, Layers: k.Layers, Ranked: k.Ranked, Apart: !own && k.Ranked[0].Way != o.way, Own: own, Refused: o.refused[k.Window]})
	}
	return c
}
