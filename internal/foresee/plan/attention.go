package plan

import (
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/backends"
)

// Attention is the chosen backend.
type Attention struct {
	Backend  string     `json:"backend"`
	Reason   string     `json:"reason"`
	Rejected []Rejected `json:"rejected"`
	Named    []Named    `json:"named"`
	Layout   string     `json:"layout"` // of q, k, v in memory
	Remedies []Remedy   `json:"remedies"`
}

// Rejected is a backend that was not chosen, and a rule that rejects it.
type Rejected struct {
	Backend string `json:"backend"`
	Rule    string `json:"rule"`
	Reason  string `json:"reason"`
	Fix     string `json:"fix"`
	Hop     string `json:"hop,omitempty"`     // "" where the rule spoke of the whole run
	Example string `json:"example,omitempty"` // one such hop: its rank, lengths and mask
}

// Named is a backend that could run this, but is so slow that it runs only where it is named.
type Named struct {
	Backend string `json:"backend"`
	Reason  string `json:"reason"` // why auto does not take it
	Fix     string `json:"fix"`    // what does
}

// Remedy is what a run does to tensors so that its backend takes them.
type Remedy struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
	Cost string `json:"cost"`
	Rule string `json:"rule"` // which it answers
	Hop  string `json:"hop,omitempty"`
}

func attentionOf(c *backend.Choice) Attention {
	a := Attention{Rejected: []Rejected{}, Named: []Named{}, Remedies: []Remedy{}}
	if c == nil {
		return a
	}
	a.Backend, a.Reason = c.Backend.String(), c.Reason
	a.Rejected = append(a.Rejected, rejectedOf(c.Rejected)...)
	for _, b := range c.Layers[0].Named {
		reason, fix := backends.ToName(b, c.Layers[0].Params.Arch)
		a.Named = append(a.Named, Named{Backend: b.String(), Reason: reason, Fix: fix})
	}
	for _, r := range c.Remedies {
		a.Remedies = append(a.Remedies, Remedy{Kind: r.Kind.String(), Text: r.Text + r.More, Cost: r.Cost, Rule: r.Rule, Hop: r.Hop})
	}
	a.Layout = backend.Layout
	return a
}

func rejectedOf(list []backends.Rejection) (out []Rejected) {
	for _, r := range list {
		out = append(out, Rejected{Backend: r.Backend.String(), Rule: r.Rule, Reason: r.Reason, Fix: r.Fix, Hop: r.Hop, Example: r.Example})
	}
	return out
}
