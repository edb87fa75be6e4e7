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
	tokens := series{Name: "tokens of the rank", Kind: "rects"}
	end, cut := float64(part.SeqLen), ""
	for _, rank := range part.PerRank {
		for _, s := range rank.Spans {
			if s.Stride > 1 {
				end = min(end, float64(s.Stride)*stripes)
				cut = fmt.Sprintf(" The first %s tokens are drawn; the pattern repeats.", readable.Number(end))
			}
		}
	}
	words, ranks := map[string]int{}, []int(nil)
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
				if at >= end || len(tokens.X) == maxRects {
					break
				}
				tokens.X, tokens.X2, tokens.Y = append(tokens.X, number(at)), append(tokens.X2, number(min(end, at+long))),
					append(tokens.Y, number(row))
				tokens.label(fmt.Sprintf("rank %d", rank.Rank), words)
			}
		}
	}
	if len(tokens.X) == maxRects {
		cut += fmt.Sprintf(" The first %s pieces are drawn.", readable.Number(maxRects))
	}
	caption := fmt.Sprintf("The tokens of each rank, in a sequence of %s tokens under %s over %d ranks.",
		readable.Number(float64(part.SeqLen)), part.Layout, part.Context)
	if part.Document {
		caption += " With packed documents the partition differs by sample; this one is for a single document."
	}
	return &figure{Title: "Tile map of " + part.Layout + r.suffix, Kind: "rects", Section: layouts, Caption: caption +
		cut,
		Views: []view{{Name: "tokens", X: axis{Name: "position in the sequence", Kind: "tokens"},
			Y:      axis{Name: "rank", Kind: "text", Text: nameRanks(ranks)},
			Panels: []panel{{Series: []series{tokens}}}}}}
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
		f.Views = []view{heatView("pairs", "hop", "", columns, nameRanks(ranks), pairs),
			heatView("bytes sent", "hop", "bytes", columns, nameRanks(ranks), sent)}
	}
	return f
}

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
	var ranks []int
	for _, p := range parts {
		ranks = append(ranks, p.Rank)
	}
	for i, m := range []struct {
		name  string
		value func(plan.PackedPart) float64
	}{
		{"pairs", func(p plan.PackedPart) float64 { return float64(p.Pairs) }},
		{"tokens", func(p plan.PackedPart) float64 { return float64(p.Tokens) }},
		{"bytes sent", func(p plan.PackedPart) float64 { return float64(p.SendBytes) }},
	} {
		mean := 0.0
		for _, p := range packed.PerRank {
			mean += m.value(p) / float64(len(packed.PerRank))
		}
		if mean == 0 {
			continue
		}
		bar := series{Name: m.name, Kind: "bar", Color: i}
		for k, p := range parts {
			bar.add(float64(k), m.value(p)/mean)
		}
		f.Views = append(f.Views, view{Name: m.name, X: axis{Name: "rank", Kind: "text", Text: nameRanks(ranks)},
			Y: axis{Name: m.name + " over the mean", Zero: true},
			Panels: []panel{{Series: []series{bar, {Name: "mean", Kind: "ideal", X: []number{0, number(len(parts) - 1)},
				Y: []number{1, 1}}}}}})
	}
	return f
}
