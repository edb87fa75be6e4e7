package backend

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/tensor"
)

//go:generate go test . -run TestDocument -update

// Common returns one ordinary run, of which the matrix changes one thing in each row, and which
// doctor tries on the machine that is there.
func Common() backends.Params {
	return backends.Params{
		DType: tensor.BF16, Format: qkv.BSHD, Packing: qkv.Separate, Contiguous: true,
		Batch: 1, SeqQ: 32768, SeqKV: 32768, Heads: 32, KVHeads: 8, HeadDim: 128, HeadDimV: 128,
		Causal: true, WindowLeft: -1, Training: true, ContextSize: 8, Algorithm: "ring", Gather: "auto", Layout: "zigzag",
	}
}

// Feature is a row of the matrix: what is asked for beyond Common.
type Feature struct {
	Name string                   // what the row is called in the docs
	Set  func(p *backends.Params) // changes Common to it
}

// Features are the rows of the matrix of docs/backends.md.
var Features = []Feature{
	{"bf16, causal, 32:8 heads, head dim 128, training, ring over 8", func(*backends.Params) {}},
	{"one rank", func(p *backends.Params) { p.ContextSize = 1 }},
	{"all-gather instead of a ring", func(p *backends.Params) { p.Algorithm = "allgather" }},
	{"layout striped", func(p *backends.Params) { p.Layout = "striped" }},
	{"layout contiguous", func(p *backends.Params) { p.Layout = "contiguous" }},
	{"a length that is no multiple of 64 on a rank (32776)", func(p *backends.Params) { p.SeqQ, p.SeqKV = 32776, 32776 }},
	{"fp16", func(p *backends.Params) { p.DType = tensor.F16 }},
	{"fp32", func(p *backends.Params) { p.DType = tensor.F32 }},
	{"no mask", func(p *backends.Params) { p.Causal, p.WindowRight = false, -1 }},
	{"as many KV heads as query heads", func(p *backends.Params) { p.KVHeads = p.Heads }},
	{"one KV head", func(p *backends.Params) { p.KVHeads = 1 }},
	{"head dim 64", func(p *backends.Params) { p.HeadDim, p.HeadDimV = 64, 64 }},
	{"head dim 192", func(p *backends.Params) { p.HeadDim, p.HeadDimV = 192, 192 }},
	{"head dim 256", func(p *backends.Params) { p.HeadDim, p.HeadDimV = 256, 256 }},
	{"head dim 256, inference", func(p *backends.Params) { p.HeadDim, p.HeadDimV, p.Training = 256, 256, false }},
	{"head dim 100", func(p *backends.Params) { p.HeadDim, p.HeadDimV = 100, 100 }},
	{"q/k head dim 192, v 128", func(p *backends.Params) { p.HeadDim, p.HeadDimV, p.KVHeads = 192, 128, p.Heads }},
	{"q/k head dim 192, v 128, inference", func(p *backends.Params) { p.HeadDim, p.HeadDimV, p.KVHeads, p.Training = 192, 128, p.Heads, false }},
	{"sliding window of 4096", func(p *backends.Params) { p.WindowLeft = 4095 }},
	{"sliding window of 4096, all-gather", func(p *backends.Params) { p.WindowLeft, p.Algorithm = 4095, "allgather" }},
	{"sliding window of 4096, one rank", func(p *backends.Params) { p.WindowLeft, p.ContextSize = 4095, 1 }},
	{"a window of two sides, 2047 before and 2048 behind", func(p *backends.Params) { p.Causal, p.WindowLeft, p.WindowRight = false, 2047, 2048 }},
	{"causal from the top left, a quarter of the queries", func(p *backends.Params) { p.TopLeft, p.SeqQ = true, 8192 }},
	{"slices", func(p *backends.Params) { p.Causal, p.WindowRight, p.Slices = false, -1, true }},
	{"packed documents", func(p *backends.Params) { p.Documents, p.Layout = true, "document" }},
	{"packed documents, one rank", func(p *backends.Params) { p.Documents, p.Layout, p.ContextSize = true, "document", 1 }},
	{"packed documents with lengths in keys of their own", func(p *backends.Params) { p.Documents, p.DocumentKeys = true, true }},
	{"packed documents with lengths in keys of their own, no mask", func(p *backends.Params) {
		p.Documents, p.DocumentKeys, p.Causal, p.WindowRight = true, true, false, -1
	}},
	{"deterministic", func(p *backends.Params) { p.Deterministic = true }},
	{"dropout, one rank", func(p *backends.Params) { p.Dropout, p.ContextSize = true, 1 }},
	{"softcap", func(p *backends.Params) { p.Softcap = true }},
	{"attention sinks (learnable softmax)", func(p *backends.Params) { p.Softmax = backends.Learnable }},
	{"largest logits", func(p *backends.Params) { p.MaxLogit = true }},
	{"bias after scaling", func(p *backends.Params) { p.Bias = backends.PostScaleBias }},
	{"bias after scaling, one rank", func(p *backends.Params) { p.Bias, p.ContextSize = backends.PostScaleBias, 1 }},
	{"ALiBi, one rank", func(p *backends.Params) { p.Bias, p.ContextSize = backends.ALiBi, 1 }},
	{"FP8, delayed scaling", func(p *backends.Params) { p.FP8 = backends.DelayedScaling }},
	{"FP8, current scaling", func(p *backends.Params) { p.FP8 = backends.CurrentScaling }},
	{"MXFP8", func(p *backends.Params) { p.FP8 = backends.MXFP8 }},
}

// matrixArchs are the architectures whose cuDNN column the matrix has.
var matrixArchs = []int{80, 90, 100}

// Matrix returns the support matrix as Markdown, evaluated from the rules.
func Matrix() string {
	var b strings.Builder
	b.WriteString("| | CPU | flash, sm80 and later |")
	for _, a := range matrixArchs {
		fmt.Fprintf(&b, " fused, sm%d |", a)
	}
	b.WriteString(" unfused, one rank |\n|---|---|---|" + strings.Repeat("---|", len(matrixArchs)+1) + "\n")
	for _, f := range Features {
		p := Common()
		p.Unbuilt = true // what this build lacks is marked
		f.Set(&p)
		cpu, gpu := p, p
		cpu.DType = tensor.F32 // what a CPU computes in
		gpu.Arch, gpu.Flash = 80, machine.BuiltFlash
		fmt.Fprintf(&b, "| %s | %s | %s |", f.Name, able(cpu), cell(gpu, backends.Flash))
		for _, a := range matrixArchs {
			gpu.Arch = a
			fmt.Fprintf(&b, " %s |", cudnnRange(gpu))
		}
		gpu.Arch, gpu.ContextSize = 80, 1
		fmt.Fprintf(&b, " %s |\n", cell(gpu, backends.Unfused))
	}
	return b.String()
}

// able lists the backends that can run p.
func able(p backends.Params) string {
	c, err := backends.Select(p)
	if err != nil {
		return "no"
	}
	var names []string
	for _, b := range c.Able {
		names = append(names, b.String())
	}
	return strings.Join(names, ", ")
}

// try reports whether a backend can run p, and what it takes, such as " with pad-head-dims": ", not
// built" stands behind what this build cannot.
func try(p backends.Params, b backends.Backend) (with string, ok bool) {
	p.Want = b
	c, err := backends.Select(p)
	if err != nil {
		return "", false
	}
	var kinds []string
	for _, k := range c.Kinds() {
		kinds = append(kinds, k.String())
	}
	if len(kinds) > 0 {
		with = " with " + strings.Join(kinds, ", ")
	}
	p.Unbuilt = false
	if _, err := backends.Select(p); err != nil {
		with += ", not built"
	}
	return with, true
}

func cell(p backends.Params, b backends.Backend) string {
	with, ok := try(p, b)
	if !ok {
		return "no: " + strings.Join(against(p, b), ", ")
	}
	return "yes" + with
}

// against is the rules that speak against a backend, as links.
func against(p backends.Params, b backends.Backend) []string {
	all, err := backends.Evaluate(p)
	if err != nil {
		return []string{err.Error()}
	}
	var ids []string
	for _, r := range all {
		if link := fmt.Sprintf("[%s](#%s)", r.Rule, r.Rule); r.Backend == b && !slices.Contains(ids, link) {
			ids = append(ids, link)
		}
	}
	return ids
}

// cudnnRange is the versions of cuDNN that run p, with the remedies that they need.
func cudnnRange(p backends.Params) string {
	type span struct {
		from, to backends.Version // [from, to); to 0: open
		with     string
	}
	var spans []span
	versions := cudnnVersions()
	open := false
	for _, v := range versions {
		p.CUDNN = v
		with, ok := try(p, backends.Fused)
		switch {
		case ok && open && spans[len(spans)-1].with == with:
		case ok:
			if open {
				spans[len(spans)-1].to = v
			}
			spans = append(spans, span{from: v, with: with})
			open = true
		case open:
			spans[len(spans)-1].to = v
			open = false
		}
	}
	if len(spans) == 0 {
		p.CUDNN = versions[len(versions)-1]
		return "no: " + strings.Join(against(p, backends.Fused), ", ")
	}
	var parts []string
	for _, s := range spans {
		text := fmt.Sprintf("%s+", s.from)
		if s.to != 0 {
			text = fmt.Sprintf("%s to before %s", s.from, s.to)
		}
		parts = append(parts, text+s.with)
	}
	return strings.Join(parts, "; ")
}

// cudnnVersions are the versions at which an answer can change.
func cudnnVersions() []backends.Version {
	vs := []backends.Version{backends.OldestCUDNN}
	for _, r := range backends.Rules() {
		for _, v := range []backends.Version{r.Since, r.Until} {
			if r.Backend == backends.Fused && v > backends.OldestCUDNN {
				vs = append(vs, v)
			}
		}
	}
	slices.Sort(vs)
	return slices.Compact(vs)
}

// RuleTable returns the rules of one backend as Markdown.
func RuleTable(b backends.Backend) string {
	var out strings.Builder
	out.WriteString("| rule | versions | reason | fix | remedy | source |\n|---|---|---|---|---|---|\n")
	for _, r := range backends.Rules() {
		if r.Backend != b {
			continue
		}
		remedy := ""
		if r.Remedy != (backends.Remedy{}) {
			if remedy = r.Remedy.Kind.String(); !r.Remedy.Built {
				remedy += " (not built)"
			}
		}
		fmt.Fprintf(&out, "| <a id=\"%s\"></a>`%s` | %s | %s | %s | %s | %s |\n", r.ID, r.ID, versionsOf(r), bar(r.Reason), bar(r.Fix), remedy, bar(r.Source))
	}
	return out.String()
}

// bar keeps a sentence inside its cell.
func bar(s string) string { return strings.ReplaceAll(s, "|", "\\|") }

func versionsOf(r backends.Rule) string {
	switch {
	case r.Since == 0 && r.Until == 0:
		return "all"
	case r.Since == 0:
		return "before " + r.Until.String()
	case r.Until == 0:
		return r.Since.String() + " and later"
	}
	return fmt.Sprintf("%s to before %s", r.Since, r.Until)
}

// PeakTable returns the rates behind estimates of time, as Markdown.
func PeakTable() string {
	var b strings.Builder
	b.WriteString("| architecture | GPU | bf16, fp16 TFLOP/s | fp32 TFLOP/s | link GB/s | source |\n|---|---|---|---|---|---|\n")
	for _, p := range machine.Peaks {
		fmt.Fprintf(&b, "| sm%d | %s | %g | %g | %g | %s |\n", p.Arch, p.GPU, p.BF16/1e12, p.FP32/1e12, p.Link/1e9, p.Source)
	}
	return b.String()
}

// OrderTable returns the preference among backends, as Markdown.
func OrderTable() string {
	var b strings.Builder
	b.WriteString("| machine | order | source |\n|---|---|---|\n")
	for _, o := range backends.Orders {
		var names []string
		for _, x := range o.Backends {
			names = append(names, x.String())
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", archRange(o.Since, o.Until), strings.Join(names, ", "), bar(o.Source))
	}
	return b.String()
}

// RateTable returns the measured rates and their sources, as Markdown.
func RateTable() string {
	rates := backends.Rates()
	var columns []backends.Backend
	for _, x := range backends.Backends {
		if slices.ContainsFunc(rates, func(r backends.Rate) bool { return r.Backend == x }) {
			columns = append(columns, x)
		}
	}
	var b strings.Builder
	b.WriteString("| architecture | type | mask | head dim | deterministic |")
	for _, x := range columns {
		fmt.Fprintf(&b, " %s |", x)
	}
	b.WriteString(" source |\n|---|---|---|---|---|" + strings.Repeat("---|", len(columns)+1) + "\n")
	var sources []string
	done := map[backends.RateKey]bool{}
	for _, r := range rates {
		if done[r.RateKey] {
			continue
		}
		done[r.RateKey] = true
		cells, from := make([]string, len(columns)), ""
		for _, o := range rates {
			if o.RateKey == r.RateKey {
				cells[slices.Index(columns, o.Backend)] = fmt.Sprintf("%g, %g", o.Both, o.Forward)
				sources, from = cite(sources, from, o.Source.String())
			}
		}
		fmt.Fprintf(&b, "| sm%d | %s | %s | %d | %s | %s | %s |\n", r.Arch, r.DType, r.Mask.Text(), r.HeadDim,
			map[bool]string{true: "yes", false: "no"}[r.Deterministic], strings.Join(cells, " | "), from)
	}
	b.WriteString("\nSources:\n\n")
	for i, s := range sources {
		fmt.Fprintf(&b, "%d. %s\n", i+1, s)
	}
	return b.String()
}

// cite adds a source to those of a table, and its number to the numbers in a cell, unless they are there.
func cite(sources []string, cell, source string) ([]string, string) {
	i := slices.Index(sources, source)
	if i < 0 {
		i, sources = len(sources), append(sources, source)
	}
	n := fmt.Sprint(i + 1)
	switch {
	case cell == "":
		cell = n
	case !slices.Contains(strings.Split(cell, ", "), n):
		cell += ", " + n
	}
	return sources, cell
}

func archRange(since, until int) string {
	switch {
	case until == 1:
		return "CPU"
	case since <= 1:
		return fmt.Sprintf("before sm%d", until)
	case until > 1000:
		return fmt.Sprintf("sm%d and later", since)
	}
	return fmt.Sprintf("sm%d to before sm%d", since, until)
}

// RemedyTable returns the remedies with what they cost, as Markdown.
func RemedyTable() string {
	var b strings.Builder
	b.WriteString("| remedy | built | what is done | cost | rules |\n|---|---|---|---|---|\n")
	var order []backends.Remedy
	rules := map[backends.Remedy][]string{}
	for _, r := range backends.Rules() {
		if r.Remedy.Kind == backends.NoRemedy {
			continue
		}
		if rules[r.Remedy] == nil {
			order = append(order, r.Remedy)
		}
		rules[r.Remedy] = append(rules[r.Remedy], fmt.Sprintf("[%s](#%s)", r.ID, r.ID))
	}
	slices.SortStableFunc(order, func(a, b backends.Remedy) int { return int(a.Kind) - int(b.Kind) })
	for _, r := range order {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.Kind, map[bool]string{true: "yes", false: "no"}[r.Built], r.Text, r.Cost, strings.Join(rules[r], ", "))
	}
	return b.String()
}
