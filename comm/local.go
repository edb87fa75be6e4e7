package comm

import (
	"fmt"

	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// NewLocal joins n ranks of this process and returns their groups, by rank. Messages are one
// copy from the sender's view to the receiver's. Rank r's calls are ordered against compute[r];
// a nil slice or element means a private stream, for callers that only use Sync. Each group is
// closed on its own. It panics when n is below 1 or compute has another length.
func NewLocal(n int, compute []tensor.Stream, opts Options) []*Group {
	return newLocal(n, 0, compute, opts)
}

// newLocal has all pairs talk to each other in collectives of up to pairs ranks; 0 means any number.
func newLocal(n, pairs int, compute []tensor.Stream, opts Options) []*Group {
	if n < 1 || compute != nil && len(compute) != n {
		panic(fmt.Sprintf("comm: local world of %d ranks with %d compute streams", n, len(compute)))
	}
	w := local.NewWorld(n)
	groups := make([]*Group, n)
	for r := range n {
		var s tensor.Stream
		if compute != nil {
			s = compute[r]
		}
		l := w.Link(r)
		l.Pairs = pairs
		groups[r] = NewWorld(l, r, s, opts)
	}
	return groups
}
