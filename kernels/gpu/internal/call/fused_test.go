package call

import (
	"testing"

	"github.com/cprun/cprun/tensor"
)

// Offsets up to 2^31 - 2 are accepted, of dense views and of views with gaps.
func TestFusedTrains(t *testing.T) {
	const rows = 1 << 31 / 4096
	alloc := func(batch, rows int) View { return tensor.NewMeter().Alloc(tensor.BF16, batch, rows, 32, 128) }
	few := alloc(1, rows-1)
	for _, c := range []struct {
		views []View
		ok    bool
	}{
		{[]View{few, few, few}, true}, {[]View{few.Slice(tensor.Seq, 0, 0)}, true},
		{[]View{few, few, alloc(1, rows)}, false}, {[]View{alloc(2, rows/2)}, false}, {[]View{alloc(2, rows/2-1)}, true},
		{[]View{alloc(1, rows).Slice(tensor.Dim, 0, 127)}, true},
		{[]View{alloc(1, 2*rows).Slice(tensor.Heads, 0, 1)}, false},
	} {
		if err := FusedTrains(c.views...); (err == nil) != c.ok {
			t.Errorf("%v: %v, want none: %t", c.views, err, c.ok)
		}
	}
}
