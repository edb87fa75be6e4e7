// Package backend asks package internal/model/backends which backend a run of a config gets: it turns a
// resolved config and a machine into parameters, and the answers for all layers into one choice.
package backend

import (
	"fmt"
	"io"
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Choice is the backend of all attentions of a run.
type Choice struct {
	Backend  backends.Backend
	Reason   string
	Rejected []backends.Rejection // of all layers, each once; Hop names the layers where not all are meant
	Remedies []backends.Applied
	// Layers are the answers for each request, in training for each distinct window, the widest first.
	Layers []*backends.Choice
	of     []string // Request.Of of each
}

// A NoneError reports that no backend can run a request.
type NoneError struct {
	Want    backends.Backend
	Machine machine.Machine
	Of      string // which attention of the run; "" where all are alike
	Err     error  // *backends.NoBackendError, or a fault of the parameters
}

func (e *NoneError) Error() string {
	of := ""
	if e.Of != "" {
		of = " for " + e.Of
	}
	return fmt.Sprintf("%s%s on %s: %v", e.Want, of, e.Machine, e.Err)
}

func (e *NoneError) Unwrap() error { return e.Err }

// selector keeps the answers of this process, which plans a config more than once.
var selector backends.Selector

// Choose selects a backend for the layers of a resolved config. Its errors name the key.
func Choose(cfg *config.Config, m machine.Machine, disabled uint8) (*Choice, error) {
	c, err := Select(m, disabled, Requests(cfg)...)
	if err != nil {
		return nil, &keyError{cfg.Fault("attention.backend", err).Error(), err}
	}
	return c, nil
}

// A keyError adds the place of a key in a config.
type keyError struct {
	text string
	err  error
}

func (e *keyError) Error() string { return e.text }
func (e *keyError) Unwrap() error { return e.err }

// Select returns the one backend that serves every attention of a run on a machine: the best that
// all can use, so that one set of kernels is loaded and one order of sums is used throughout.
func Select(m machine.Machine, disabled uint8, requests ...Request) (*Choice, error) {
	params := make([]backends.Params, len(requests))
	for i := range requests {
		var err error
		if params[i], err = requests[i].params(m, disabled); err != nil {
			return nil, err
		}
	}
	each := make([]*backends.Choice, len(requests))
	for i := range requests {
		var err error
		if each[i], err = selector.Select(params[i]); err != nil {
			return nil, &NoneError{params[i].Want, m, requests[i].Of, err}
		}
	}
	first := each[0].Backend
	if slices.ContainsFunc(each, func(c *backends.Choice) bool { return c.Backend != first }) {
		var err error
		if each, err = common(params, each); err != nil {
			return nil, &NoneError{params[0].Want, m, "all of a run together", err}
		}
	}
	return merge(requests, each), nil
}

// common finds one backend for attentions that differ in their best one: the first in the order of the first
// attention that all can use.
func common(params []backends.Params, best []*backends.Choice) ([]*backends.Choice, error) {
	for _, b := range best[0].Able {
		if slices.ContainsFunc(best, func(c *backends.Choice) bool { return !slices.Contains(c.Able, b) }) {
			continue
		}
		out := make([]*backends.Choice, len(params))
		for i, p := range params {
			p.Want = b
			c, err := selector.Select(p)
			if err != nil {
				return nil, err
			}
			// What each alone would have got says which rules reject the rest.
			all := *c
			all.Reason = "the fastest that all attentions of the run can use"
			all.Rejected, all.Named = best[i].Rejected, best[i].Named
			out[i] = &all
		}
		return out, nil
	}
	var all []backends.Rejection
	for _, c := range best {
		all = append(all, c.Rejected...)
	}
	return nil, &backends.NoBackendError{Params: params[0], Rejected: all}
}

func merge(requests []Request, layers []*backends.Choice) *Choice {
	c := &Choice{Backend: layers[0].Backend, Reason: layers[0].Reason, Layers: layers}
	for i := range requests {
		c.of = append(c.of, requests[i].Of)
	}
	type key struct {
		backend   backends.Backend
		rule, hop string
	}
	spoke, cured := map[key]bool{}, map[key]bool{}
	for i, l := range layers {
		of := ""
		if i > 0 {
			of = requests[i].Of
		}
		for _, r := range l.Rejected {
			if k := (key{r.Backend, r.Rule, r.Hop}); r.Backend != c.Backend && !spoke[k] {
				spoke[k] = true
				r.Hop = hopOf(of, r.Hop)
				c.Rejected = append(c.Rejected, r)
			}
		}
		for _, r := range l.Remedies {
			if k := (key{c.Backend, r.Rule, r.Hop}); !cured[k] {
				cured[k] = true
				r.Hop = hopOf(of, r.Hop)
				c.Remedies = append(c.Remedies, r)
			}
		}
	}
	return c
}

func hopOf(layers, hop string) string {
	if layers == "" || hop == "" {
		return layers + hop
	}
	return layers + ", " + hop
}

// layersOf names the layers with a window if the model has several. It counts a query's own key, as the config does.
func layersOf(window, kinds int) string {
	switch {
	case kinds == 1:
		return ""
	case window < 0:
		return "layers without a window"
	}
	return fmt.Sprintf("layers with a window of %d keys", window+1)
}

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
	tokens := partition.Count(p.Layout.Layout([]int{p.SeqQ}).Spans(p.SeqQ, max(1, p.ContextSize), 0))
	for _, t := range []struct {
		name       string
		heads, dim int
	}{{"q", p.Heads, p.HeadDim}, {"k", p.KVHeads, p.HeadDim}, {"v", p.KVHeads, p.HeadDimV}} {
		v := tensor.NewMeter().Alloc(p.DType, p.Batch, tokens, t.heads, t.dim)
		fmt.Fprintf(w, "attention:   %s %s of rank 0: shape %v, strides %v (batch, seq, heads, head dim)\n", t.name,
			p.DType, v.Shape(), v.Strides())
	}
}
