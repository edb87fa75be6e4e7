package cost

import (
	"math"
	"slices"
)

// axes is the most sizes that a time depends on.
const axes = 3

// spot is a point of a grid: the logarithms of its sizes.
type spot [axes]float64

// at is the spot of some sizes.
func at(sizes ...float64) (s spot) {
	for i, x := range sizes {
		s[i] = math.Log2(max(x, 1))
	}
	return s
}

// grid is the logarithm of a rate, or of a ratio, over the logarithms of sizes. Between the points it is linear in each
// size; beyond them it is that of the border. Points may lack: the others of a cell then stand for them.
type grid struct {
	axis   [axes][]float64 // ascending
	stride [axes]int       // places from a point to the next of an axis
	dense  []float64       // by place, NaN where there is none; nil where places are too many
	value  map[int]float64 // by place, where dense is nil: a file may have axes whose combinations no memory holds
	spots  map[spot]float64
	list   []point // the same
}

type point struct {
	spot
	value float64
}

// add sets the value at a spot; of several the mean is wrong less often than the last, yet one is kept, the smallest:
// noise only slows.
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
	for s := range g.spots {
		for i, x := range s {
			if !slices.Contains(g.axis[i], x) {
				g.axis[i] = append(g.axis[i], x)
			}
		}
	}
	step := 1
	for i := axes - 1; i >= 0; i-- {
		slices.Sort(g.axis[i])
		g.stride[i] = step
		step *= len(g.axis[i])
	}
	if n, ok := g.places(); ok {
		g.dense = slices.Repeat([]float64{math.NaN()}, n)
	} else {
		g.value = make(map[int]float64, len(g.spots))
	}
	for s, v := range g.spots {
		var n [axes]int
		for i, x := range s {
			n[i], _ = slices.BinarySearch(g.axis[i], x)
		}
		if g.dense != nil {
			g.dense[g.place(n)] = v
		} else {
			g.value[g.place(n)] = v
		}
		g.list = append(g.list, point{s, v})
	}
}

// densePlaces is the most places that are kept one by one.
const densePlaces = 1 << 14

// places is how many there are; false: more than densePlaces.
func (g *grid) places() (n int, few bool) {
	n = 1
	for i := range g.axis {
		if n *= len(g.axis[i]); n > densePlaces {
			return 0, false
		}
	}
	return n, true
}

// at is the value at a place; false where there is none.
func (g *grid) at(place int) (float64, bool) {
	if g.dense != nil {
		v := g.dense[place]
		return v, !math.IsNaN(v)
	}
	v, ok := g.value[place]
	return v, ok
}

// place is where the value of a point stands, by its places on the axes.
func (g *grid) place(n [axes]int) (at int) {
	for i, step := range g.stride {
		at += n[i] * step
	}
	return at
}

// look returns the value at a spot; false where there is no point.
func (g *grid) look(s spot) (float64, bool) {
	if g == nil || len(g.list) == 0 {
		return 0, false
	}
	var places [1 << axes]int // of the corners of the cell that s is in, from the lowest on
	var weights [1 << axes]float64
	lowest, n := 0, 1
	weights[0] = 1
	for i, step := range g.stride {
		if len(g.axis[i]) == 1 {
			continue
		}
		low, share := between(g.axis[i], s[i])
		if lowest += low * step; share == 1 {
			lowest += step
		}
		if share == 0 || share == 1 {
			continue // only one of the neighbours has a part
		}
		for c := range n {
			places[n+c], weights[n+c] = places[c]+step, weights[c]*share
			weights[c] *= 1 - share
		}
		n *= 2
	}
	sum, weight := 0.0, 0.0
	for c, w := range weights[:n] {
		if v, ok := g.at(lowest + places[c]); ok {
			sum, weight = sum+w*v, weight+w
		}
	}
	if weight > 0 {
		return sum / weight, true
	}
	return g.nearest(s), true
}

// between finds the interval of an axis that x lies in, and where.
func between(axis []float64, x float64) (low int, share float64) {
	i, end := 0, len(axis)
	for i < end {
		if m := (i + end) / 2; axis[m] < x {
			i = m + 1
		} else {
			end = m
		}
	}
	switch {
	case i == 0:
		return 0, 0
	case i == len(axis):
		return len(axis) - 1, 0
	}
	return i - 1, (x - axis[i-1]) / (axis[i] - axis[i-1])
}

// nearest is the value of the point that is nearest; of several as near the largest, so that it does not depend on
// their order.
func (g *grid) nearest(s spot) float64 {
	best, value := math.Inf(1), math.Inf(-1)
	for _, p := range g.list {
		d := 0.0
		for i, x := range p.spot {
			d += (x - s[i]) * (x - s[i])
		}
		if d < best || d == best && p.value > value {
			best, value = d, p.value
		}
	}
	return value
}
