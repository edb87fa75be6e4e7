package backends

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cprun/cprun/partition"
)

// maxLength bounds lengths, so that products of a few of them do not overflow.
const maxLength = 1 << 40

// checked returns p with its defaults filled in, or an error for ranks, heads or lengths that no run can have. Other
// values are checked where they enter the program.
func (p Params) checked() (Params, error) {
	if p.ContextSize == 0 {
		p.ContextSize = 1
	}
	if p.InnerSize == 0 && (p.Algorithm != "hierarchical" || p.ContextSize == 1) {
		p.InnerSize = 1
	}
	if p.Algorithm == "" {
		p.Algorithm = "ring"
	}
	if p.Layout == "" {
		p.Layout = "zigzag"
	}
	if p.Gather == "" {
		p.Gather = "beside"
	}
	if p.Causal {
		p.WindowRight = 0
	}
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("attention parameters: "+format, args...))
	}
	if n := min(p.Batch, p.SeqQ, p.SeqKV, p.HeadDim, p.HeadDimV); n < 1 || max(p.Batch, p.SeqQ, p.SeqKV) > maxLength {
		fault("batch %d, %d queries, %d keys, head dims %d and %d: want 1 to %d", p.Batch, p.SeqQ, p.SeqKV, p.HeadDim,
			p.HeadDimV, maxLength)
	}
	if p.KVHeads < 1 || p.Heads < 1 || p.Heads%p.KVHeads != 0 {
		fault("%d query heads are not a multiple of %d KV heads", p.Heads, p.KVHeads)
	}
	if !slices.Contains([]string{"ring", "allgather", "ulysses", "hierarchical"}, p.Algorithm) {
		fault("algorithm %q is not known", p.Algorithm)
	}
	if !slices.Contains(partition.Names, p.Layout) {
		fault("layout %q is not known", p.Layout)
	}
	if p.ContextSize < 1 || p.InnerSize < 1 || p.ContextSize%p.InnerSize != 0 {
		fault("%d ranks are not a multiple of the %d that exchange heads", p.ContextSize, p.InnerSize)
	}
	return p, errors.Join(faults...)
}
