package command

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
)

// chooseRows decides how every row of a benchmark of attention runs, each like a training run of that length. All rows
// get one backend, since the device has one: if they would take several, the longest row chooses, if the others can run
// on its backend.
func (o *BenchOptions) chooseRows(task *job.Bench, ranks int, device string) error {
	s := task.Attention
	asked := s.Asked()
	s.Rows = slices.Clone(asked)
	for i := range s.Rows {
		s.Rows[i].Strategy = config.Ruled(asked[i].Strategy, config.Sharing{
			Device: device, Documents: s.Documents != "", Ranks: ranks, PerHost: ranks,
			Heads: s.Heads, KVHeads: s.KVHeads,
		})
	}
	if err := s.Check(ranks); err != nil {
		return err
	}
	answers, err := o.answers(task, ranks, asked)
	if err != nil {
		return err
	}
	order := slices.Clone(answers) // the longest first
	slices.SortStableFunc(order, func(a, b plan.Answer) int { return cmp.Compare(b.Predicted(), a.Predicted()) })
	for _, first := range order {
		if !slices.ContainsFunc(answers, func(a plan.Answer) bool { return a.Backend != first.Backend }) {
			break
		}
		for i := range asked {
			asked[i].Backend, s.Rows[i].Backend = first.Backend, first.Backend
		}
		var again []plan.Answer
		if again, err = o.answers(task, ranks, asked); err == nil {
			answers = again
			break
		}
	}
	if err != nil {
		return err
	}
	task.Remedies, s.Layouts, s.Algorithms = nil, nil, nil
	for i, a := range answers {
		s.Rows[i].Strategy, s.Backend = a.Strategy, a.Backend
		if !slices.Contains(s.Layouts, a.Layout) {
			s.Layouts = append(s.Layouts, a.Layout)
		}
		if !slices.Contains(s.Algorithms, a.Algorithm) {
			s.Algorithms = append(s.Algorithms, a.Algorithm)
		}
		if a.Algorithm == "allgather" && len(a.Ranked) > 0 {
			s.Rows[i].Gather = a.When()
		}
		task.Remedies = append(task.Remedies, a.Choice.Kinds()...)
	}
	if len(answers) == 1 {
		s.Predicted = answers[0].Ranked
	}
	slices.Sort(task.Remedies)
	task.Remedies = slices.Compact(task.Remedies)
	return nil
}

// answers decides each row.
func (o *BenchOptions) answers(task *job.Bench, ranks int, asked []bench.AttentionCase) ([]plan.Answer, error) {
	var list []plan.Answer
	s := task.Attention
	dtype, err := bench.DType(s.DType, task.Machine.IsCPU())
	if err != nil {
		return nil, err
	}
	docs := s.Longest()
	for i, w := range s.Rows {
		a, _, err := o.strategy(task.Machine, plan.Question{
			Attentions: []backend.Request{{
				Strategy: w.Strategy, Of: fmt.Sprintf("%d tokens, %s, %s", w.Seq, w.Layout, w.Algorithm), DType: dtype,
				Batch: 1, SeqQ: w.Seq, SeqKV: w.Seq, Heads: s.Heads, KVHeads: s.KVHeads,
				HeadDim: s.HeadDim, HeadDimV: s.HeadDim, Causal: s.Causal, Window: s.Window, Documents: docs != nil,
				Training: true, Deterministic: s.Deterministic, Ranks: ranks,
			}},
			Asked: asked[i].Strategy, Docs: docs, Ranks: ranks, PerHost: ranks,
		})
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}
