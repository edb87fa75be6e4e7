package command

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
)

// costsOfPairs implements planner.Costs for a machine on which only visible pairs take time.
type costsOfPairs struct{}

func (costsOfPairs) Call(c planner.Call) float64       { return 1e-9 * float64(partition.Pairs(c.Tiles)) }
func (costsOfPairs) Exchange(bool, int64, int) float64 { return 0 }
func (costsOfPairs) Copy(int64) float64                { return 0 }
func (costsOfPairs) Host(int) float64                  { return 0 }

// plan.json shows the documents that the choice read, without opening the data again.
func TestFirstDocumentsAreReadOnce(t *testing.T) {
	docs, reads := []int{20, 30, 14}, 0
	d := &plan.Decider{
		Machine: machine.Machine{}, Costs: func(_, _ int) planner.Costs { return costsOfPairs{} },
		Docs: func(*config.Config) []int { reads++; return docs },
	}
	cfg, err := config.Load("../../../examples/opticks.yaml", config.Options{
		Ranks: 2, Device: "cpu", NoFiles: true, Decide: d.Decide, Set: []string{"data.pack_documents=true",
			"data.seq_len=64", "data.eos_token_id=0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Data.Path = nil // opening it fails
	if got, err := firstDocuments(d.First(), cfg); err != nil || !slices.Equal(got, docs) || reads != 1 {
		t.Errorf("%v after %d reads, %v", got, reads, err)
	}
	if _, err := firstDocuments(nil, cfg); err == nil {
		t.Error("without a choice the data is not opened")
	}
}
