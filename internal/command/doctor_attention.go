package command

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/tensor"
)

// doctorShapes are the kinds of runs that doctor tries, by the names of backend.Features.
var doctorShapes = []string{"one rank", "all-gather instead of a ring", "sliding window of 4096", "packed documents", "q/k head dim 192, v 128", "deterministic"}

// attentionReport tries the rules on the machine: which backend common runs get, kinds with the same ones on one line, and
// with verbose for each backend that none of them gets, why.
func attentionReport(w io.Writer, m machine.Machine, verbose bool) error {
	env, err := launch.Attention()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nattention backends on %s\n", m)
	possible, spoke := map[backends.Backend]bool{}, []backends.Rejection{}
	var order []string
	kinds := map[string][]string{} // by backends
	add := func(backends, kind string) {
		if kinds[backends] == nil {
			order = append(order, backends)
		}
		kinds[backends] = append(kinds[backends], kind)
	}
	for _, f := range backend.Features {
		common := f.Name == backend.Features[0].Name
		if !common && !slices.Contains(doctorShapes, f.Name) {
			continue
		}
		p := backend.On(backend.Common(), m, backend.Disabled(env.NoFlash, env.NoFused, env.NoUnfused))
		if m.Arch == 0 {
			p.DType = tensor.F32 // what a CPU computes in
		}
		f.Set(&p)
		name := f.Name
		if common {
			name = "causal, 32:8 heads, head dim 128, training, ring over 8"
		}
		c, err := backends.Select(p)
		var none *backends.NoBackendError
		switch {
		case errors.As(err, &none):
			add("none", name)
			spoke = append(spoke, none.Rejected...)
			continue
		case err != nil:
			return fmt.Errorf("attention rules for %s: %w", f.Name, err)
		}
		var others []string
		for _, b := range c.Able {
			possible[b] = true
			if b != c.Backend {
				others = append(others, b.String())
			}
		}
		line := c.Backend.String()
		if len(others) > 0 {
			line += " (also " + strings.Join(others, ", ") + ")"
		}
		add(line, name)
		spoke = append(spoke, c.Rejected...)
	}
	for _, line := range order {
		fmt.Fprintf(w, "  %s: %s\n", line, strings.Join(kinds[line], "; "))
	}
	if !verbose {
		return nil
	}
	said := map[string]bool{}
	for _, r := range spoke {
		if possible[r.Backend] || said[r.Rule] {
			continue
		}
		said[r.Rule] = true
		fmt.Fprintf(w, "  not %s, %s: %s\n    fix: %s\n", r.Backend, r.Rule, r.Reason, r.Fix)
	}
	return nil
}
