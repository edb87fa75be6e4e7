package plan

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

// maxHopRanks bounds the ranks with hops in the text; --json has all.
const maxHopRanks = 4

const maxHops = 8

func print(w io.Writer, columns int, b *strings.Builder) error {
	_, err := io.WriteString(w, terminal.Wrap(b.String(), columns, 12))
	return err
}

// Verdict returns one sentence: whether the run fits, and its step time.
func (p *Plan) Verdict() string {
	m, e := &p.Memory, &p.Estimate
	text := m.Verdict()
	if text == "" {
		text = fmt.Sprintf("memory unknown: a rank takes %s; to check that it fits, add --assume memory=80G",
			readable.Bytes(m.Total))
	}
	if e.Parts == nil {
		return text + "; no estimate of the step time, since this machine has no cost table: cprun bench calibrate " +
			"makes one"
	}
	text += fmt.Sprintf("; about %s a step, %s tokens/s", readable.Seconds(e.SecondsPerStep),
		readable.Short(e.TokensPerSecond))
	if e.Steps > 0 {
		text += fmt.Sprintf("; %s: %s", readable.Counted(e.Steps, "step"), readable.Seconds(e.RunSeconds))
	}
	if e.DeviceHours >= 0.01 {
		text += fmt.Sprintf(", %s GPU-hours", readable.Number(e.DeviceHours))
	}
	return text
}

// Summary prints whether the run fits and its step time, then the choices, the memory and the time in less than 40
// lines of the given width. data holds lines of the form "label: text".
func (p *Plan) Summary(w io.Writer, columns int, data []string) error {
	var b strings.Builder
	m, e, pt := &p.Memory, &p.Estimate, &p.Partition
	if len(p.Refused) > 0 {
		b.WriteString("cannot run as it is:\n")
	}
	for _, why := range p.Refused {
		b.WriteString(terminal.Wrap("  "+terminal.Text(why)+"\n", columns, 4))
	}
	b.WriteString(terminal.Wrap(p.Verdict()+"\n", columns, 2) + "\n")
	if e.Parts != nil {
		fmt.Fprintf(&b, "speed       %s a device", FLOPs(e.TFLOPsPerDevice))
		if e.MFU > 0 {
			fmt.Fprintf(&b, ", MFU %.1f%%", 100*e.MFU)
		}
		b.WriteByte('\n')
	}
	if t := e.Waits; t != nil {
		fix := "no longer samples and no fewer ranks that fit hide it"
		if t.Fix != "" {
			fix = "to hide it, use " + t.Fix
		}
		fmt.Fprintf(&b, "waits       %s of a step (%.0f%%) for weights of other ranks; %s\n", readable.Seconds(t.Seconds),
			100*t.Share, fix)
	}
	fmt.Fprintf(&b, "backend     %s on %s: %s\n", p.Attention.Backend, p.machine, p.Attention.Reason)
	fmt.Fprintf(&b, "ranks       %d (context %d x data %d): algorithm %s, layout %s, balance %.2f\n",
		pt.Ranks, pt.Context, pt.Data, p.hopsBy, pt.Layout, pt.Balance)
	fmt.Fprintf(&b, "model       %s parameters%s, %s tokens a sample\n", readable.Short(float64(e.Parameters)), e.tuned(),
		readable.Count(int64(pt.SeqLen)))
	fmt.Fprintf(&b, "work        %s tokens a step, %.3g FLOPs, %.0f%% of them attention\n",
		readable.Short(float64(e.TokensPerStep)), e.FLOPsPerStep, 100*e.AttentionShare)
	c := &p.Communication
	fmt.Fprintf(&b, "traffic     at most %s a rank and step: attention %s forward, %s backward; gradients %s\n",
		readable.Bytes(c.Total), readable.Bytes(c.AttentionForward), readable.Bytes(c.AttentionBackward),
		readable.Bytes(c.Gradients))
	for _, line := range data {
		what, text, _ := strings.Cut(line, ": ")
		fmt.Fprintf(&b, "%-11s %s\n", what, text)
	}
	fmt.Fprintf(&b, "\nmemory      of a rank with %s\n", p.keeps())
	m.table(&b)
	fmt.Fprintf(&b, "            %-16s %10s\n", "host", readable.Bytes(m.Host))
	if text := m.Waits(); text != "" {
		fmt.Fprintf(&b, "            %s\n", text)
	}
	if e.Parts != nil {
		fmt.Fprintf(&b, "\nstep        %s\n", readable.Seconds(e.SecondsPerStep))
		e.times(&b)
	}
	return print(w, columns, &b)
}

// tuned returns the number of trained parameters, if some are frozen.
func (e *Estimate) tuned() string {
	if e.Trained == e.Parameters {
		return ""
	}
	return fmt.Sprintf(" (%s of them trained)", readable.Short(float64(e.Trained)))
}

// keeps returns the choices of memory, and the places of saved activations.
func (p *Plan) keeps() string {
	c, l := p.Config["memory"].(map[string]any), p.Memory.Layers
	text := fmt.Sprintf("recompute %v, shard %v, offload %v", c["recompute"], c["shard"], c["offload"])
	for _, part := range []struct {
		n    int
		what string
	}{{l.Device, "kept on the device"}, {l.Host, "on the host"}, {l.Nothing, "computed from the layer below"}} {
		if l != (Layers{}) && part.n > 0 {
			text += fmt.Sprintf("; %d layers %s", part.n, part.what)
		}
	}
	return text
}

// table writes the items by kind, except tiny ones, and their sum.
func (m *Memory) table(b *strings.Builder) {
	for _, i := range append(append(m.items(), item{"total", m.Total}), m.hostItems()...) {
		if i.bytes > m.Total/2000 {
			fmt.Fprintf(b, "            %-16s %10s\n", i.name, readable.Bytes(i.bytes))
		}
	}
}

// Details prints the partition, the hops, and why other backends and algorithms were not chosen.
func (p *Plan) Details(w io.Writer, columns int) error {
	var b strings.Builder
	pt := &p.Partition
	fmt.Fprintf(&b, "\npartition   %d tokens, layout %s over %d ranks\n", pt.SeqLen, pt.Layout, pt.Context)
	if pt.Document {
		b.WriteString("            documents are cut sample by sample; this shows one document\n")
	}
	for _, r := range pt.PerRank {
		fmt.Fprintf(&b, "  rank %-4d %s %d tokens\n", r.Rank, r.row(pt.SeqLen, min(48, columns-32)), r.Tokens)
	}
	if p.Packed != nil {
		p.Packed.write(&b)
	}
	fmt.Fprintf(&b, "\nhops        algorithm %s, forward, one layer\n", p.hopsBy)
	p.hops(&b)
	p.attention(&b)
	if p.Choice != nil {
		p.Choice.write(&b)
	}
	return print(w, columns, &b)
}

func (p *Plan) attention(b *strings.Builder) {
	a := &p.Attention
	fmt.Fprintf(b, "\nattention   backend %s; q, k, v in layout %s\n", a.Backend, a.Layout)
	for i, r := range a.Remedies {
		of := func(x *Remedy) (string, string) { return x.Kind + x.Text, x.Hop }
		if first, hops := mergeHops(a.Remedies, i, of); first {
			fmt.Fprintf(b, "            with %s%s: %s\n              costs %s\n", r.Kind, hops, r.Text, r.Cost)
		}
	}
	for i, r := range a.Rejected {
		of := func(x *Rejected) (string, string) { return x.Backend + " " + x.Rule, x.Hop }
		if first, hops := mergeHops(a.Rejected, i, of); first {
			fmt.Fprintf(b, "            not %s, %s%s: %s\n              fix: %s\n", r.Backend, r.Rule, hops, r.Reason,
				r.Fix)
		}
	}
	for _, n := range a.Named {
		fmt.Fprintf(b, "            not %s: %s\n              fix: %s\n", n.Backend, n.Reason, n.Fix)
	}
}

// mergeHops merges elements that differ from element i only in the hop. It reports whether i is the first of them, and
// lists their hops, for one line instead of many.
func mergeHops[T any](list []T, i int, of func(*T) (key, hop string)) (first bool, hops string) {
	want, _ := of(&list[i])
	var names []string
	for j := range list {
		key, hop := of(&list[j])
		if key != want {
			continue
		}
		if j < i {
			return false, ""
		}
		if hop != "" && !slices.Contains(names, hop) {
			names = append(names, hop)
		}
	}
	if len(names) == 0 {
		return true, ""
	}
	return true, " (" + strings.Join(names, "; ") + ")"
}

func (e *Estimate) times(b *strings.Builder) {
	for _, part := range []struct {
		name string
		t    float64
	}{
		{"matmuls", e.Parts.Products}, {"attention", e.Parts.Attention}, {"transfers", e.Parts.Transfers},
		{"elementwise", e.Parts.Passes},
		{"gradient sync", e.Parts.Gradients}, {"optimizer", e.Parts.Optimizer}, {"offload", e.Parts.Offload},
		{"host", e.Parts.Host},
	} {
		if part.t > 0 {
			fmt.Fprintf(b, "            %-14s %10s %5.1f%%\n", part.name, readable.Seconds(part.t),
				100*part.t/e.SecondsPerStep)
		}
	}
	scaled := ""
	if e.Scaled {
		scaled = ", scaled to this machine; for its own table: cprun bench calibrate"
	}
	fmt.Fprintf(b, "            from the cost table of %s, %.10s%s\n", e.Table, e.Date, scaled)
}

// FLOPs writes a rate, given in 1e12 a second.
func FLOPs(t float64) string {
	if t < 0.5 {
		return readable.Number(1e3*t) + " GFLOP/s"
	}
	return readable.Number(t) + " TFLOP/s"
}

// row marks the columns in which the rank holds any of n positions. Position x is in column x*columns/n.
func (r *RankPart) row(n, columns int) []byte {
	columns = min(columns, n)
	row := []byte(strings.Repeat(".", columns))
	for _, s := range r.Spans {
		at := func(i int) int { return (s.Start + i*s.Stride) * columns / n }
		for i := 0; i < s.Len; {
			c := at(i)
			row[c] = '#'
			// The next column begins at the first x with x*columns >= (c+1)*n.
			x := ((c+1)*n + columns - 1) / columns
			i = max(i+1, (x-s.Start+s.Stride-1)/s.Stride)
		}
	}
	return row
}

func (p *Plan) hops(b *strings.Builder) {
	for i, r := range p.Hops {
		if i == maxHopRanks {
			fmt.Fprintf(b, "  and %d more ranks (--json shows %d)\n", p.Partition.Context-i, len(p.Hops))
			break
		}
		for j, h := range r.Hops {
			if j == maxHops {
				fmt.Fprintf(b, "            and %d more hops\n", len(r.Hops)-j)
				break
			}
			name := ""
			if j == 0 {
				name = fmt.Sprintf("rank %d", r.Rank)
			}
			fmt.Fprintf(b, "  %-9s %-15s %10d pairs", name, h.Label, h.Pairs)
			if h.SendBytes > 0 {
				fmt.Fprintf(b, "; sends %s to %s", readable.Bytes(h.SendBytes), ranks(h.SendTo))
			}
			if len(h.RecvFrom) > 0 {
				fmt.Fprintf(b, ", from %s", ranks(h.RecvFrom))
			}
			b.WriteByte('\n')
		}
	}
}

func ranks(rs []int) string { return strings.Trim(strings.ReplaceAll(fmt.Sprint(rs), " ", ", "), "[]") }
