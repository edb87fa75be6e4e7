package plan

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/ring"
)

// Chosen is a choice by costs, with its alternatives.
type Chosen struct {
	// Seconds of attention in one optimizer step, forward and backward, on the slowest rank.
	Seconds float64 `json:"seconds_per_step"`
	// Groups are the sizes of context and data groups that were compared, the chosen one first.
	Groups []Groups `json:"groups"`
	// Strategies are likewise for groups of the chosen size; seconds of all layers for one micro batch.
	Strategies []planner.Timed `json:"strategies"`
	// Backend is the backend of attention where costs took another than the rules have, which is Ruled; "": none.
	Backend string `json:"backend,omitempty"`
	Ruled   string `json:"ruled,omitempty"`
}

// Groups are sizes of the groups of ranks.
type Groups struct {
	Context int     `json:"context"`
	Data    int     `json:"data"`
	Seconds float64 `json:"seconds_per_step"` // of attention
	// TooLarge says that it does not fit the memory. Groups that take longer than the chosen ones were not checked.
	TooLarge bool `json:"too_large,omitempty"`
}

// Decide fills sizes of groups and fields of the strategy that a config leaves auto, if costs are known. It leaves the
// rest to the rules of package config.
func (d *Decider) Decide(cfg *config.Config, ranks, hosts int) error {
	if d == nil || d.Costs == nil {
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
	list, err := d.options(cfg, ranks, hosts)
	if err != nil || len(list) == 0 {
		return err
	}
	if list, err = d.prefer(cfg, ranks, list); err != nil {
		return err
	}
	d.best = &list[0]
	d.Chosen = &Chosen{Seconds: d.best.Seconds, Strategies: d.best.Ranked}
	for _, o := range list {
		d.Chosen.Groups = append(d.Chosen.Groups, o.Groups)
	}
	return d.Repeat(cfg, ranks, hosts)
}

// Repeat decides as the last call of Decide did, for a config of other lengths.
func (d *Decider) Repeat(cfg *config.Config, ranks, hosts int) error {
	best := d.best
	if best == nil {
		return d.Decide(cfg, ranks, hosts)
	}
	best.apply(cfg)
	if best.Ruled != "" {
		d.Chosen.Backend, d.Chosen.Ruled = best.Strategy.Backend, best.Ruled
		cfg.Parallel.Backend = best.Strategy.Backend
	}
	return nil
}

// First returns the documents that Decide has gone by; nil: it asked for none, or there were none.
func (d *Decider) First() []int { return d.docs }

type option struct {
	Groups
	Answer
	question Question // that Answer answers
}

func (d *Decider) options(cfg *config.Config, ranks, hosts int) (list []option, err error) {
	perHost := ranks
	if hosts > 1 && ranks%hosts == 0 {
		perHost = ranks / hosts
	}
	for data := 1; data <= ranks; data++ {
		unit := cfg.Train.MicroBatchSize * data
		if ranks%data != 0 || cfg.Train.GlobalBatchSize%unit != 0 {
			continue
		}
		o := option{Groups: Groups{Context: ranks / data, Data: data}}
		if p := cfg.Parallel; p.Data > 0 && p.Data != data || p.Context > 0 && p.Context != o.Context {
			continue
		}
		c, ok := d.resolved(cfg, &o)
		if !ok {
			continue // package config reports the fault
		}
		q := questionOf(c)
		q.Requested, q.Docs, q.Ranks, q.PerHost = cfg.Parallel.Strategy, d.docs, ranks, perHost
		o.Answer, err = d.Strategy(q)
		if errors.As(err, new(*backend.NoneError)) {
			continue // the final choice of a backend says so
		} else if err != nil {
			return nil, err
		}
		if o.question = q; len(o.Ranked) > 0 {
			o.Seconds = o.Ranked[0].Seconds * float64(cfg.Train.GlobalBatchSize/unit)
			list = append(list, o)
		}
	}
	return list, nil
}

func questionOf(cfg *config.Config) Question {
	return Question{Attentions: backend.Requests(cfg), Recompute: cfg.Memory.Recompute == "full"}
}

// prefer moves the first option that fits and is within the margin of the fastest to the front, and sorts the others.
// If none fits, the order stays: most ranks a sequence need least memory, and the memory plan reports it. If the
// strategy of an option does not fit, a ring replaces it.
func (d *Decider) prefer(cfg *config.Config, ranks int, list []option) ([]option, error) {
	margin := planner.Topology{Shared: d.Machine.IsCPU()}.Margin()
	seconds := func(o option) float64 {
		if o.TooLarge {
			return math.Inf(1)
		}
		return o.Seconds
	}
	for range list {
		sorted := slices.Clone(list)
		planner.First(sorted, margin, seconds)
		fits, err := d.fits(cfg, ranks, &sorted[0])
		if err == nil && !fits {
			fits, err = d.ring(cfg, ranks, &sorted[0])
		}
		if err != nil {
			return nil, err
		}
		if fits {
			slices.SortStableFunc(sorted[1:], func(a, b option) int { return cmp.Compare(a.Seconds, b.Seconds) })
			return sorted, nil
		}
		i := slices.IndexFunc(list, func(o option) bool { return o.Context == sorted[0].Context })
		list[i] = sorted[0]
		list[i].TooLarge = true
	}
	return list, nil
}

func (d *Decider) fits(cfg *config.Config, ranks int, o *option) (bool, error) {
	c, ok := d.resolved(cfg, o)
	if !ok {
		return false, nil
	}
	c.Parallel.Backend = o.Strategy.Backend // its workspace counts
	demand, err := demandOf(c, d.Machine, &Data{First: d.docs}, nil)
	if err != nil {
		return false, err
	}
	m, err := fit(c, ranks, d.Machine, demand)
	return m.Fits, err
}

// ring makes an open algorithm of the option a ring, which needs the least memory, and reports whether that fits.
func (d *Decider) ring(cfg *config.Config, ranks int, o *option) (bool, error) {
	q := o.question
	if open(q.Requested.Algorithm) != "" || o.Strategy.Algorithm == "ring" {
		return false, nil
	}
	q.Requested.Algorithm = "ring"
	a, err := d.Strategy(q)
	if err != nil || len(a.Ranked) == 0 {
		return false, err
	}
	o.Seconds *= a.Predicted() / o.Predicted()
	others := slices.DeleteFunc(slices.Clone(o.Ranked), func(t planner.Timed) bool { return t.Strategy == a.Strategy })
	a.Ranked = append(a.Ranked[:1:1], others...)
	o.Answer = a
	return d.fits(cfg, ranks, o)
}

// resolved returns the config with the option; false: the option breaks a rule.
func (d *Decider) resolved(cfg *config.Config, o *option) (*config.Config, bool) {
	c := *cfg
	o.apply(&c)
	return &c, c.Resolve(o.Context*o.Data, d.Machine.Device()) == nil
}

// apply fills open fields of a config from the option, except the backend.
func (o *option) apply(cfg *config.Config) {
	p, s := &cfg.Parallel, o.Strategy
	p.Context, p.Data = o.Context, o.Data
	if s == (ring.Strategy{}) {
		return // not decided yet
	}
	p.Layout = s.Layout
	if p.Algorithm == "auto" {
		p.Algorithm, p.GatherHeads = s.Algorithm, s.GatherHeads
	}
	if p.Algorithm == "allgather" && p.Gather == ring.Auto {
		p.Gather = s.When()
	}
	if p.Algorithm == "hierarchical" {
		p.Inner = s.Inner
	}
}

// runnersUp limits the strategies that the text shows besides the chosen one and the slowest; --json has all.
const runnersUp = 6

func (c *Chosen) write(b *strings.Builder) {
	fmt.Fprintf(b, "\nchoice      by the costs of this machine: attention takes %s of a step\n",
		readable.Seconds(c.Seconds))
	first := c.Strategies[0]
	fmt.Fprintf(b, "            %s: %s of a micro batch, all layers\n", first.Strategy, readable.Seconds(first.Seconds))
	for j, t := range c.Strategies[1:] {
		if last := j == len(c.Strategies)-2; j < runnersUp || last {
			more := 100 * (t.Seconds/first.Seconds - 1)
			fmt.Fprintf(b, "              %-44s %10s  %+.1f%%\n", t.Strategy, readable.Seconds(t.Seconds), more)
		} else if j == runnersUp {
			fmt.Fprintf(b, "              %d more\n", len(c.Strategies)-runnersUp-2)
		}
	}
	if len(c.Groups) > 1 {
		var list []string
		for _, g := range c.Groups {
			text := fmt.Sprintf("%d x %d ranks %s", g.Data, g.Context, readable.Seconds(g.Seconds))
			if g.TooLarge {
				text += " (does not fit the memory)"
			}
			list = append(list, text)
		}
		fmt.Fprintf(b, "            data x context, attention of a step: %s\n", strings.Join(list, "; "))
	}
}

// Attention is the chosen backend.
type Attention struct {
	Backend  string     `json:"backend"`
	Reason   string     `json:"reason"`
	Rejected []Rejected `json:"rejected"`
	Named    []Named    `json:"named"`
	Layout   string     `json:"layout"` // of q, k, v in memory
	Remedies []Remedy   `json:"remedies"`
}

// Rejected is a backend that was not chosen, and a rule that rejects it.
type Rejected struct {
	Backend string `json:"backend"`
	Rule    string `json:"rule"`
	Reason  string `json:"reason"`
	Fix     string `json:"fix"`
	Hop     string `json:"hop,omitempty"`     // "" where the rule spoke of the whole run
	Example string `json:"example,omitempty"` // one such hop: its rank, lengths and mask
}

// Named is a backend that could run this, but so slowly that only a user's choice selects it.
type Named struct {
	Backend string `json:"backend"`
	Reason  string `json:"reason"` // why auto does not take it
	Fix     string `json:"fix"`    // what does
}

// Remedy is a change of tensors that the chosen backend needs.
type Remedy struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
	Cost string `json:"cost"`
	Rule string `json:"rule"` // which it answers
	Hop  string `json:"hop,omitempty"`
}

func attentionOf(c *backend.Choice) Attention {
	a := Attention{Rejected: []Rejected{}, Named: []Named{}, Remedies: []Remedy{}}
	if c == nil {
		return a
	}
	a.Backend, a.Reason = c.Backend.String(), c.Reason
	for _, r := range c.Rejected {
		a.Rejected = append(a.Rejected, Rejected{r.Backend.String(), r.Rule, r.Reason, r.Fix, r.Hop, r.Example})
	}
	for _, b := range c.Layers[0].Named {
		reason, fix := backends.NamedOnly(b, c.Layers[0].Params.Arch)
		a.Named = append(a.Named, Named{Backend: b.String(), Reason: reason, Fix: fix})
	}
	for _, r := range c.Remedies {
		a.Remedies = append(a.Remedies, Remedy{Kind: string(r.Kind), Text: r.Text + r.More, Cost: r.Cost, Rule: r.Rule,
			Hop: r.Hop})
	}
	a.Layout = backend.Layout
	return a
}
