package backends

import (
	"fmt"
	"io"
	"strings"
)

// Explain writes the reasons of the choice. Level 0 writes warnings alone; 1 adds the choice and its remedies; 2 adds
// the run, the call of each hop and every rule that rejected a backend. It ignores errors of w.
func (c *Choice) Explain(w io.Writer, level int) {
	var b strings.Builder
	for _, r := range c.Warnings() {
		fmt.Fprintf(&b, "attention: warning: %s\n", r)
	}
	if level < 1 {
		io.WriteString(w, b.String())
		return
	}
	fmt.Fprintf(&b, "attention: %s: %s\n", c.Backend, c.Reason)
	for _, a := range c.Remedies {
		hop := ""
		if a.Hop != "" {
			hop = fmt.Sprintf(" in hop %q", a.Hop)
		}
		fmt.Fprintf(&b, "attention: remedy %s for %s%s: %s%s; costs %s\n", a.Kind, a.Rule, hop, a.Text, a.More, a.Cost)
	}
	if n := c.Workspace(); n > 0 {
		fmt.Fprintf(&b, "attention: workspace of %.1f MiB for each layer's call\n", float64(n)/(1<<20))
	}
	if level > 1 {
		c.Params.describe(&b)
		for i := range c.Hops {
			fmt.Fprintf(&b, "attention: hop %q: %s\n", c.Hops[i].Hop, &c.Hops[i])
		}
		for _, r := range c.Rejected {
			fmt.Fprintf(&b, "attention: %s\n", r)
			if r.Remedy != nil {
				fmt.Fprintf(&b, "attention:   remedy: %s\n", r.Remedy.Text)
			}
		}
		for _, n := range c.Named {
			reason, fix := NamedOnly(n, c.Params.Arch)
			fmt.Fprintf(&b, "attention: %s: %s Fix: %s\n", n, reason, fix)
		}
		fmt.Fprintf(&b, "attention: able: %s\n", names(c.Able))
	}
	io.WriteString(w, b.String())
}

func names(bs []Backend) string {
	s := make([]string, len(bs))
	for i, b := range bs {
		s[i] = b.String()
	}
	return strings.Join(s, ", ")
}

// describe writes the parameters, one line for each topic.
func (p *Params) describe(b *strings.Builder) {
	line := func(format string, args ...any) { fmt.Fprintf(b, "attention: "+format+"\n", args...) }
	line("machine: %s, cuDNN %s, flash %s", archName(p.Arch), p.CUDNN, p.Flash)
	line("q %v, k %v, v %v, %s", []int{p.Batch, p.SeqQ, p.Heads, p.HeadDim},
		[]int{p.Batch, p.SeqKV, p.KVHeads, p.HeadDim},
		[]int{p.Batch, p.SeqKV, p.KVHeads, p.HeadDimV}, p.DType)
	line("causal %t, window (%d, %d), documents %t", p.Causal, p.WindowLeft, p.WindowRight, p.Documents)
	line("sink %t, softcap %t, bias %t, largest logit %t", p.Sink, p.Softcap, p.Bias, p.MaxLogit)
	line("training %t, deterministic %t", p.Training, p.Deterministic)
	line("ranks %d, algorithm %s, gather %s, layout %s", p.ContextSize, p.Algorithm, p.Gather, p.Layout)
}
