package command

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// doctorRuns lists the kinds of runs that doctor tries: changes of a common one.
var doctorRuns = []struct {
	name   string
	change func(r *backend.Request)
}{
	{"causal, 32:8 heads, head dim 128, training, ring over 8", func(*backend.Request) {}},
	{"one rank", func(r *backend.Request) { r.Ranks = 1 }},
	{"all-gather instead of a ring", func(r *backend.Request) { r.Algorithm = "allgather" }},
	{"q/k head dim 192, v 128", func(r *backend.Request) { r.HeadDim, r.KVHeads = 192, r.Heads }},
	{"sliding window of 4096", func(r *backend.Request) { r.Window = 4095 }},
	{"packed documents", func(r *backend.Request) { r.Documents, r.Layout = true, "document" }},
	{"deterministic", func(r *backend.Request) { r.Deterministic = true }},
}

// attentionReport tries the rules on the machine: it prints the backend of common runs, kinds with the same ones on one
// line. If verbose, it prints for each backend that none of them gets the rules that reject it.
func attentionReport(w io.Writer, m machine.Machine, verbose bool) error {
	env, err := launch.Attention()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nattention backends on %s\n", m)
	possible, spoke := map[backends.Backend]bool{}, []backends.Rejection{}
	var order []string
	kinds := map[string][]string{} // by backends
	for _, run := range doctorRuns {
		r := backend.Request{
			Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: ring.Auto},
			DType:    tensor.BF16, Batch: 1, SeqQ: 32768, SeqKV: 32768, Heads: 32, KVHeads: 8,
			HeadDim: 128, HeadDimV: 128, Causal: true, Window: -1, Training: true, Ranks: 8,
		}
		if m.IsCPU() {
			r.DType = tensor.F32 // the type of a CPU
		}
		run.change(&r)
		line := "none"
		c, err := backend.Select(m, backend.Disabled(env.NoFlash, env.NoFused), r)
		var none *backends.NoBackendError
		switch {
		case errors.As(err, &none):
			spoke = append(spoke, none.Rejected...)
		case err != nil:
			return fmt.Errorf("attention rules for %s: %w", run.name, err)
		default:
			line = c.Backend.String()
			var others []string
			for _, b := range c.Layers[0].Able {
				possible[b] = true
				if b != c.Backend {
					others = append(others, b.String())
				}
			}
			if len(others) > 0 {
				line += " (also " + strings.Join(others, ", ") + ")"
			}
			spoke = append(spoke, c.Rejected...)
		}
		if kinds[line] == nil {
			order = append(order, line)
		}
		kinds[line] = append(kinds[line], run.name)
	}
	for _, line := range order {
		fmt.Fprintf(w, "  %s: %s\n", line, strings.Join(kinds[line], "; "))
	}
	said := map[string]bool{}
	for _, r := range spoke {
		if verbose && !possible[r.Backend] && !said[r.Rule] {
			said[r.Rule] = true
			fmt.Fprintf(w, "  not %s, %s: %s\n    fix: %s\n", r.Backend, r.Rule, r.Reason, r.Fix)
		}
	}
	return nil
}
