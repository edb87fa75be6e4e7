package bench

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

//go:generate go test . -run TestConceptTables -update

var update = flag.Bool("update", false, "rewrite the tables of docs/concepts")

const (
	docTokens = 8192 // tokens of a rank
	docRow    = 4096 // bytes of a row of K and V: 8 heads of 128 in bf16
	docWindow = 4096 // keys
	docPacks  = 20
)

// figures holds the means of a layout over some packs.
type figures struct {
	imbalance, worst float64
	remote           float64            // share of the remote rows that a rank reads
	sent             map[string]float64 // by algorithm, MiB of keys and values sent by a rank in the forward pass
}

// measured returns the figures of a layout with a mask, for packs or for one sequence.
func measured(t *testing.T, layout partition.LayoutName, size, window int, packs [][]int) figures {
	t.Helper()
	f := figures{sent: map[string]float64{}}
	parts := make([]figures, len(packs))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, docs := range packs {
		g.Go(func() (err error) { parts[i], err = measuredPack(layout, size, window, docs); return err })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, p := range parts {
		n := float64(len(packs))
		f.imbalance += p.imbalance / n
		f.worst = max(f.worst, p.imbalance)
		f.remote += p.remote / n
		for a, x := range p.sent {
			f.sent[a] += x / n
		}
	}
	return f
}

func measuredPack(layout partition.LayoutName, size, window int, docs []int) (f figures, err error) {
	n := size * docTokens
	mask, err := partition.NewMask(true, window, n, n, docs)
	if err != nil {
		return f, err
	}
	l := partition.Ready(layout.Layout(docs, mask.Band), n, size)
	shape := partition.Shape{SeqQ: n, SeqKV: n, Size: size, Layout: l, Mask: mask}
	f = figures{imbalance: 1 / partition.Balance(partition.Work(shape)), sent: map[string]float64{}}
	for _, algorithm := range []string{"ring", "allgather"} { // the others exchange heads, which do not depend on the mask
		p, err := ring.NewPlanner(algorithm, ring.Spec{Shape: shape})
		if err != nil {
			return f, err
		}
		p.Prepare()
		rows := int64(0)
		for r, spans := range partition.AllSpans(shape.Layout, n, size) {
			var sent planner.Recorder
			one := planner.Attention{DType: tensor.F32, Batch: 1, Mixer: hf.Mixer{Heads: 1, KVHeads: 1, Dim: 1, DimV: 1}}
			if err := sent.Run(p.Schedule(r), one, partition.Count(spans), false); err != nil {
				return f, err
			}
			rows += sent.Sent / (2 * int64(tensor.F32.Size())) // K and V
		}
		f.sent[algorithm] = float64(rows) * docRow / float64(size) / (1 << 20)
		if algorithm == "allgather" {
			f.remote = float64(rows) / float64(n*(size-1))
		}
	}
	return f, nil
}

// minHeap implements MagiAttention's dispatch (magi_attention/meta/solver/dispatch_solver.py): chunks of equal length,
// largest work first, go to the rank with the least work among those with room for a chunk. It returns the slowest
// rank's pairs divided by the mean.
func minHeap(docs []int, size, chunk int) float64 {
	var areas []int
	in, room := 0, chunk
	for _, n := range docs {
		for at := 0; at < n; {
			rows := min(n-at, room)
			in += rows*at + rows*(rows+1)/2
			at += rows
			if room -= rows; room == 0 {
				areas = append(areas, in)
				in, room = 0, chunk
			}
		}
	}
	slices.SortFunc(areas, func(a, b int) int { return cmp.Compare(b, a) })
	work, count := make([]int, size), make([]int, size)
	for _, a := range areas {
		best := -1
		for r := range size {
			if count[r] < len(areas)/size && (best < 0 || work[r] < work[best]) {
				best = r
			}
		}
		work[best] += a
		count[best]++
	}
	return 1 / partition.Balance(work)
}

var docRanks = []int{2, 8, 64}

// maskTable returns the table of a mask, with a row for each number of ranks.
func maskTable(t *testing.T, ranks []int, window int, packs func(size int) [][]int) (rows []string) {
	names := []string{"contiguous", "zigzag", "striped", "document", "document-zigzag"}
	if window >= 0 {
		names = slices.Insert(names, 2, "window")
	}
	head, rule := "| ranks |", "|---|"
	for _, name := range names {
		head += " " + name + " |"
		rule += "---|"
	}
	rows = append(rows, head, rule)
	for _, size := range ranks {
		row := fmt.Sprintf("| %d |", size)
		for _, name := range names {
			f := measured(t, partition.LayoutName(name), size, window, packs(size))
			row += fmt.Sprintf(" %.3f; %s, %s |", f.imbalance, readable.Number(f.sent["ring"]),
				readable.Number(f.sent["allgather"]))
		}
		rows = append(rows, row)
	}
	return rows
}

func magiTable(t *testing.T, ranks []int, packs map[int][][]int) []string {
	rows := []string{
		"| ranks | documents a pack | MagiAttention, chunks of 2048 | the same, chunks of 512 | document | keys that " +
			"travel |",
		"|---|---|---|---|---|---|",
	}
	for _, size := range ranks {
		docs := 0
		heap := func(chunk int) string {
			mean, worst := 0.0, 0.0
			for _, p := range packs[size] {
				x := minHeap(p, size, chunk)
				mean, worst = mean+x/float64(len(packs[size])), max(worst, x)
			}
			return fmt.Sprintf("%.3f (%.2f)", mean, worst)
		}
		for _, p := range packs[size] {
			docs += len(p)
		}
		f := measured(t, "document", size, -1, packs[size])
		rows = append(rows, fmt.Sprintf("| %d | %d | %s | %s | %.3f (%.2f) | %.0f %% |", size,
			(docs+docPacks/2)/docPacks,
			heap(2048), heap(512), f.imbalance, f.worst, 100*f.remote))
	}
	return rows
}

// ringTables returns the lines of the tables for some numbers of ranks.
func ringTables(t *testing.T, ranks []int) map[string][]string {
	packs := map[int][][]int{}
	for _, size := range ranks {
		p, err := MagiPacks(size*docTokens, docPacks)
		if err != nil {
			t.Fatal(err)
		}
		packs[size] = p
	}
	one := func(size int) [][]int { return [][]int{{size * docTokens}} }
	return map[string][]string{
		"causal":    maskTable(t, ranks, -1, one),
		"window":    maskTable(t, ranks, docWindow-1, one),
		"documents": maskTable(t, ranks, -1, func(size int) [][]int { return packs[size] }),
		"magi":      magiTable(t, ranks, packs),
	}
}

// conceptPages name the page of docs/concepts that shows each table.
var conceptPages = map[string]string{
	"causal": "zigzag", "window": "windows", "documents": "documents", "magi": "documents",
}

// TestConceptTables compares the tables of docs/concepts with the layouts and schedules. It computes the rows of few
// ranks again; go generate computes all.
func TestConceptTables(t *testing.T) {
	ranks := docRanks[:2]
	if *update {
		ranks = docRanks
	}
	for name, lines := range ringTables(t, ranks) {
		page := "../../../docs/concepts/" + conceptPages[name] + ".md"
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		before, rest, ok := strings.Cut(string(text), "<!-- "+name+" -->\n")
		table, after, ended := strings.Cut(rest, "<!-- end -->")
		if !ok || !ended {
			t.Fatalf("%s has no place for %q", page, name)
		}
		if *update {
			text := before + "<!-- " + name + " -->\n" + strings.Join(lines, "\n") + "\n<!-- end -->" + after
			if err := os.WriteFile(page, []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
			continue
		}
		for _, line := range lines {
			if !strings.Contains(table, line+"\n") {
				t.Errorf("%s, %s: run go generate ./internal/run/bench; want the line\n%s\nin\n%s", page, name, line,
					table)
			}
		}
	}
}
