package backends

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// maxRanks bounds the ranks of a context group, and maxLength every size, so that products
// of a few of them do not overflow.
const (
	maxRanks  = 4096
	maxLength = 1 << 40
	maxSmall  = 1 << 16 // heads, head dims
)

// checked is p with its defaults filled in, or all that is wrong with it.
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
	if p.Causal {
		p.WindowRight = 0
	}
	c := paramsChecker{}
	c.sizes(&p)
	if p.Gather == "" {
		p.Gather = "beside"
	}
	if !slices.Contains([]string{"beside", "before", "auto"}, p.Gather) {
		c.fault("gather %q is none of beside, before, auto", p.Gather)
	}
	if !slices.Contains([]string{"ring", "allgather", "ulysses", "hierarchical"}, p.Algorithm) {
		c.fault("algorithm %q is none of ring, allgather, ulysses, hierarchical", p.Algorithm)
	}
	if !slices.Contains(partition.Names, p.Layout) {
		c.fault("layout %q is none of %s", p.Layout, strings.Join(partition.Names, ", "))
	}
	if p.Documents && !p.DocumentKeys && p.SeqQ != p.SeqKV {
		c.fault("documents need as many queries (%d) as keys (%d)", p.SeqQ, p.SeqKV)
	}
	if p.DocumentKeys && !p.Documents {
		c.fault("lengths of documents in keys need documents")
	}
	if p.Slices && (p.Causal || p.WindowLeft >= 0 || p.WindowRight >= 0 || p.Documents) {
		c.fault("slices stand in place of a causal mask, a window and documents")
	}
	return p, errors.Join(c.faults...)
}

type paramsChecker struct{ faults []error }

func (c *paramsChecker) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf("attention parameters: "+format, args...))
}

func (c *paramsChecker) between(name string, n, lo, hi int) {
	if n < lo || n > hi {
		c.fault("%s is %d, not between %d and %d", name, n, lo, hi)
	}
}

func (c *paramsChecker) sizes(p *Params) {
	c.between("batch", p.Batch, 1, maxLength)
	c.between("queries", p.SeqQ, 1, maxLength)
	c.between("keys", p.SeqKV, 1, maxLength)
	c.between("heads", p.Heads, 1, maxSmall)
	c.between("KV heads", p.KVHeads, 1, maxSmall)
	c.between("head dim", p.HeadDim, 1, maxSmall)
	c.between("head dim of v", p.HeadDimV, 1, maxSmall)
	c.between("window on the left", p.WindowLeft, -1, maxLength)
	c.between("window on the right", p.WindowRight, -1, maxLength)
	c.between("context size", p.ContextSize, 1, maxRanks)
	c.between("inner size", p.InnerSize, 1, p.ContextSize)
	c.between("architecture", p.Arch, 0, 9999)
	c.between("backend", int(p.Want), 0, int(Reference))
	if p.KVHeads > 0 && p.Heads%p.KVHeads != 0 {
		c.fault("%d query heads are not a multiple of %d KV heads", p.Heads, p.KVHeads)
	}
	if p.Algorithm == "hierarchical" && p.InnerSize > 0 && p.ContextSize%p.InnerSize != 0 {
		c.fault("%d ranks are not a multiple of the %d that exchange heads", p.ContextSize, p.InnerSize)
	}
	if !slices.Contains([]tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16}, p.DType) {
		c.fault("element type %s: want a float of 16, 32 or 64 bits", p.DType)
	}
}
