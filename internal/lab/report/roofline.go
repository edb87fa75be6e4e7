package report

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/machine"
)

// fold joins series of the same color: points that need no line of their own.
func fold(all []series) []series {
	var out []series
	for _, s := range all {
		first := s.Name
		for i, r := range first {
			if r == ',' {
				first = first[:i]
				break
			}
		}
		k := slices.IndexFunc(out, func(o series) bool { return o.Name == first })
		if k < 0 {
			k, out = len(out), append(out, series{Name: first, Kind: s.Kind, Color: s.Color, Symbol: s.Symbol})
			out[k].Words = nil
		}
		known := map[string]int{}
		for i, w := range out[k].Words {
			known[w] = i
		}
		for i := range s.X {
			out[k].X, out[k].Y = append(out[k].X, s.X[i]), append(out[k].Y, s.Y[i])
			out[k].say(s.Name, known)
		}
	}
	return out
}

// memory draws what a rank's memory holds by the plan, and what was measured.
func (g *grid) memory() *figure {
	f := &figure{Title: "Memory by kind", Kind: "bars", Section: memories,
		Says: "Planned bytes of the rank that needs most, by kind; the diamond is the measured peak. A cell that ran out " +
			"of memory has its plan and no diamond."}
	x, ok := g.axis(keyLength)
	if !ok {
		if x, ok = g.axis(keyRanks); !ok {
			if all := g.telling(); len(all) > 0 {
				x, ok = all[len(all)-1], true
			}
		}
	}
	if !ok {
		return f
	}
	split := g.telling(x.Key)
	slices.Reverse(split) // ranks first: they change most
	v := view{Name: "planned", X: axis{Name: axisOf(x.Key).Name, Kind: "text", Text: texts(x)},
		Y: axis{Name: "bytes of a rank", Kind: "bytes", Zero: true}}
	for i := range g.Cells {
		c := &g.Cells[i]
		if c.Memory == nil && c.MemoryBytes == 0 {
			continue
		}
		p := panelOf(&v.Panels, g.names(c, split))
		p.place = g.places(c, split)
		at := place(x, g.value(c, x.Key))
		if m := c.Memory; m != nil {
			for k, part := range []struct {
				name  string
				bytes int64
			}{{"weights", m.Weights}, {"gradients", m.Gradients}, {"optimizer", m.Optimizer}, {"activations",
				m.Activations}, {"workspace", m.Workspace}} {
				lineOf(p, series{Name: part.name, Kind: "stack", Color: k}).add(at, float64(part.bytes))
			}
		}
		if c.MemoryBytes > 0 && c.Status == experiment.OK {
			lineOf(p, series{Name: "measured peak", Kind: "points", Color: 7, Symbol: 3}).add(at, float64(c.MemoryBytes))
		}
	}
	most := 0.0
	for _, c := range g.Cells {
		if c.Status == experiment.OK {
			most = max(most, float64(c.MemoryBytes), float64(c.PlannedMemoryBytes))
		}
	}
	for _, c := range g.Cells {
		if most > 0 && float64(c.PlannedMemoryBytes) > 1.5*most {
			v.Y.Max = number(1.5 * most)
			f.Says += " Bars that leave the chart are of cells that need more; the numbers have them."
			break
		}
	}
	slices.SortStableFunc(v.Panels, func(a, b panel) int { return slices.Compare(a.place, b.place) })
	f.Views = []view{v}
	return f
}

// roofline draws the rate of a device over its model FLOPs for each byte that it sends: below the slanted line
// the link can be what holds it up, below the flat one the arithmetic.
func (g *grid) roofline(plans map[string]*Plan) *figure {
	f := &figure{Title: "Roofline of transfers", Kind: "lines", Section: communicate,
		Says: "Each point is a cell: model FLOPs of a device for each byte that the rank sends which sends most, and " +
			"what rate it reached. "}
	var all []series
	var at roof
	low, high := math.Inf(1), 0.0
	panels := g.lines(nil, func(c *experiment.Cell) (x, y, lo, hi float64) {
		nan := math.NaN()
		p := plans[c.ID]
		if p == nil || c.Status != experiment.OK || p.Communication.Total <= 0 || p.Partition.Ranks < 2 ||
			c.TFLOPsPerDevice <= 0 {
			return nan, nan, nan, nan
		}
		if at.flops == 0 {
			at = roofOf(p)
		}
		x = p.Estimate.FLOPsPerStep / float64(p.Partition.Ranks) / p.Communication.Total
		low, high = min(low, x), max(high, x)
		return x, c.TFLOPsPerDevice, nan, nan
	})
	for _, p := range panels {
		for _, s := range p.Series {
			s.Kind = "points"
			if p.Title != "" {
				s.Name += ", " + p.Title
			}
			all = append(all, s)
		}
	}
	if all = fold(all); len(all) == 0 {
		return f
	}
	if at.flops > 0 {
		top := series{Name: "roof: " + at.says, Kind: "ideal"}
		if at.link > 0 {
			ridge := at.flops / at.link
			low = min(low, ridge/4)
			top.X, top.Y = []number{number(low), number(ridge)}, []number{number(low * at.link / 1e12), number(at.flops / 1e12)}
			f.Says += fmt.Sprintf("The roof is %s TFLOP/s and %s GB/s (%s).", readable.Number(at.flops/1e12),
				readable.Number(at.link/1e9), at.says)
			high = max(high, ridge*2)
		} else {
			top.X, top.Y = []number{number(low)}, []number{number(at.flops / 1e12)}
			f.Says += fmt.Sprintf("The roof is %s TFLOP/s (%s); the rate of the links of this machine is not known.",
				readable.Number(at.flops/1e12), at.says)
		}
		high *= 1.5
		top.X, top.Y = append(top.X, number(high)), append(top.Y, number(at.flops/1e12))
		all = append(all, top)
	}
	f.Views = []view{{Name: "TFLOP/s a device", X: axis{Name: "model FLOPs for each byte sent", Log: true},
		Y: axis{Name: "TFLOP/s a device", Log: true}, Panels: []panel{{Series: all}}}}
	return f
}

// A roof is what bounds a machine.
type roof struct {
	flops, link float64 // a second; 0 where not known
	says        string
}

var archOf = regexp.MustCompile(`(?:^|,)arch=sm(\d+)`)

// roofOf returns the data sheet's of a GPU, and the measured product rate of a CPU.
func roofOf(p *Plan) roof {
	if m := archOf.FindStringSubmatch(p.Machine); m != nil {
		arch, _ := strconv.Atoi(m[1])
		if peak, ok := machine.CardFor(arch); ok {
			r := roof{flops: peak.BF16, link: peak.Link, says: "data sheet of " + peak.Name}
			if p.option("precision.compute") == "fp32" {
				r.flops = peak.FP32
			}
			return r
		}
	}
	if p.Estimate.Measured > 0 {
		return roof{flops: p.Estimate.Measured * 1e9, says: "matrix products measured on this CPU, of a rank"}
	}
	return roof{}
}
