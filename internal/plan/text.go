package plan

import (
	"fmt"
	"io"
	"strings"
)

// pictureColumns is the width of the partition picture: what fits a terminal of 80 columns
// behind the label.
const pictureColumns = 64

// maxHopRanks is how many ranks' hops the text shows; --json has all.
const maxHopRanks = 4

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
		b.WriteString("            documents are cut sample by sample; the picture shows one document\n")
	}
	p.picture(&b)
	fmt.Fprintf(&b, "\nhops        algorithm %s, forward, one layer\n", p.Config["parallel"].(map[string]any)["algorithm"])
	p.hops(&b)
	fmt.Fprintf(&b, "\nattention   backend %s: %s\n", p.Attention.Backend, p.Attention.Reason)
	for _, r := range p.Attention.Rejected {
		fmt.Fprintf(&b, "            not %s: %s (%s)\n", r.Backend, r.Reason, r.Fix)
	}
	m := &p.Memory
	b.WriteString("\nmemory      of the rank that needs most\n")
	for _, row := range []struct {
		name string
		n    int64
	}{{"weights", m.Weights}, {"gradients", m.Gradients}, {"optimizer", m.Optimizer}, {"activations", m.Activations}, {"ring buffers", m.RingBuffers}, {"total", m.Total}} {
		fmt.Fprintf(&b, "            %-14s %10s\n", row.name, Bytes(row.n))
	}
	c := &p.Communication
	b.WriteString("\nsent        by the rank that sends most, in one optimizer step\n")
	for _, row := range []struct {
		name string
		n    int64
	}{{"attention fwd", c.AttentionForward}, {"attention bwd", c.AttentionBackward}, {"gradients", c.Gradients}, {"total", c.Total}} {
		fmt.Fprintf(&b, "            %-14s %10s\n", row.name, Bytes(row.n))
	}
	e := &p.Estimate
	fmt.Fprintf(&b, "\nestimate    %s parameters, %s tokens and %.3g FLOPs a step, %.0f%% of them attention\n",
		count(e.Parameters), count(int64(e.TokensPerStep)), e.FLOPsPerStep, 100*e.AttentionShare)
	if e.SecondsPerStep > 0 {
		fmt.Fprintf(&b, "            at least %.2g s a step: a matrix product on this machine reaches %.1f GFLOP/s a rank\n", e.SecondsPerStep, e.GFLOPsMeasured)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// picture draws which rank holds which part of the sequence, one row a rank.
func (p *Plan) picture(b *strings.Builder) {
	n := p.Partition.SeqLen
	columns := min(pictureColumns, n)
	for _, r := range p.Partition.PerRank {
		row := []byte(strings.Repeat(".", columns))
		for _, s := range r.Spans {
			for i := range s.Len {
				row[(s.Start+i*s.Stride)*columns/n] = '#'
			}
		}
		fmt.Fprintf(b, "  rank %-4d %s %d tokens\n", r.Rank, row, r.Tokens)
	}
}

func (p *Plan) hops(b *strings.Builder) {
	for i, r := range p.Hops {
		if i == maxHopRanks {
			fmt.Fprintf(b, "  and %d more ranks (--json shows all)\n", len(p.Hops)-i)
			break
		}
		for j, h := range r.Hops {
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

// Bytes is a size in binary units: "3.2 MiB".
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
