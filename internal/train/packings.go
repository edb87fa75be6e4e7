package train

import (
	"slices"

	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
)

// Packings chooses how attention of each packing of documents runs. All ranks of a context group have the same, so that
// they agree.
type Packings struct {
	ways  []planner.Way
	of    planner.Case // without what a packing is
	cache *planner.Cache
}

// NewPackings returns what chooses among some ways of the layout of a run, by costs. of is the attention of the run's
// layers, without documents.
func NewPackings(costs planner.Costs, of planner.Case, ways []planner.Way) *Packings {
	return &Packings{ways: ways, of: of, cache: planner.NewCache(costs, planner.CacheChoices)}
}

// way is what the layers of a window do with a packing; false: what the config says.
func (p *Packings) way(shape partition.Shape, window int) (w planner.Way, ok bool, err error) {
	if p == nil || len(shape.Mask.Docs) == 0 {
		return w, false, nil
	}
	c := p.of
	c.Docs, c.Laid = shape.Mask.Docs, shape.Layout
	choice, err := p.cache.Quick(c, p.ways)
	if err != nil || !choice.Known {
		return w, false, err
	}
	i := slices.IndexFunc(choice.Kinds, func(k planner.KindChoice) bool { return k.Window == window })
	if i < 0 {
		return w, false, nil
	}
	return choice.Kinds[i].Ranked[0].Way, true, nil
}
