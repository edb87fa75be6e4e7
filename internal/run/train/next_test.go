package train

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// The last bucket of a pass also gathers the first one of the next pass, but not before an update changes its weights.
func TestNextPassIsGatheredEarly(t *testing.T) {
	flat := shareLayout()
	for last, want := range map[bool][]int{false: {flat.Layer(0), flat.Embedding()}, true: {flat.Layer(0)}} {
		s, err := state.New(state.Meter{}, state.Options{Layout: flat, Shard: state.ShardParameters, Compute: tensor.F32,
			Groups: state.Groups(flat, state.Group{Size: 2})})
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		x := newSharing(&Device{}, s)
		x.last, x.residence.gather = last, func(bucket int) error { got = append(got, bucket); return nil }
		if err := x.use(flat.Layer(0), model.NoBucket); err != nil || !slices.Equal(got, want) {
			t.Errorf("last pass %t: gathers of %v, %v; want %v", last, got, err, want)
		}
	}
}
