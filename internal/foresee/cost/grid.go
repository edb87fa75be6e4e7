package cost

import (
	"math"
	"slices"
)

// axes limits the sizes that a time depends on.
const axes = 3

// A spot is a point of a grid: the logarithms of its sizes.
type spot [axes]float64

// at returns the spot of some sizes.
func at(sizes ...float64) (s spot) {
	for i, x := range sizes {
		s[i] = math.Log2(max(x, 1))
	}
	return s
}

// A grid holds the logarithm of a rate, or of a ratio, over the logarithms of sizes. Between its points it is linear in
// each size. Beyond them it has the value of the border. If corners of a cell have no value, the others replace them.
type grid struct {
	axis  [axes][]float64 // ascending
	spots map[spot]float64
}

// add sets the value at a spot. Of several values it keeps the highest rate, since noise only slows.
func (g *grid) add(s spot, value float64) {
	if g.spots == nil {
		g.spots = map[spot]float64{}
	}
	if old, ok := g.spots[s]; !ok || value > old {
		g.spots[s] = value
	}
}

// build makes the grid ready.
func (g *grid) build() {
	for i := range g.axis {
		for s := range g.spots {
			g.axis[i] = append(g.axis[i], s[i])
		}
		slices.Sort(g.axis[i])
		g.axis[i] = slices.Compact(g.axis[i])
	}
}

// look returns the value at a spot; false: the grid has no points, or is not built.
func (g *grid) look(s spot) (float64, bool) {
	if g == nil || len(g.axis[0]) == 0 {
		return 0, false
	}
	var corners [1 << axes]spot // of the cell around s
	var weights [1 << axes]float64
	weights[0] = 1
	n := 1
	for i, axis := range g.axis {
		low, share := between(axis, s[i])
		for c := range n {
			if corners[c][i] = axis[low]; share == 0 {
				continue
			}
			corners[n+c], weights[n+c] = corners[c], weights[c]*share
			corners[n+c][i] = axis[low+1]
			weights[c] *= 1 - share
		}
		if share > 0 {
			n *= 2
		}
	}
	sum, weight := 0.0, 0.0
	for c, w := range weights[:n] {
		if v, ok := g.spots[corners[c]]; ok {
			sum, weight = sum+w*v, weight+w
		}
	}
	if weight > 0 {
		return sum / weight, true
	}
	return g.nearest(s), true
}

// between finds the interval of an axis around x, and the place of x in it.
func between(axis []float64, x float64) (low int, share float64) {
	i, _ := slices.BinarySearch(axis, x)
	switch {
	case i == 0:
		return 0, 0
	case i == len(axis):
		return len(axis) - 1, 0
	}
	return i - 1, (x - axis[i-1]) / (axis[i] - axis[i-1])
}

// nearest returns the value of the nearest point. Of several as near it returns the largest, so that the result does
// not depend on their order.
func (g *grid) nearest(s spot) float64 {
	best, value := math.Inf(1), math.Inf(-1)
	for p, v := range g.spots {
		d := 0.0
		for i, x := range p {
			d += (x - s[i]) * (x - s[i])
		}
		if d < best || d == best && v > value {
			best, value = d, v
		}
	}
	return value
}
