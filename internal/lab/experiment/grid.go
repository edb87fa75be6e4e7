package experiment

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
)

// Cells returns every combination of the grid's values, the last axis fastest. A cell is Skipped if an entry of skip
// matches it, else Pending.
func (e *Experiment) Cells() []Cell {
	total := 1
	for _, a := range e.Grid {
		total *= len(a.Values)
	}
	cells := make([]Cell, total)
	digits := len(fmt.Sprint(total))
	for i := range cells {
		c := &cells[i]
		c.Values, c.Status = map[string]any{}, Pending
		rest := i
		for k := len(e.Grid) - 1; k >= 0; k-- {
			a := &e.Grid[k]
			c.Values[a.Key] = a.Values[rest%len(a.Values)]
			rest /= len(a.Values)
		}
		c.ID = e.id(i+1, digits, c.Values)
		if slices.ContainsFunc(e.skip, func(s skipped) bool { return s.holds(c.Values) }) {
			c.Status = Skipped
		}
	}
	return cells
}

// maxID bounds the name of a cell's directory, in bytes.
const maxID = 64

// id names a cell's directory: its number, and its values for a reader.
func (e *Experiment) id(number, digits int, values map[string]any) string {
	name := fmt.Sprintf("%0*d", digits, number)
	for _, a := range e.Grid {
		name += "-" + strings.Map(func(r rune) rune {
			if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._", r) {
				return r
			}
			return '_'
		}, Text(values[a.Key]))
	}
	return name[:min(len(name), maxID)]
}

// Defaults of every cell, which the experiment may override: each step is logged, and nothing beside training takes
// time. A schedule of the learning rate may be longer than a cell.
var cellDefaults = []string{"log.every=1", "log.tensorboard=false", "lr_schedule.warmup_steps=0"}

// Flags returns the --set flags that turn the base into a cell's config. set overrides the experiment's.
func (e *Experiment) Flags(c *Cell, set []string) []string {
	flags := slices.Concat(cellDefaults, e.setFlags, set)
	for _, a := range e.Grid {
		if flag := e.gridFlags[a.Key][c.Text(a.Key)]; flag != "" {
			flags = append(flags, flag)
		}
	}
	return flags
}

// Saves reports whether the runs write checkpoints: the experiment sets a key of them.
func (e *Experiment) Saves() bool {
	for key := range e.Set {
		if strings.HasPrefix(key, "checkpoint.") {
			return true
		}
	}
	return slices.ContainsFunc(e.Grid, func(a Axis) bool { return strings.HasPrefix(a.Key, "checkpoint.") })
}

// patience is the factor by which a cell may be more expensive for each halving of the gaps that precede it.
const patience = 2

// Order returns the pending cells as indices, in an order that gives a picture early: the ends of all axes of numbers
// before their middles, those before the quarters, and so on. cost is the predicted time of a cell, in any unit:
// cheap cells come before expensive ones of their level, and before the next levels within patience. If the cost of
// any is unknown, 0, only levels count.
func (e *Experiment) Order(cells []Cell, cost func(i int) float64) []int {
	weight := func(i, depth int) float64 { return cost(i) * math.Pow(patience, float64(depth)) }
	for i := range cells {
		if cells[i].Status == Pending && cost(i) == 0 {
			weight = func(_, depth int) float64 { return float64(depth) }
			break
		}
	}
	depth := map[int]int{}
	var order []int
	for i := range cells {
		if cells[i].Status != Pending {
			continue
		}
		order = append(order, i)
		rest := i
		for k := len(e.Grid) - 1; k >= 0; k-- {
			n := len(e.Grid[k].Values)
			if isScale(&e.Grid[k]) {
				depth[i] += level(rest%n, n)
			}
			rest /= n
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(weight(a, depth[a]), weight(b, depth[b])), cmp.Compare(depth[a], depth[b]))
	})
	return order
}

// isScale reports whether an axis has only numbers, so that some of its values predict the others.
func isScale(a *Axis) bool {
	return !slices.ContainsFunc(a.Values, func(v any) bool {
		switch v.(type) {
		case int64, float64:
			return false
		}
		return true
	})
}

// level ranks the value with index i of n: 0 for the two ends, 1 for the middle, 2 for the quarters, and so on, as
// van der Corput's sequence visits an interval.
func level(i, n int) int {
	lo, hi, depth := 0, n-1, 0
	if i == lo || i == hi {
		return 0
	}
	for depth < bits.Len(uint(n)) {
		depth++
		mid := (lo + hi) / 2
		switch {
		case i == mid:
			return depth
		case i < mid:
			hi = mid
		default:
			lo = mid
		}
	}
	return depth
}
