package command

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// plan.json shows the documents that the choice read, without opening the data again.
func TestFirstDocumentsAreReadOnce(t *testing.T) {
	docs, reads := []int{20, 30, 14}, 0
	d := &plan.Decider{
		Machine: machine.Machine{}, Costs: func(_, _ int) planner.Costs { return perPair{} },
		Docs: func(*config.Config) []int { reads++; return docs },
	}
	cfg := must.Have(config.Load("../../../examples/opticks.yaml", config.Options{
		Ranks: 2, Device: "cpu", NoFiles: true, Decide: d.Decide, Set: []string{"data.pack_documents=true",
			"data.seq_len=64", "data.eos_token_id=0"},
	}))
	cfg.Data.Path = nil // opening it fails
	if got, err := firstDocuments(d.First(), cfg); err != nil || !slices.Equal(got, docs) || reads != 1 {
		t.Errorf("%v after %d reads, %v", got, reads, err)
	}
	if _, err := firstDocuments(nil, cfg); err == nil {
		t.Error("without a choice the data is not opened")
	}
}
