package report

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/machine"
)

type quantity struct {
	name  string
	y     axis
	value func(c *experiment.Cell) (y, lo, hi float64) // NaN: not known
}

func rateOf(value func(*experiment.Cell) float64) func(*experiment.Cell) (y, lo, hi float64) {
	return func(c *experiment.Cell) (y, lo, hi float64) {
		nan := math.NaN()
		if y = value(c); c.Status != experiment.OK || y == 0 {
			return nan, nan, nan
		}
		if c.StepSecondsMin <= 0 || c.StepSecondsMax <= 0 {
			return y, nan, nan
		}
		return y, y * c.StepSeconds / c.StepSecondsMax, y * c.StepSeconds / c.StepSecondsMin
	}
}

// secondsOf returns the measured step time, or the predicted one of a planned cell; NaN for none.
func secondsOf(c *experiment.Cell) float64 {
	switch {
	case c.Status == experiment.OK && c.StepSeconds > 0:
		return c.StepSeconds
	case c.Status == experiment.Planned && c.PredictedStepSeconds > 0:
		return c.PredictedStepSeconds
	}
	return math.NaN()
}

// rates lists the speeds of a cell. strong uses the third, weak the first.
var rates = []quantity{
	{"TFLOP/s a device", axis{Name: "TFLOP/s a device", Zero: true},
		rateOf(func(c *experiment.Cell) float64 { return c.TFLOPsPerDevice })},
	{"tokens/s a device", axis{Name: "tokens/s a device", Log: true},
		rateOf(func(c *experiment.Cell) float64 { return c.TokensPerSecondPerDevice })},
	{"tokens/s in all", axis{Name: "tokens/s", Log: true},
		rateOf(func(c *experiment.Cell) float64 { return c.TokensPerSecond })},
	{"seconds a step", axis{Name: "seconds a step", Kind: "seconds", Log: true},
		func(c *experiment.Cell) (y, lo, hi float64) {
			if c.Status != experiment.OK {
				return secondsOf(c), math.NaN(), math.NaN()
			}
			return secondsOf(c), c.StepSecondsMin, c.StepSecondsMax
		}},
	{"MFU", axis{Name: "share of the device's peak", Kind: "share", Zero: true},
		rateOf(func(c *experiment.Cell) float64 { return c.MFU })},
}

func (g *grid) against(key string) *figure {
	f := &figure{Title: "Throughput by " + axisOf(key).Name, Kind: "lines", Section: scaling,
		Caption: "Median of the counted steps; bars span the fastest and the slowest step. FLOPs are model FLOPs: " +
			"causal attention counts half, and recomputation does not count."}
	if key == keyLength {
		f.Title = "Throughput by sequence length"
	}
	if _, ok := g.axis(key); !ok {
		return f
	}
	for _, q := range rates {
		f.Views = append(f.Views, view{Name: q.name, X: axisOf(key), Y: q.y, Panels: g.lines([]string{key},
			func(c *experiment.Cell) (x, y, lo, hi float64) {
				y, lo, hi = q.value(c)
				return g.number(c, key), y, lo, hi
			})})
	}
	return f
}

// others draws the rates by another key, if the grid has neither lengths nor ranks: by a numeric key, or else by words.
func (g *grid) others() *figure {
	f := &figure{Title: "Throughput", Kind: "bars", Section: scaling, Caption: "Median of the counted steps."}
	_, lengths := g.axis(keyLength)
	_, ranks := g.axis(keyRanks)
	axes := g.varying()
	if lengths || ranks || len(axes) == 0 {
		return f
	}
	last := axes[len(axes)-1]
	if _, number := last.Values[0].(string); !number && !math.IsNaN(g.number(&g.Cells[0], last.Key)) {
		return g.against(last.Key)
	}
	for _, q := range rates {
		panels := g.lines([]string{last.Key}, func(c *experiment.Cell) (x, y, lo, hi float64) {
			y, _, _ = q.value(c)
			return place(last, g.value(c, last.Key)), y, math.NaN(), math.NaN()
		})
		for _, p := range panels {
			for k := range p.Series {
				p.Series[k].Kind = "bar"
			}
		}
		f.Views = append(f.Views, view{Name: q.name, X: axis{Name: last.Key, Kind: "text", Text: texts(last)},
			Y: axis{Name: q.y.Name, Kind: q.y.Kind, Zero: true}, Panels: panels})
	}
	return f
}

func texts(a experiment.Axis) (all []string) {
	for _, v := range a.Values {
		if n, ok := v.(float64); ok && a.Key == keyLength {
			all = append(all, readable.Size(n))
			continue
		}
		all = append(all, experiment.Text(v))
	}
	return all
}

func place(a experiment.Axis, v any) float64 {
	return float64(slices.IndexFunc(a.Values, func(o any) bool { return experiment.Text(o) == experiment.Text(v) }))
}

func (g *grid) strong() *figure {
	f := &figure{Title: "Strong scaling: one sequence over more ranks", Kind: "lines", Section: scaling,
		Caption: "The same length over more ranks. Speed-up is relative to the fastest cell with the fewest ranks; the " +
			"thin line is ideal: n times the ranks, n times the speed."}
	if _, ok := g.axis(keyRanks); !ok {
		return f
	}
	rate := func(c *experiment.Cell) (x, y, lo, hi float64) {
		return g.number(c, keyRanks), 1 / secondsOf(c), math.NaN(), math.NaN()
	}
	speedup, efficiency := g.lines([]string{keyRanks}, rate), g.lines([]string{keyRanks}, rate)
	plain := g.lines([]string{keyRanks}, func(c *experiment.Cell) (x, y, lo, hi float64) {
		y, lo, hi = rates[2].value(c)
		return g.number(c, keyRanks), y, lo, hi
	})
	for i := range speedup {
		n0, y0 := fewest(speedup[i].Series)
		high := n0
		for k := range speedup[i].Series {
			s, e := &speedup[i].Series[k], &efficiency[i].Series[k]
			for j, n := range s.X {
				high = max(high, n)
				s.Y[j] /= y0
				e.Y[j] = s.Y[j] / (n / n0)
			}
		}
		if high == n0 { // only one number of ranks
			speedup[i], efficiency[i] = panel{}, panel{}
			continue
		}
		ideal := series{Name: "ideal", Kind: "ideal", X: []number{n0, high}, Y: []number{1, high / n0}}
		speedup[i].Series = append(speedup[i].Series, ideal)
		ideal.Y = []number{1, 1}
		efficiency[i].Series = append(efficiency[i].Series, ideal)
	}
	f.Views = []view{
		{Name: "speed-up", X: axisOf(keyRanks), Y: axis{Name: "speed-up", Log: true}, Panels: speedup},
		{Name: "efficiency", X: axisOf(keyRanks), Y: axis{Name: "speed-up over the ideal", Kind: "share", Zero: true},
			Panels: efficiency},
		{Name: "tokens/s", X: axisOf(keyRanks), Y: axis{Name: "tokens/s", Log: true}, Panels: plain},
	}
	return f
}

func fewest(all []series) (n, rate number) {
	for _, s := range all {
		for j, x := range s.X {
			switch {
			case n == 0 || x < n:
				n, rate = x, s.Y[j]
			case x == n:
				rate = max(rate, s.Y[j])
			}
		}
	}
	return n, rate
}

// weak draws the rate of a device over ranks, with the sequence length in proportion to the ranks.
func (g *grid) weak() *figure {
	f := &figure{Title: "Weak scaling: equal tokens on each rank", Kind: "lines", Section: scaling,
		Caption: "The length grows with the ranks. Since work per token grows with the length, the measure is TFLOP/s a " +
			"device, relative to the fewest ranks; the thin line is ideal, 100 %."}
	_, ranks := g.axis(keyRanks)
	_, lengths := g.axis(keyLength)
	if !ranks || !lengths {
		return f
	}
	wide := *g // with tokens per rank in place of lengths
	wide.Results = &experiment.Results{Name: g.Name, Set: g.Set}
	per := experiment.Axis{Key: keyPerRank}
	for i := range g.Cells {
		c := g.Cells[i]
		n := g.number(&c, keyLength) / g.number(&c, keyRanks)
		c.Values = maps.Clone(c.Values)
		delete(c.Values, keyLength)
		c.Values[keyPerRank] = n
		if !slices.Contains(per.Values, any(n)) {
			per.Values = append(per.Values, n)
		}
		wide.Cells = append(wide.Cells, c)
	}
	slices.SortFunc(per.Values, func(a, b any) int { return int(a.(float64) - b.(float64)) })
	byLength := func(a experiment.Axis) bool { return a.Key == keyLength }
	wide.axes = append([]experiment.Axis{per}, slices.DeleteFunc(slices.Clone(g.axes), byLength)...)
	rate := func(c *experiment.Cell) (x, y, lo, hi float64) {
		y, lo, hi = rates[0].value(c)
		return wide.number(c, keyRanks), y, lo, hi
	}
	share, plain := wide.lines([]string{keyRanks}, rate), wide.lines([]string{keyRanks}, rate)
	for i := range share {
		for k := range share[i].Series {
			s, a := &share[i].Series[k], &plain[i].Series[k]
			if len(s.X) < 2 {
				s.X, a.X, s.Y, a.Y = nil, nil, nil, nil
				continue
			}
			y0 := s.Y[0]
			for j := range s.Y {
				s.Y[j] /= y0
			}
			s.Lo, s.Hi = nil, nil
		}
		empty := func(s series) bool { return len(s.X) == 0 }
		share[i].Series, plain[i].Series = slices.DeleteFunc(share[i].Series, empty), slices.DeleteFunc(plain[i].Series,
			empty)
		low, high := math.Inf(1), 0.0
		for _, s := range share[i].Series {
			low, high = min(low, float64(s.X[0])), max(high, float64(s.X[len(s.X)-1]))
		}
		share[i].Series = append(share[i].Series, series{Name: "ideal", Kind: "ideal", X: []number{number(low),
			number(high)}, Y: []number{1, 1}})
	}
	f.Views = []view{
		{Name: "efficiency", X: axisOf(keyRanks), Y: axis{Name: "TFLOP/s a device over the fewest ranks",
			Kind: "share", Zero: true}, Panels: share},
		{Name: "TFLOP/s a device", X: axisOf(keyRanks), Y: axis{Name: "TFLOP/s a device", Zero: true}, Panels: plain},
	}
	return f
}

// keyPerRank names the axis for weak scaling: sequence length over ranks.
const keyPerRank = "tokens a rank"

// exposed draws the share of a step in which compute waited for transfers.
func (g *grid) exposed(key string) *figure {
	f := &figure{Title: "Waiting for transfers", Kind: "lines", Section: communicate,
		Caption: "Share of a step in which compute waited for transfers, on the rank that waited longest."}
	if _, ok := g.axis(key); !ok {
		if key == keyRanks {
			return f
		}
		return g.exposed(keyRanks)
	}
	f.Views = []view{{Name: "share of the step", X: axisOf(key), Y: axis{Name: "share of the step", Kind: "share",
		Zero: true}, Panels: g.lines([]string{key}, func(c *experiment.Cell) (x, y, lo, hi float64) {
		if g.number(c, keyRanks) == 1 { // one rank never waits
			return math.NaN(), math.NaN(), math.NaN(), math.NaN()
		}
		return g.number(c, key), share(c), math.NaN(), math.NaN()
	})}}
	return f
}

func (g *grid) predicted() *figure {
	f := &figure{Title: "Predicted against measured", Kind: "lines", Section: predictions,
		Caption: "Each point is a cell. On the thin line the prediction is exact, between the dotted lines within 10 %."}
	for _, q := range []struct {
		name   string
		kind   string
		values func(c *experiment.Cell) (predicted, measured float64)
	}{
		{"seconds a step", "seconds", func(c *experiment.Cell) (float64, float64) {
			return c.PredictedStepSeconds, c.StepSeconds
		}},
		{"memory", "bytes", func(c *experiment.Cell) (float64, float64) {
			return float64(c.PlannedMemoryBytes), float64(c.MemoryBytes)
		}},
	} {
		low, high := math.Inf(1), 0.0
		panels := g.lines(nil, func(c *experiment.Cell) (x, y, lo, hi float64) {
			p, m := q.values(c)
			if c.Status != experiment.OK || p <= 0 || m <= 0 {
				p, m = math.NaN(), math.NaN()
			} else {
				low, high = min(low, p, m), max(high, p, m)
			}
			return p, m, math.NaN(), math.NaN()
		})
		one := fold(panels) // one panel, in which only color distinguishes cells
		for i, at := range []float64{1, 1.1, 1 / 1.1} {
			one = append(one, series{Name: []string{"as predicted", "10 % more", "10 % less"}[i], Kind: "ideal",
				Dash: i, X: []number{number(low), number(high)}, Y: []number{number(low * at), number(high * at)}})
		}
		f.Views = append(f.Views, view{Name: q.name, X: axis{Name: "predicted", Kind: q.kind, Log: true},
			Y: axis{Name: "measured", Kind: q.kind, Log: true}, Panels: []panel{{Series: one}}})
	}
	return f
}

// fold joins series of equal color in all panels to one series of points.
func fold(panels []panel) []series {
	var out, all []series
	for _, p := range panels {
		for _, s := range p.Series {
			if p.Title != "" {
				s.Name += ", " + p.Title
			}
			all = append(all, s)
		}
	}
	for _, s := range all {
		first, _, _ := strings.Cut(s.Name, ",")
		k := slices.IndexFunc(out, func(o series) bool { return o.Name == first })
		if k < 0 {
			k, out = len(out), append(out, series{Name: first, Kind: "points", Color: s.Color, Symbol: s.Symbol})
		}
		known := map[string]int{}
		for i, w := range out[k].Words {
			known[w] = i
		}
		for i := range s.X {
			out[k].X, out[k].Y = append(out[k].X, s.X[i]), append(out[k].Y, s.Y[i])
			out[k].label(s.Name, known)
		}
	}
	return out
}

func (g *grid) memory() *figure {
	f := &figure{Title: "Memory by kind", Kind: "bars", Section: memories,
		Caption: "Planned bytes of the rank that needs most; the diamond is the measured peak. Cells that ran out of " +
			"memory have no diamond."}
	x, ok := g.axis(keyLength)
	if !ok {
		if x, ok = g.axis(keyRanks); !ok {
			if all := g.varying(); len(all) > 0 {
				x, ok = all[len(all)-1], true
			}
		}
	}
	if !ok {
		return f
	}
	split := g.varying(x.Key)
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
			lineOf(p, series{Name: "measured peak", Kind: "points", Color: 7, Symbol: 3}).add(at,
				float64(c.MemoryBytes))
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
			f.Caption += " Bars that leave the chart need more; see the numbers."
			break
		}
	}
	slices.SortStableFunc(v.Panels, func(a, b panel) int { return slices.Compare(a.place, b.place) })
	f.Views = []view{v}
	return f
}

// roofline draws the rate of a device over its model FLOPs per sent byte. Below the slanted line the link can be the
// limit, below the flat line the arithmetic.
func (g *grid) roofline(plans map[string]*Plan) *figure {
	f := &figure{Title: "Roofline of transfers", Kind: "lines", Section: communicate,
		Caption: "Each point is a cell: model FLOPs of a device per byte sent by the rank that sends most, and the rate " +
			"that the device reached. "}
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
		x = p.Estimate.FLOPsPerStep / float64(p.Partition.Ranks) / float64(p.Communication.Total)
		low, high = min(low, x), max(high, x)
		return x, c.TFLOPsPerDevice, nan, nan
	})
	all := fold(panels)
	if len(all) == 0 {
		return f
	}
	if at.flops > 0 {
		top := series{Name: "roof: " + at.source, Kind: "ideal"}
		if at.link > 0 {
			ridge := at.flops / at.link
			low = min(low, ridge/4)
			top.X, top.Y = []number{number(low), number(ridge)}, []number{number(low * at.link / 1e12),
				number(at.flops / 1e12)}
			f.Caption += fmt.Sprintf("The roof is %s TFLOP/s and %s GB/s (%s).", readable.Number(at.flops/1e12),
				readable.Number(at.link/1e9), at.source)
			high = max(high, ridge*2)
		} else {
			top.X, top.Y = []number{number(low)}, []number{number(at.flops / 1e12)}
			f.Caption += fmt.Sprintf("The roof is %s TFLOP/s (%s); the links of this machine have no known rate.",
				readable.Number(at.flops/1e12), at.source)
		}
		high *= 1.5
		top.X, top.Y = append(top.X, number(high)), append(top.Y, number(at.flops/1e12))
		all = append(all, top)
	}
	f.Views = []view{{Name: "TFLOP/s a device", X: axis{Name: "model FLOPs for each byte sent", Log: true},
		Y: axis{Name: "TFLOP/s a device", Log: true}, Panels: []panel{{Series: all}}}}
	return f
}

type roof struct {
	flops, link float64 // a second; 0 where not known
	source      string
}

var archOf = regexp.MustCompile(`(?:^|,)arch=sm(\d+)`)

// roofOf returns the rates in the data sheet of a GPU, if it is known; else none.
func roofOf(p *Plan) roof {
	if m := archOf.FindStringSubmatch(p.Machine); m != nil {
		arch, _ := strconv.Atoi(m[1])
		if peak, ok := machine.CardFor(arch); ok {
			r := roof{flops: peak.BF16, link: peak.Link, source: "data sheet of " + peak.Name}
			if p.option("precision.compute") == "fp32" {
				r.flops = peak.FP32
			}
			return r
		}
	}
	return roof{}
}
