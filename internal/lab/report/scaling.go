package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/machine"
)

// figures returns the figures of an experiment. A figure without views and table does not apply to it.
func (g *grid) figures(plans map[string]*Plan) []*figure {
	results, choices := g.tables()
	all := []*figure{results, choices,
		{Title: "Throughput by sequence length", Kind: "lines", Section: scaling, Caption: speedCaption,
			Views: g.views(keyLength, rates...)},
		{Title: "Strong scaling: one sequence over more ranks", Kind: "lines", Section: scaling,
			Caption: "The same length over more ranks. Speed-up is relative to the fastest cell with the fewest ranks; the " +
				"thin line is ideal: n times the ranks, n times the speed.",
			Views: g.strong()},
		{Title: "Weak scaling: equal tokens on each rank", Kind: "lines", Section: scaling,
			Caption: "The length grows with the ranks. Since work per token grows with the length, the measure is TFLOP/s a " +
				"device, relative to the fewest ranks; the thin line is ideal, 100 %.",
			Views: g.weak()},
	}
	over, scaled := g.axis(keyLength, keyRanks)
	if axes := g.varying(); !scaled && len(axes) > 0 {
		key := axes[len(axes)-1].Key
		f := &figure{Title: "Throughput by " + key, Kind: "lines", Section: scaling, Caption: speedCaption,
			Views: g.views(key, rates...)}
		if f.Views[0].X.Kind == "text" {
			f.Title, f.Kind, f.Caption = "Throughput", "bars", "Median of the counted steps."
		}
		all = append(all, f)
	}
	return append(all, g.memory(),
		&figure{Title: "Waiting for transfers", Kind: "lines", Section: communicate,
			Caption: "Share of a step in which compute waited for transfers, on the rank that waited longest.",
			Views:   g.views(over.Key, waits)},
		g.roofline(plans),
		&figure{Title: "Predicted against measured", Kind: "lines", Section: predictions,
			Caption: "Each point is a cell. On the thin line the prediction is exact, between the dotted lines within 10 %.",
			Views:   g.predicted()})
}

const speedCaption = "Median of the counted steps; bars span the fastest and the slowest step. FLOPs are model " +
	"FLOPs: causal attention counts half, and recomputation does not count."

// A quantity is a measure of a cell: y and its spread, 0 if unknown.
type quantity struct {
	name  string
	y     axis
	value func(c *experiment.Cell) mark
}

// rateOf returns the measure of a rate, with a spread like the step time.
func rateOf(value func(*experiment.Cell) float64) func(*experiment.Cell) mark {
	return func(c *experiment.Cell) mark {
		y := value(c)
		if c.Status != experiment.OK {
			return mark{}
		}
		if c.StepSecondsMin <= 0 || c.StepSecondsMax <= 0 {
			return mark{y: y}
		}
		return mark{y: y, lo: y * c.StepSeconds / c.StepSecondsMax, hi: y * c.StepSeconds / c.StepSecondsMin}
	}
}

// secondsOf returns the measured step time, or the predicted one of a planned cell; 0 for none.
func secondsOf(c *experiment.Cell) float64 {
	switch c.Status {
	case experiment.OK:
		return c.StepSeconds
	case experiment.Planned:
		return c.PredictedStepSeconds
	}
	return 0
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
		func(c *experiment.Cell) mark {
			return mark{y: secondsOf(c), lo: c.StepSecondsMin, hi: c.StepSecondsMax}
		}},
	{"MFU", axis{Name: "share of the device's peak", Kind: "share", Zero: true},
		rateOf(func(c *experiment.Cell) float64 { return c.MFU })},
}

var waits = quantity{"share of the step", axis{Name: "share of the step", Kind: "share", Zero: true},
	func(c *experiment.Cell) mark {
		if numberOf(c, keyRanks) == 1 { // one rank never waits
			return mark{}
		}
		return mark{y: share(c)}
	}}

// views draws quantities over an axis that has several values: as bars if they are words.
func (g *grid) views(key string, list ...quantity) (all []view) {
	a, ok := g.axis(key)
	if !ok {
		return nil
	}
	x := g.axisOf(a)
	for _, q := range list {
		marks := g.lines(g.varying(key), func(c *experiment.Cell) mark {
			m := q.value(c)
			if m.x = numberOf(c, key); x.Kind == "text" {
				m = mark{of: series{Kind: "bar"}, x: float64(place(a, c)), y: m.y}
			}
			return m
		})
		if x.Kind == "text" {
			q.y.Log, q.y.Zero = false, true
		}
		all = append(all, view{q.name, x, q.y, draw(marks)})
	}
	return all
}

// strong draws the speed over ranks, relative to the fastest cell with the fewest ranks.
func (g *grid) strong() []view {
	ranks, ok := g.axis(keyRanks)
	if !ok {
		return nil
	}
	var speedup, efficiency []mark
	for _, shown := range groups(g.lines(g.varying(keyRanks), func(c *experiment.Cell) mark {
		return mark{x: numberOf(c, keyRanks), y: 1 / secondsOf(c)}
	}), mark.title) {
		first := slices.MinFunc(shown, func(a, b mark) int {
			return cmp.Or(cmp.Compare(a.x, b.x), cmp.Compare(b.y, a.y))
		})
		last := slices.MaxFunc(shown, func(a, b mark) int { return cmp.Compare(a.x, b.x) })
		more := last.x / first.x
		if more == 1 {
			continue
		}
		for _, m := range shown {
			m.y /= first.y
			speedup = append(speedup, m)
			m.y /= m.x / first.x
			efficiency = append(efficiency, m)
		}
		perfect := series{Name: "ideal"}
		speedup = append(speedup, ideal(perfect, first.panel, first.x, 1, last.x, more)...)
		efficiency = append(efficiency, ideal(perfect, first.panel, first.x, 1, last.x, 1)...)
	}
	x := g.axisOf(ranks)
	tokens := g.views(keyRanks, rates[2])[0]
	tokens.Name = "tokens/s"
	return []view{
		{"speed-up", x, axis{Name: "speed-up", Log: true}, draw(speedup)},
		{"efficiency", x, axis{Name: "speed-up over the ideal", Kind: "share", Zero: true}, draw(efficiency)},
		tokens,
	}
}

// weak draws the rate of a device over ranks, with the sequence length in proportion to the ranks.
func (g *grid) weak() []view {
	ranks, ok := g.axis(keyRanks)
	if _, lengths := g.axis(keyLength); !ok || !lengths {
		return nil
	}
	axes := g.varying(keyRanks, keyLength)
	if len(g.perRank.Values) > 1 {
		axes = append(axes, g.perRank)
	}
	var relative, plain []mark
	for _, shown := range groups(g.lines(axes, func(c *experiment.Cell) mark {
		m := rates[0].value(c)
		m.x = numberOf(c, keyRanks)
		return m
	}), mark.title) {
		low, high := math.Inf(1), 0.0
		for _, line := range groups(shown, mark.name) {
			if len(line) < 2 {
				continue
			}
			plain = append(plain, line...)
			low, high = min(low, line[0].x), max(high, line[len(line)-1].x)
			for _, m := range line {
				relative = append(relative, mark{of: m.of, panel: m.panel, x: m.x, y: m.y / line[0].y})
			}
		}
		relative = append(relative, ideal(series{Name: "ideal"}, shown[0].panel, low, 1, high, 1)...)
	}
	x := g.axisOf(ranks)
	return []view{
		{"efficiency", x, axis{Name: "TFLOP/s a device over the fewest ranks", Kind: "share", Zero: true}, draw(relative)},
		{rates[0].name, x, rates[0].y, draw(plain)},
	}
}

func (g *grid) predicted() (views []view) {
	for _, q := range []struct {
		name, kind string
		values     func(c *experiment.Cell) (predicted, measured float64)
	}{
		{"seconds a step", "seconds", func(c *experiment.Cell) (float64, float64) {
			return c.PredictedStepSeconds, c.StepSeconds
		}},
		{"memory", "bytes", func(c *experiment.Cell) (float64, float64) {
			return float64(c.PlannedMemoryBytes), float64(c.MemoryBytes)
		}},
	} {
		low, high := math.Inf(1), 0.0
		marks := joined(g.lines(g.varying(), func(c *experiment.Cell) mark {
			p, m := q.values(c)
			if c.Status != experiment.OK || p <= 0 || m <= 0 {
				return mark{}
			}
			low, high = min(low, p, m), max(high, p, m)
			return mark{x: p, y: m}
		}))
		for i, at := range []float64{1, 1.1, 1 / 1.1} {
			exact := series{Name: []string{"as predicted", "10 % more", "10 % less"}[i], Dash: i}
			marks = append(marks, ideal(exact, "", low, low*at, high, high*at)...)
		}
		views = append(views, view{q.name, axis{Name: "predicted", Kind: q.kind, Log: true},
			axis{Name: "measured", Kind: q.kind, Log: true}, draw(marks)})
	}
	return views
}

func (g *grid) memory() *figure {
	f := &figure{Title: "Memory by kind", Kind: "bars", Section: memories,
		Caption: "Planned bytes of the rank that needs most; the diamond is the measured peak. Cells that ran out of " +
			"memory have no diamond."}
	x, ok := g.axis(keyLength, keyRanks)
	if axes := g.varying(); !ok && len(axes) > 0 {
		x, ok = axes[len(axes)-1], true
	}
	if !ok {
		return f
	}
	split := g.varying(x.Key)
	slices.Reverse(split) // ranks first: they change most
	var marks []mark
	most, planned := 0.0, 0.0
	for _, c := range g.cells {
		planned = max(planned, float64(c.PlannedMemoryBytes))
		put := func(of series, bytes int64) {
			marks = append(marks, mark{of: of, panel: names(c, split), place: places(c, split), x: float64(place(x, c)),
				y: float64(bytes)})
		}
		if m := c.Memory; m != nil {
			kinds := []string{"weights", "gradients", "optimizer", "activations", "workspace"}
			for k, bytes := range []int64{m.Weights, m.Gradients, m.Optimizer, m.Activations, m.Workspace} {
				put(series{Name: kinds[k], Kind: "stack", Color: k}, bytes)
			}
		}
		if c.Status == experiment.OK {
			most = max(most, float64(c.MemoryBytes), float64(c.PlannedMemoryBytes))
			if c.MemoryBytes > 0 {
				put(series{Name: "measured peak", Kind: "points", Color: 7, Symbol: 3}, c.MemoryBytes)
			}
		}
	}
	y := axis{Name: "bytes of a rank", Kind: "bytes", Zero: true}
	if most > 0 && planned > 1.5*most {
		y.Max = number(1.5 * most)
		f.Caption += " Bars that leave the chart need more; see the numbers."
	}
	slices.SortStableFunc(marks, func(a, b mark) int { return slices.Compare(a.place, b.place) })
	f.Views = []view{{"planned", axis{Name: g.axisOf(x).Name, Kind: "text", Text: texts(x)}, y, draw(marks)}}
	return f
}

// roofline draws the rate of a device over its model FLOPs per sent byte. Below the slanted line the link can be the
// limit, below the flat line the arithmetic.
func (g *grid) roofline(plans map[string]*Plan) *figure {
	f := &figure{Title: "Roofline of transfers", Kind: "lines", Section: communicate,
		Caption: "Each point is a cell: model FLOPs of a device per byte sent by the rank that sends most, and the rate " +
			"that the device reached. "}
	var roof machine.Card
	low, high := math.Inf(1), 0.0
	marks := joined(g.lines(g.varying(), func(c *experiment.Cell) mark {
		p := plans[c.ID]
		if p == nil || c.Status != experiment.OK || p.Communication.Total <= 0 || p.Partition.Ranks < 2 ||
			c.TFLOPsPerDevice <= 0 {
			return mark{}
		}
		if roof.BF16 == 0 {
			roof = roofOf(p)
		}
		x := p.Estimate.FLOPsPerStep / float64(p.Partition.Ranks) / float64(p.Communication.Total)
		low, high = min(low, x), max(high, x)
		return mark{x: x, y: c.TFLOPsPerDevice}
	}))
	if top := roof.BF16 / 1e12; top > 0 {
		source := "data sheet of " + roof.Name
		line := []float64{low, top}
		if roof.Link > 0 {
			ridge := roof.BF16 / roof.Link
			low, high = min(low, ridge/4), max(high, ridge*2)
			line = []float64{low, low * roof.Link / 1e12, ridge, top}
			f.Caption += fmt.Sprintf("The roof is %s TFLOP/s and %s GB/s (%s).", readable.Number(top),
				readable.Number(roof.Link/1e9), source)
		} else {
			f.Caption += fmt.Sprintf("The roof is %s TFLOP/s (%s); the links of this machine have no known rate.",
				readable.Number(top), source)
		}
		marks = append(marks, ideal(series{Name: "roof: " + source}, "", append(line, 1.5*high, top)...)...)
	}
	f.Views = []view{{"TFLOP/s a device", axis{Name: "model FLOPs for each byte sent", Log: true},
		axis{Name: "TFLOP/s a device", Log: true}, draw(marks)}}
	return f
}

// roofOf returns the data sheet of a plan's GPU, with the rate of its precision as BF16; no rates if it is not known.
func roofOf(p *Plan) (card machine.Card) {
	if m, err := machine.Assume([]string{p.Machine}); err == nil {
		card, _ = machine.CardFor(m.Arch)
	}
	if p.option("precision.compute") == "fp32" {
		card.BF16 = card.FP32
	}
	return card
}
