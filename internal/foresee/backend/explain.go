package backend

import (
	"fmt"
	"io"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Explain writes the choice and its reasons, at level 1 in a few lines, at level 2 with every
// parameter, every rule that spoke, and the layout of q, k and v with shapes and strides. The
// layers of each window have an explanation of their own. Level 0 writes warnings, which all layers share.
func (c *Choice) Explain(w io.Writer, level int) {
	for i, l := range c.Layers {
		if level == 0 && i > 0 {
			return
		}
		if of := c.of[i]; of != "" && level > 0 {
			fmt.Fprintf(w, "attention: %s\n", of)
		}
		l.Explain(w, level)
		if level > 1 && i == 0 {
			writeLayout(w, &l.Params)
		}
	}
}

// Layout names the layout of the q, k and v that kernels get: three dense tensors [batch, seq, heads, head dim].
const Layout = "bshd_bshd_bshd"

// writeLayout writes the layout of the model's q, k and v of rank 0 in memory: three dense tensors of
// its tokens.
func writeLayout(w io.Writer, p *backends.Params) {
	fmt.Fprintf(w, "attention: layout %s, three tensors in memory\n", Layout)
	layout, err := partition.New(p.Layout, []int{p.SeqQ})
	if err != nil {
		return // Select has refused such parameters
	}
	tokens := partition.Count(layout.Spans(p.SeqQ, max(1, p.ContextSize), 0))
	for _, t := range []struct {
		name       string
		heads, dim int
	}{{"q", p.Heads, p.HeadDim}, {"k", p.KVHeads, p.HeadDim}, {"v", p.KVHeads, p.HeadDimV}} {
		v := tensor.NewMeter().Alloc(p.DType, p.Batch, tokens, t.heads, t.dim)
		fmt.Fprintf(w, "attention:   %s %s of rank 0: shape %v, strides %v (batch, seq, heads, head dim)\n", t.name, p.DType, v.Shape(), v.Strides())
	}
}
