package plan

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

const pictureColumns = 48

// maxHopRanks bounds the ranks with hops in the text; --json has all.
const maxHopRanks = 4

const maxHops = 8

const textColumns = 80

func print(w io.Writer, b *strings.Builder) error {
	_, err := io.WriteString(w, terminal.Wrap(b.String(), textColumns, 12))
	return err
}

// Summary prints whether the run fits, its step time and its backend, then the parts of both, in less than 40 lines.
// data are lines on the data, each "data: ...".
func (p *Plan) Summary(w io.Writer, data []string) error {
	var b strings.Builder
	m, e, pt := &p.Memory, &p.Estimate, &p.Partition
	fits := m.Verdict()
	if fits == "" {
		fits = "nothing says how much memory a device has; add --assume memory=80G"
	}
	if len(p.Refused) > 0 {
		b.WriteString("verdict     a run on this machine would be refused, for the reason at the end\n")
	}
	fmt.Fprintf(&b, "verdict     %s a rank: %s\n", readable.Bytes(m.Total), fits)
	if e.Parts != nil {
		fmt.Fprintf(&b, "step        about %s, %s tokens/s, %s a device", readable.Seconds(e.SecondsPerStep),
			readable.Short(e.TokensPerSecond), FLOPs(e.TFLOPsPerDevice))
		if e.MFU > 0 {
			fmt.Fprintf(&b, ", MFU %.1f%%", 100*e.MFU)
		}
		b.WriteByte('\n')
	} else {
		b.WriteString("step        no estimate: there is no cost table of this machine; cprun bench calibrate " +
			"makes one\n")
	}
	fmt.Fprintf(&b, "backend     %s on %s: %s\n", p.Attention.Backend, p.machine, p.Attention.Reason)
	fmt.Fprintf(&b, "ranks       %d: context %d x data %d; %s, layout %s, balance %.2f; %d tokens a sample\n",
		pt.Ranks, pt.Context, pt.Data, p.hopsBy, pt.Layout, pt.Balance, pt.SeqLen)
	fmt.Fprintf(&b, "model       %s parameters; %s tokens and %.3g FLOPs a step, %.0f%% of them attention\n",
		readable.Short(float64(e.Parameters)), readable.Short(float64(e.TokensPerStep)), e.FLOPsPerStep,
		100*e.AttentionShare)
	c := &p.Communication
	fmt.Fprintf(&b, "sent        %s a step, by the rank that sends most: attention %s forward and %s backward, "+
		"gradients %s\n",
		readable.Bytes(c.Total), readable.Bytes(c.AttentionForward), readable.Bytes(c.AttentionBackward),
		readable.Bytes(c.Gradients))
	for _, line := range data {
		what, text, _ := strings.Cut(line, ": ")
		fmt.Fprintf(&b, "%-11s %s\n", what, text)
	}
	b.WriteString("\nmemory of the rank that needs most\n")
	for _, r := range append(m.items(), item{"total", m.Total}) {
		fmt.Fprintf(&b, "            %-14s %10s\n", r.name, readable.Bytes(r.bytes))
	}
	if e.Parts != nil {
		b.WriteString("\ntime of a step\n")
		e.times(&b)
	}
	return print(w, &b)
}

// Details prints the partition, the hops, and why other backends and algorithms were not chosen.
func (p *Plan) Details(w io.Writer) error {
	var b strings.Builder
	pt := &p.Partition
	fmt.Fprintf(&b, "\npartition   %d tokens, layout %s over %d ranks\n", pt.SeqLen, pt.Layout, pt.Context)
	if pt.Document {
		b.WriteString("            documents are cut sample by sample; this shows one document\n")
	}
	p.picture(&b)
	if p.Packed != nil {
		p.Packed.write(&b)
	}
	fmt.Fprintf(&b, "\nhops        algorithm %s, forward, one layer\n", p.hopsBy)
	p.hops(&b)
	p.attention(&b)
	if p.Choice != nil {
		p.Choice.write(&b)
	}
	return print(w, &b)
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

// mergeHops finds the elements that differ from element i only in the hop: whether i is the first of them, and the hops
// of all, for one line instead of many.
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
		{"products", e.Parts.Products}, {"attention", e.Parts.Attention}, {"its transfers", e.Parts.Transfers},
		{"passes", e.Parts.Passes},
		{"gradients", e.Parts.Gradients}, {"optimizer", e.Parts.Optimizer}, {"host", e.Parts.Host},
	} {
		if part.t > 0 {
			fmt.Fprintf(b, "            %-14s %10s %5.1f%%\n", part.name, readable.Seconds(part.t),
				100*part.t/e.SecondsPerStep)
		}
	}
	scaled := ""
	if e.Scaled {
		scaled = ", scaled to this machine; cprun bench calibrate measures it"
	}
	fmt.Fprintf(b, "            by the cost table of %s, %.10s%s\n", e.Table, e.Date, scaled)
}

// FLOPs writes a rate, given in 1e12 a second.
func FLOPs(t float64) string {
	if t < 0.5 {
		return fmt.Sprintf("%.3g GFLOP/s", 1e3*t)
	}
	return fmt.Sprintf("%.3g TFLOP/s", t)
}

// picture draws which rank holds which part of the sequence, one row a rank.
func (p *Plan) picture(b *strings.Builder) {
	for _, r := range p.Partition.PerRank {
		fmt.Fprintf(b, "  rank %-4d %s %d tokens\n", r.Rank, r.row(p.Partition.SeqLen), r.Tokens)
	}
}

// row marks the columns in which the rank holds any of n positions. Position x is in column
// x*columns/n.
func (r *RankPart) row(n int) []byte {
	columns := min(pictureColumns, n)
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

func plural(n int) string {
	if n == 1 {
		return ""
	}
	return "s"
}

func ranks(rs []int) string { return strings.Trim(strings.ReplaceAll(fmt.Sprint(rs), " ", ", "), "[]") }
