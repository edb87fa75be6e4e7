package planner_test

import (
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

var update = flag.Bool("update", false, "write the tables of docs/benchmarks/predictions.md")

const (
	page  = "../../../docs/benchmarks/predictions.md"
	begin = "<!-- simulation: go test ./internal/foresee/planner -run TestSimulation -update -->\n"
	end   = "<!-- end of simulation -->"
)

// cluster returns the costs of simulated H200s: hosts of 8, with links of 450 GB/s inside and 50 GB/s between them.
func cluster(t testing.TB, ranks int) planner.Costs {
	t.Helper()
	table, same, err := cost.Reference(cost.Machine{Device: "NVIDIA H200", Arch: 90})
	if err != nil || !same {
		t.Fatal(same, err)
	}
	return table.For(cost.Job{Ranks: ranks, PerHost: min(ranks, 8), Link: 450e9, Net: 50e9})
}

// qwen3 describes the attention of Qwen3-8B.
var qwen3 = planner.Attention{Backend: "fused", DType: tensor.BF16, Batch: 1,
	Mixer: hf.Mixer{Heads: 32, KVHeads: 8, Dim: 128, DimV: 128}}

type simulated struct {
	algorithm                    string
	tokens, ranks, inner, gather int
}

var simulations = map[simulated]float64{} // that tests share

// layer returns the seconds of one causal layer, forward and backward, in a zigzag.
func layer(t testing.TB, algorithm string, tokens, ranks, inner, gather int) float64 {
	t.Helper()
	key := simulated{algorithm, tokens, ranks, inner, gather}
	if s, ok := simulations[key]; ok {
		return s
	}
	mask, err := partition.NewMask(true, -1, tokens, tokens, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec := ring.Spec{
		Shape: partition.Shape{SeqQ: tokens, SeqKV: tokens, Size: ranks, Layout: partition.Zigzag{}, Mask: mask},
		Heads: qwen3.Heads, KVHeads: qwen3.KVHeads, Inner: inner, GatherHeads: gather,
	}
	forward, backward, err := planner.Passes(algorithm, spec, qwen3, planner.Topology{PerHost: min(ranks, 8)},
		cluster(t, ranks))
	if err != nil {
		t.Fatal(err)
	}
	simulations[key] = forward.Seconds + backward.Seconds
	return simulations[key]
}

// simulation returns the tables of the page: with constant tokens for each rank, and with constant tokens in total.
func simulation(t testing.TB) string {
	var b strings.Builder
	for _, c := range []struct {
		title  string
		tokens func(ranks int) int
	}{
		{"16K tokens a rank", func(ranks int) int { return ranks << 14 }},
		{"1M tokens in all", func(int) int { return 1 << 20 }},
	} {
		fmt.Fprintf(&b, "%s:\n\n| ranks | tokens | ring | all-gather | gather_heads 1 | hierarchical, inner 8 | "+
			"best, TFLOP/s a GPU |\n|--:|--:|--:|--:|--:|--:|--:|\n", c.title)
		for _, ranks := range []int{8, 64, 256, 1024} {
			tokens := c.tokens(ranks)
			best := math.Inf(1)
			var cells []string
			add := func(algorithm string, inner, gather int) {
				s := layer(t, algorithm, tokens, ranks, inner, gather)
				best = min(best, s)
				cells = append(cells, milliseconds(s))
			}
			add("ring", 1, 0)
			add("allgather", 1, 0)
			add("allgather", 1, 1)
			add("hierarchical", 8, 0)
			fmt.Fprintf(&b, "| %d | %dK | %s | %.0f |\n", ranks, tokens>>10, strings.Join(cells, " | "),
				flops(tokens)/best/float64(ranks)/1e12)
		}
		b.WriteString("\n")
	}
	b.WriteString("Measured ([H200](202611_h200.md), commit 4084880b), TFLOP/s a GPU:\n\n| H200s | tokens | algorithm | predicted | measured | |\n|--:|--:|---|--:|--:|--:|\n")
	for _, c := range measured {
		s := layer(t, c.algorithm, c.tokens, c.ranks, c.ranks, 0)
		rate := flops(c.tokens) / s / float64(c.ranks) / 1e12
		fmt.Fprintf(&b, "| %d | %dK | %s | %.0f | %.0f | %+.1f %% |\n", c.ranks, c.tokens>>10, c.algorithm, rate,
			c.rate, 100*(rate/c.rate-1))
	}
	return b.String() + "\n"
}

// measured holds rates of attention from docs/benchmarks/202611_h200.md, with the heads of qwen3 and fused.
var measured = []struct {
	ranks, tokens int
	algorithm     string
	rate          float64
}{
	{4, 32 << 10, "ring", 502}, {4, 512 << 10, "ring", 546}, {4, 128 << 10, "ring", 525},
	{4, 128 << 10, "allgather", 526},
}

// flops counts the operations of a causal layer, forward and backward.
func flops(tokens int) float64 {
	return 3.5 * 4 * float64(qwen3.Heads*qwen3.Dim) * float64(tokens) * float64(tokens+1) / 2
}

// milliseconds formats a time with at least three digits.
func milliseconds(s float64) string {
	if s >= 1 {
		return fmt.Sprintf("%.0f", 1e3*s)
	}
	return fmt.Sprintf("%.3g", 1e3*s)
}

// The page shows the planner's present predictions for clusters that were not measured.
func TestSimulationPage(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begin)
	old, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the tables", page)
	}
	made := simulation(t)
	if *update {
		if err := os.WriteFile(page, []byte(head+begin+made+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if made != old {
		t.Errorf("%s shows other tables; run go generate ./internal/foresee/planner", page)
	}
}

// A thousand ranks of a ring take as long as their calls, where links keep up, and no less than the bytes of the
// slowest.
func TestThousandRanks(t *testing.T) {
	const ranks = 1024
	few, many := layer(t, "ring", 64<<14, 64, 1, 0), layer(t, "ring", ranks<<14, ranks, 1, 0)
	if ratio := many / few; ratio < 0.9*ranks/64 || ratio > 1.1*ranks/64 { // a hop more for each rank more
		t.Errorf("%g s of 64 ranks, %g s of %d", few, many, ranks)
	}
	block := float64(1<<14) * 8 * 256 * 2 // of keys and values
	if least := 2 * (ranks - 1) * block / 50e9; many < least {
		t.Errorf("%g s, and the links between hosts take %g s", many, least)
	}
}
