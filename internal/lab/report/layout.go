package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/plan"
)

const (
	maxShapes = 6    // different partitions on a page
	maxRects  = 6000 // rectangles of a figure
	maxRanks  = 64   // rows of a figure
	stripes   = 16   // drawn stripes of a striped layout; the pattern repeats
)

// layouts adds the tile map, the work by hop and the work of packed documents, once for each partition of the runs.
func (p *page) layouts(runs []Run) {
	seen := map[string]bool{}
	for i := range runs {
		r := &runs[i]
		if r.Plan == nil || len(r.Plan.Partition.PerRank) == 0 {
			continue
		}
		part := r.Plan.Partition
		key := fmt.Sprint(part.Layout, part.Ranks, part.Context, part.SeqLen, r.Plan.option("parallel.algorithm"),
			r.Plan.Packed != nil)
		if seen[key] || len(seen) == maxShapes {
			continue
		}
		seen[key] = true
		p.figure(r.tileMap())
		p.figure(r.hops())
		p.figure(r.packedWork())
	}
}

func (r *Run) tileMap() *figure {
	part := &r.Plan.Partition
	end, cut := float64(part.SeqLen), ""
	for _, rank := range part.PerRank {
		for _, s := range rank.Spans {
			if s.Stride > 1 {
				end = min(end, float64(s.Stride)*stripes)
				cut = fmt.Sprintf(" The first %s tokens are drawn; the pattern repeats.", readable.Number(end))
			}
		}
	}
	var ranks []int
	var marks []mark
	for row, rank := range part.PerRank {
		if row == maxRanks {
			cut += fmt.Sprintf(" The first %d ranks are drawn.", maxRanks)
			break
		}
		ranks = append(ranks, rank.Rank)
		for _, s := range rank.Spans {
			n, long := s.Len, 1.0
			if s.Stride <= 1 {
				n, long = 1, float64(s.Len)
			}
			for k := range min(n, stripes+1) {
				at := float64(s.Start) + float64(k)*float64(s.Stride)
				if at >= end || len(marks) == maxRects {
					break
				}
				marks = append(marks, mark{of: series{Name: "tokens of the rank", Kind: "rects"}, x: at,
					x2: min(end, at+long), y: float64(row), words: fmt.Sprintf("rank %d", rank.Rank)})
			}
		}
	}
	if len(marks) == maxRects {
		cut += fmt.Sprintf(" The first %s pieces are drawn.", readable.Number(maxRects))
	}
	caption := fmt.Sprintf("The tokens of each rank, in a sequence of %s tokens under %s over %d ranks.",
		readable.Number(float64(part.SeqLen)), part.Layout, part.Context)
	if part.Document {
		caption += " With packed documents the partition differs by sample; this one is for a single document."
	}
	return &figure{Title: "Tile map of " + part.Layout + r.suffix, Kind: "rects", Section: layouts,
		Caption: caption + cut,
		Views: []view{{"tokens", axis{Name: "position in the sequence", Kind: "tokens"}, ranksAxis(ranks),
			draw(marks)}}}
}

func (r *Run) hops() *figure {
	f := &figure{Title: "Work by rank and hop" + r.suffix, Kind: "heat", Section: layouts,
		Caption: "Visible (query, key) pairs of a head that a rank computes in each hop of the layer with the longest " +
			"window or none, and the keys and values that it sends at the same time. In an even column no rank waits " +
			"for the kernel of another."}
	pairs, sent := map[[2]int]float64{}, map[[2]int]float64{}
	var ranks []int
	var columns []string
	for i, h := range r.Plan.Hops {
		if i == maxRanks {
			f.Caption += fmt.Sprintf(" The first %d ranks are drawn.", maxRanks)
			break
		}
		ranks = append(ranks, h.Rank)
		for k, hop := range h.Hops[:min(len(h.Hops), maxRanks)] {
			if k == len(columns) {
				name := hop.Label // "hop 1 owner 0": the owner differs by rank
				if strings.HasPrefix(name, "hop ") || name == "" {
					name = cmp.Or(hopOf(name), fmt.Sprintf("hop %d", k))
				}
				columns = append(columns, name)
			}
			pairs[[2]int{i, k}], sent[[2]int{i, k}] = float64(hop.Pairs), float64(hop.SendBytes)
		}
	}
	if len(ranks) > 1 {
		f.Views = []view{heat("pairs", "hop", "", columns, ranks, pairs),
			heat("bytes sent", "hop", "bytes", columns, ranks, sent)}
	}
	return f
}

// packedWork draws the work of the ranks in the first packed batch, over its mean.
func (r *Run) packedWork() *figure {
	f := &figure{Title: "Work by rank of a packed batch" + r.suffix, Kind: "bars", Section: layouts}
	packed := r.Plan.Packed
	if packed == nil || len(packed.PerRank) == 0 {
		return f
	}
	parts := packed.PerRank
	if len(parts) > maxRanks { // the ranks with most work decide the step time
		parts = slices.Clone(parts)
		slices.SortStableFunc(parts, func(a, b plan.PackedPart) int { return cmp.Compare(b.Pairs, a.Pairs) })
		parts = parts[:maxRanks]
	}
	f.Caption = fmt.Sprintf("The first sample of the data: %d documents. Visible (query, key) pairs, tokens and sent "+
		"bytes of each rank over the mean of the ranks; the slowest has %.3f times the mean's pairs.",
		len(packed.Documents), packed.Imbalance)
	for i, name := range []string{"pairs", "tokens", "bytes sent"} {
		value := func(p plan.PackedPart) float64 {
			return []float64{float64(p.Pairs), float64(p.Tokens), float64(p.SendBytes)}[i]
		}
		mean := 0.0
		for _, p := range packed.PerRank {
			mean += value(p) / float64(len(packed.PerRank))
		}
		if mean == 0 {
			continue
		}
		var ranks []int
		var marks []mark
		for k, p := range parts {
			ranks = append(ranks, p.Rank)
			marks = append(marks, mark{of: series{Name: name, Kind: "bar", Color: i}, x: float64(k), y: value(p) / mean})
		}
		marks = append(marks, ideal(series{Name: "mean"}, "", 0, 1, float64(len(parts)-1), 1)...)
		f.Views = append(f.Views, view{name, ranksAxis(ranks), axis{Name: name + " over the mean", Zero: true},
			draw(marks)})
	}
	return f
}

func ranksAxis(ranks []int) axis {
	a := axis{Name: "rank", Kind: "text"}
	for _, r := range ranks {
		a.Text = append(a.Text, fmt.Sprintf("rank %d", r))
	}
	return a
}
