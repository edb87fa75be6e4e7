package verify

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Print prints a report for people.
func (r *Report) Print(w io.Writer) error {
	counts := readable.Table{
		Title: fmt.Sprintf("%s: %s of %s tokens, on %s in %s; %d ranks: %s", terminal.Name(r.Config),
			readable.Count(int64(r.CheckedTokens)), readable.Count(int64(r.BatchTokens)), r.Device, r.Compute, r.Ranks,
			r.Strategy),
		Head: []string{"first batch", "records", "1 rank", r.side(1)},
	}
	if d := r.Documents; d != nil {
		counts.Add("documents", fmt.Sprint(d.Records), "", fmt.Sprint(d.Batch))
	}
	for _, c := range []struct {
		name string
		*Counts
	}{{"tokens", r.Tokens}, {"targets", r.Targets}} {
		if c.Counts != nil {
			counts.Add(c.name, fmt.Sprint(c.Records), fmt.Sprint(c.One), fmt.Sprint(c.Many))
		}
	}
	if r.Loss != nil {
		counts.Add("loss", "", fmt.Sprintf("%.7g", float64(r.Loss.One)), fmt.Sprintf("%.7g", float64(r.Loss.Many)))
	}
	tables := []readable.Table{counts}
	if len(r.Gradients) > 0 {
		tables = append(tables, r.errors("gradient", r.Gradients))
	}
	if r.Step != nil && len(r.Step.Parameters) > 0 {
		tables = append(tables, r.errors("parameter after two steps", r.Step.Parameters))
	}
	if l := r.Linears; l != nil {
		tables = append(tables, ofLinears.errors("gradient with linears in FP8", l.Gradients))
	}
	if r.Leak != nil {
		tables = append(tables, r.leak())
	}
	tables = append(tables, r.kernels())
	for _, t := range tables {
		if _, err := t.WriteTo(w); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	return r.verdict(w)
}

// shownErrors bounds the rows of a table.
const shownErrors = 5

func (r *Report) errors(what string, errors []Gradient) readable.Table {
	t := readable.Table{Head: []string{what + ", the largest errors", "relative error"},
		Notes: []string{fmt.Sprintf("%d parameters; tolerance %g, and %.2g of the norm of all (rounding)", len(errors),
			r.Tolerance, r.rounding())}}
	sorted := slices.Clone(errors)
	size := func(g Gradient) float64 { // NaN first
		if g.Error != g.Error {
			return math.Inf(1)
		}
		return float64(g.Error)
	}
	slices.SortStableFunc(sorted, func(a, b Gradient) int { return cmp.Compare(size(b), size(a)) })
	for _, g := range sorted[:min(shownErrors, len(sorted))] {
		t.Add(g.Name, fmt.Sprintf("%.2g", float64(g.Error)))
	}
	return t
}

func (r *Report) leak() readable.Table {
	t := readable.Table{Head: []string{"changed token", "document", "rows allowed", "changed", "wrong"}}
	for _, p := range r.Leak.Probes {
		name := fmt.Sprint(p.Position)
		if p.Shard >= 0 {
			name += fmt.Sprintf(" (rank %d)", p.Shard)
		}
		t.Add(name, fmt.Sprint(p.Document), fmt.Sprint(p.Allowed), fmt.Sprint(p.Changed), fmt.Sprint(p.Wrong))
	}
	return t
}

func (r *Report) kernels() readable.Table {
	t := readable.Table{Head: []string{"attention", "layers", "backend", "kernel"}}
	for _, k := range r.Kernels {
		kind := "full"
		if k.Window >= 0 {
			kind = fmt.Sprintf("window %d", k.Window+1)
		}
		t.Add(kind, fmt.Sprint(len(k.Layers)), k.Backend, k.Kernel)
	}
	return t
}

func (r *Report) verdict(w io.Writer) (err error) {
	var text strings.Builder
	for part, reason := range r.Reasons {
		fmt.Fprintf(&text, "not checked: %s: %s\n", part, reason)
	}
	if n := r.Routes; n != nil {
		fmt.Fprintf(&text, "routes: %s choices of experts, %s near ties replaced, %s wrong\n", readable.Count(n.Choices),
			readable.Count(n.Ties), readable.Count(n.Wrong))
	}
	if l := r.Linears; l != nil {
		fmt.Fprintf(&text, "linears in FP8: loss %.7g in place of %.7g; tolerance %g\n", float64(l.FP8),
			float64(l.Loss), l.LossTolerance)
	}
	if *r.OK {
		for _, key := range r.Varied {
			fmt.Fprintf(&text, "also right with %s\n", key)
		}
		text.WriteString("right\n")
	} else {
		text.WriteString("WRONG\n")
	}
	for _, d := range r.Differences[:min(shownDifferences, len(r.Differences))] {
		fmt.Fprintf(&text, "  %s\n", d)
	}
	if n := len(r.Differences) - shownDifferences; n > 0 {
		fmt.Fprintf(&text, "  and %d more\n", n)
	}
	_, err = io.WriteString(w, text.String())
	return err
}

// shownDifferences bounds the differences on the terminal.
const shownDifferences = 12
