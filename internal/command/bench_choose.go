package command

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/bench"
	"github.com/cprun/cprun/internal/job"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// chooseWay resolves a layout and an algorithm that are auto: by costs where they are known, as a run does, else by the
// rules. What was compared goes into the spec.
func (o *BenchOptions) chooseWay(task *job.Bench, ranks int) error {
	s := task.Attention
	autoLayout, autoAlgorithm := slices.Equal(s.Layouts, []string{"auto"}), slices.Equal(s.Algorithms, []string{"auto"})
	if !autoLayout && !autoAlgorithm {
		return nil
	}
	if len(s.Seq) != 1 || len(s.Gathers) > 1 || !s.Causal || !autoLayout && len(s.Layouts) != 1 || !autoAlgorithm && len(s.Algorithms) != 1 {
		return errors.New("--layout auto, --algorithm auto: want one length with a causal mask, one --gather, and one of the other two")
	}
	asked := planner.Asked{Inner: s.Inner, GatherHeads: s.GatherHeads, Gather: cmp.Or(s.Gathers...), Documents: s.Documents != ""}
	if !autoLayout {
		asked.Layout = s.Layouts[0]
	}
	if !autoAlgorithm {
		asked.Algorithm = s.Algorithms[0]
	}
	ruled := planner.Way{Layout: "zigzag", Algorithm: "ring"} // as package config has it
	if asked.Documents {
		if ruled.Layout = "document"; task.Machine.Arch == 0 {
			ruled.Algorithm = "allgather"
		}
	}
	way := ruled
	known, err := o.known(task.Machine)
	if err != nil {
		return err
	}
	if costs := known(ranks, ranks); costs != nil {
		choice, err := o.compare(task, asked, ranks, costs)
		if err != nil {
			return err
		}
		if choice.Known {
			s.Predicted = choice.Kinds[0].Ranked
			way, s.Backend = s.Predicted[0].Way, s.Predicted[0].Backend
		}
	}
	if autoLayout {
		s.Layouts = []string{way.Layout}
	}
	if autoAlgorithm {
		s.Algorithms, s.Inner, s.GatherHeads = []string{way.Algorithm}, way.Inner, way.GatherHeads
	}
	if len(s.Predicted) > 0 && way.Algorithm == "allgather" {
		s.Gathers = []string{way.When()}
	}
	return nil
}

// compare is the times of all ways.
func (o *BenchOptions) compare(task *job.Bench, asked planner.Asked, ranks int, costs planner.Costs) (planner.Choice, error) {
	s := task.Attention
	dtype, err := bench.DType(s.DType, task.Machine.Arch == 0)
	if err == nil {
		asked.Backends, err = o.able(task, ranks, dtype, costs)
	}
	if err != nil {
		return planner.Choice{}, err
	}
	c := planner.Case{
		Attention: planner.Attention{DType: dtype, Deterministic: s.Deterministic, Batch: 1, Heads: s.Heads, KVHeads: s.KVHeads, Dim: s.HeadDim, DimV: s.HeadDim},
		Tokens:    s.Seq[0], Kinds: []planner.Kind{{Window: s.Window, Layers: 1}}, Ranks: ranks,
		At: planner.Place{PerHost: ranks, Shared: task.Machine.Arch == 0, Cores: coresOf(task.Machine)},
	}
	if len(s.Packs) > 0 {
		c.Docs = s.Packs[0]
		if _, err := partition.NewMask(true, s.Window, c.Tokens, c.Tokens, c.Docs); err != nil {
			return planner.Choice{}, fmt.Errorf("--documents: %w", err)
		}
	}
	return planner.Choose(c, planner.Ways(c, asked), costs)
}

// able is the backends that can run a ring here and whose costs are known, the preferred one first.
func (o *BenchOptions) able(task *job.Bench, ranks int, dtype tensor.DType, costs planner.Costs) (list []string, err error) {
	s := task.Attention
	choice, err := ask(0, func(disabled uint8) (*backend.Choice, error) {
		return backend.Select(task.Machine, disabled, backend.Request{
			Want: s.Backend, DType: dtype, Batch: 1, SeqQ: s.Seq[0], SeqKV: s.Seq[0], Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, HeadDimV: s.HeadDim,
			Causal: true, Window: s.Window, Training: true, Deterministic: s.Deterministic, Ranks: ranks, Algorithm: "ring", Layout: "zigzag", Documents: s.Documents != "",
		})
	})
	if err != nil {
		return nil, err
	}
	known, _ := costs.(interface {
		Has(backend string, t tensor.DType) bool
	})
	able := []backends.Backend{choice.Backend}
	if s.Backend == "auto" {
		able = append(able, choice.Layers[0].Able...)
	}
	for _, b := range able {
		if name := b.String(); (known == nil || known.Has(name, dtype)) && !slices.Contains(list, name) && (b != backends.Reference || b == choice.Backend) {
			list = append(list, name)
		}
	}
	return list, nil
}
