package bench

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
)

// CostTables returns a cost table for a terminal: of each kind of work the smallest and the largest that was
// measured.
func CostTables(t *cost.Table) []readable.Table {
	var out []readable.Table
	for i := range t.Sets {
		s := &t.Sets[i]
		table := readable.Table{
			Title: fmt.Sprintf("cost table of %s, %d rank%s at once", t.Machine.Device, s.Ranks,
				map[bool]string{false: "s"}[s.Ranks == 1]),
			Head: []string{"work", "from", "µs", "rate", "to", "µs", "rate", "", "points"},
		}
		for _, l := range linesOf(s) {
			table.Add(l.name, l.low.size, readable.Number(1e6*l.low.seconds), readable.Number(l.low.rate), l.high.size,
				readable.Number(1e6*l.high.seconds), readable.Number(l.high.rate), l.unit, fmt.Sprint(l.points))
		}
		if s.CallSeconds > 0 {
			table.Notes = []string{fmt.Sprintf("the host queues a call in %s µs", readable.Number(1e6*s.CallSeconds))}
		}
		out = append(out, table)
	}
	return out
}

// point is a figure of a line.
type point struct {
	size          string
	amount        float64
	seconds, rate float64
}

// line is a kind of work.
type line struct {
	name, unit string
	low, high  point
	points     int
}

// lines in the order in which their kinds come.
type lines []line

// add takes a point of so much work, in units whose rate is shown in scale a second.
func (l *lines) add(name, unit, size string, amount, seconds, scale float64) {
	p := point{size: size, amount: amount, seconds: seconds, rate: amount / seconds / scale}
	for i := range *l {
		if x := &(*l)[i]; x.name == name {
			x.points++
			if p.amount < x.low.amount {
				x.low = p
			}
			if p.amount > x.high.amount {
				x.high = p
			}
			return
		}
	}
	*l = append(*l, line{name: name, unit: unit, low: p, high: p, points: 1})
}

func linesOf(s *cost.Set) (l lines) {
	for _, a := range s.Attention {
		way := map[bool]string{true: "backward", false: "forward"}[a.Backward]
		if a.Deterministic {
			way += ", deterministic"
		}
		l.add(fmt.Sprintf("%s %s, %s, %d, %s", a.Backend, a.DType, a.Mask, a.Dim, way), "GFLOP/s",
			dims(a.Queries, a.Keys),
			FLOPs(max(a.Tiles, 1)*cost.Tile(a.Mask, a.Queries, a.Keys).Pairs(), a.Heads, a.Dim, a.Dim), a.Seconds, 1e9)
	}
	for _, p := range s.Products {
		l.add(p.Kind+" "+p.DType, "GFLOP/s", dims(p.Rows, p.In, p.Out),
			cost.Work{Rows: p.Rows, In: p.In, Out: p.Out}.FLOPs(), p.Seconds, 1e9)
	}
	for _, p := range s.Passes {
		l.add(p.Op+" "+p.DType, "GB/s", readable.Bytes(p.Bytes), float64(p.Bytes), p.Seconds, 1e9)
	}
	for _, k := range s.Links {
		l.add(fmt.Sprintf("%s, %s", k.Call, k.Transport), "GB/s", readable.Bytes(k.Bytes), float64(k.Bytes), k.Seconds,
			1e9)
	}
	return l
}
