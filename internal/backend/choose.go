package backend

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/config"
)

// Choice is the backend of all layers of a run.
type Choice struct {
	Backend  attention.Backend
	Reason   string
	Rejected []attention.Rejection // of all layers, each once; Hop names the layers where not all are meant
	Remedies []attention.Applied
	// Layers are the answers for each distinct window, the widest first.
	Layers []*attention.Choice
}

// NoneError is that no backend can do what a config asks for.
type NoneError struct {
	Want    attention.Backend
	Machine Machine
	Window  string // which layers; "" where all are alike
	Err     error  // *attention.NoBackendError, or what is wrong with the parameters

	cfg *config.Config
}

func (e *NoneError) Error() string {
	of := ""
	if e.Window != "" {
		of = " for " + e.Window
	}
	return e.cfg.Fault("attention.backend", fmt.Errorf("%s%s on %s: %w", e.Want, of, e.Machine, e.Err)).Error()
}

func (e *NoneError) Unwrap() error { return e.Err }

// selector keeps the answers of this process, which plans a config more than once.
var selector attention.Selector

// Choose is the one backend that serves every layer of a resolved config on a machine. A
// model whose layers have different windows gets the best that all of them can use, so that
// one set of kernels is loaded and one order of sums is used throughout.
func Choose(cfg *config.Config, m Machine, disabled uint8) (*Choice, error) {
	ws := windows(cfg)
	params := make([]attention.Params, len(ws))
	layers := make([]*attention.Choice, len(ws))
	for i, w := range ws {
		var err error
		if params[i], err = Params(cfg, m, w, disabled); err != nil {
			return nil, err
		}
		if layers[i], err = selector.Select(params[i]); err != nil {
			return nil, &NoneError{params[i].Want, m, layersOf(w, len(ws)), err, cfg}
		}
	}
	first := layers[0].Backend
	if slices.ContainsFunc(layers, func(c *attention.Choice) bool { return c.Backend != first }) {
		var err error
		if layers, err = common(params, layers); err != nil {
			return nil, &NoneError{params[0].Want, m, "layers with different windows together", err, cfg}
		}
	}
	return merge(ws, layers), nil
}

// common finds one backend for layers whose own best ones differ: of those that every layer
// can use, the one that comes first where the widest window is.
func common(params []attention.Params, best []*attention.Choice) ([]*attention.Choice, error) {
	for _, b := range best[0].Able {
		if slices.ContainsFunc(best, func(c *attention.Choice) bool { return !slices.Contains(c.Able, b) }) {
			continue
		}
		out := make([]*attention.Choice, len(params))
		for i, p := range params {
			p.Want = b
			c, err := selector.Select(p)
			if err != nil {
				return nil, err
			}
			// What each kind of layer alone would have got says what speaks against the rest.
			all := *c
			all.Reason = "the fastest that layers of every window can use"
			all.Rejected = best[i].Rejected
			out[i] = &all
		}
		return out, nil
	}
	var all []attention.Rejection
	for _, c := range best {
		all = append(all, c.Rejected...)
	}
	return nil, &attention.NoBackendError{Params: params[0], Rejected: all}
}

// merge is the answers for all windows as one.
func merge(ws []int, layers []*attention.Choice) *Choice {
	c := &Choice{Backend: layers[0].Backend, Reason: layers[0].Reason, Layers: layers}
	type key struct {
		backend   attention.Backend
		rule, hop string
	}
	spoke, cured := map[key]bool{}, map[key]bool{}
	for i, l := range layers {
		of := ""
		if i > 0 {
			of = layersOf(ws[i], len(ws))
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

// hopOf is a hop of some layers only.
func hopOf(layers, hop string) string {
	if layers == "" || hop == "" {
		return layers + hop
	}
	return layers + ", " + hop
}

// layersOf names the layers with a window, where there are others, as the config counts it:
// with a query's own key.
func layersOf(window, kinds int) string {
	switch {
	case kinds == 1:
		return ""
	case window < 0:
		return "layers without a window"
	}
	return fmt.Sprintf("layers with a window of %d keys", window+1)
}
