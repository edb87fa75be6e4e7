package plan

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// pictureColumns is the width of the partition picture: what fits a terminal of 80 columns
// behind the label.
const pictureColumns = 64

// maxHopRanks is how many ranks' hops the text shows; --json has all.
const maxHopRanks = 4

// maxHops is how many hops of each the text shows.
const maxHops = 8

// Write prints the plan for a reader at a terminal.
func (p *Plan) Write(w io.Writer) error {
	var b strings.Builder
	pt := &p.Partition
	fmt.Fprintf(&b, "partition   %d tokens, layout %s over %d ranks", pt.SeqLen, pt.Layout, pt.Context)
	if pt.Data > 1 {
		fmt.Fprintf(&b, ", %d such groups", pt.Data)
	}
	fmt.Fprintf(&b, "; balance %.2f\n", pt.Balance)
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
	p.costs(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Plan) attention(b *strings.Builder) {
	a := &p.Attention
	fmt.Fprintf(b, "\nattention   backend %s on %s: %s\n", a.Backend, p.machine, a.Reason)
	fmt.Fprintf(b, "            q, k, v in layout %s\n", a.Layout)
	for i, r := range a.Remedies {
		if first, hops := together(a.Remedies, i, func(x *Remedy) (string, string) { return x.Kind + x.Text, x.Hop }); first {
			absent := ""
			if !r.Built {
				absent = "\n              not in this build"
			}
			fmt.Fprintf(b, "            with %s%s: %s\n              costs %s%s\n", r.Kind, hops, r.Text, r.Cost, absent)
		}
	}
	for i, r := range a.Rejected {
		if first, hops := together(a.Rejected, i, func(x *Rejected) (string, string) { return x.Backend + " " + x.Rule, x.Hop }); first {
			fmt.Fprintf(b, "            not %s, %s%s: %s\n              fix: %s\n", r.Backend, r.Rule, hops, r.Reason, r.Fix)
		}
	}
	for _, n := range a.Named {
		fmt.Fprintf(b, "            not %s: %s\n              fix: %s\n", n.Backend, n.Reason, n.Fix)
	}
}

// together finds what differs from element i in its hop alone: whether i is the first of
// them, and the hops of all, for one line instead of many.
func together[T any](list []T, i int, of func(*T) (key, hop string)) (first bool, hops string) {
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

// costs are the tables of bytes and the estimate of time.
func (p *Plan) costs(b *strings.Builder) {
	table := func(rows []item) {
		for _, r := range rows {
			fmt.Fprintf(b, "            %-14s %10s\n", r.name, Bytes(r.bytes))
		}
	}
	m := &p.Memory
	b.WriteString("\nmemory      of the rank that needs most\n")
	table(append(m.items(), item{"total", m.Total}))
	if m.fits != "" {
		fmt.Fprintf(b, "            %s\n", m.Verdict())
	}
	c := &p.Communication
	b.WriteString("\nsent        by the rank that sends most, in one optimizer step\n")
	table([]item{{"attention fwd", c.AttentionForward}, {"attention bwd", c.AttentionBackward}, {"gradients", c.Gradients}, {"total", c.Total}})
	e := &p.Estimate
	fmt.Fprintf(b, "\nestimate    %s parameters, %s tokens and %.3g FLOPs a step, %.0f%% of them attention\n",
		count(e.Parameters), count(int64(e.TokensPerStep)), e.FLOPsPerStep, 100*e.AttentionShare)
	if e.Parts != nil {
		e.times(b)
	}
}

// times are the seconds of a step, by part.
func (e *Estimate) times(b *strings.Builder) {
	fmt.Fprintf(b, "            about %s a step, %s tokens/s, %s a device", Seconds(e.SecondsPerStep), count(int64(e.TokensPerSecond)), FLOPs(e.TFLOPsPerDevice))
	if e.MFU > 0 {
		fmt.Fprintf(b, ", MFU %.1f%%", 100*e.MFU)
	}
	b.WriteByte('\n')
	for _, part := range []struct {
		name string
		t    float64
	}{
		{"products", e.Parts.Products}, {"attention", e.Parts.Attention}, {"its transfers", e.Parts.Transfers}, {"passes", e.Parts.Passes},
		{"gradients", e.Parts.Gradients}, {"optimizer", e.Parts.Optimizer}, {"host", e.Parts.Host},
	} {
		if part.t > 0 {
			fmt.Fprintf(b, "            %-14s %10s %5.1f%%\n", part.name, Seconds(part.t), 100*part.t/e.SecondsPerStep)
		}
	}
	scaled := ""
	if e.Scaled {
		scaled = ", scaled to this machine; cprun bench calibrate measures it"
	}
	fmt.Fprintf(b, "            by the cost table of %s, %.10s%s\n", e.Table, e.Date, scaled)
}

// Seconds writes a time to three digits.
func Seconds(s float64) string {
	switch {
	case s >= 1:
		return fmt.Sprintf("%.3g s", s)
	case s >= 1e-3:
		return fmt.Sprintf("%.3g ms", 1e3*s)
	}
	return fmt.Sprintf("%.3g µs", 1e6*s)
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
			fmt.Fprintf(b, "  and %d more ranks (--json shows all)\n", len(p.Hops)-i)
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
			fmt.Fprintf(b, "  %-9s %-16s %12d pairs in %d call%s", name, h.Label, h.Pairs, min(1, h.TileCount), plural(min(1, h.TileCount)))
			if h.SendBytes > 0 {
				fmt.Fprintf(b, "; sends %s to %s", Bytes(h.SendBytes), ranks(h.SendTo))
			}
			if len(h.RecvFrom) > 0 {
				fmt.Fprintf(b, ", receives from %s", ranks(h.RecvFrom))
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

// Bytes writes a size in binary units: "3.2 MiB".
func Bytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	x, u := float64(n), 0
	for x >= 1024 && u+1 < len(units) {
		x, u = x/1024, u+1
	}
	if u == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", x, units[u])
}

func count(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.2fB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.2fM", float64(n)/1e6)
	case n >= 1e4:
		return fmt.Sprintf("%.1fK", float64(n)/1e3)
	}
	return fmt.Sprint(n)
}
