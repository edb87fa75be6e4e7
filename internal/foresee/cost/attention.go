package cost

import (
	"math"
	"slices"

	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A kernel holds the rates of the calls of one kernel of attention.
type kernel struct {
	full    grid    // rate of full tiles, over rows of all heads, keys, dim
	floor   float64 // seconds of the quickest call
	further grid    // of a block that is not the first, to the first
	causal  grid    // rate of masked tiles over the rate of full ones, over the keys that a query sees, dim
	band    grid
	many    grid    // rate of tiles in a call of many over the rate by the grids above, over keys, dim
	most    float64 // of a warm GPU: no full tile of a step is faster
}

type attentionKey struct {
	backend, dtype, mask string
	backward             bool
}

func (m *Model) kernelOf(k attentionKey) *kernel {
	x := m.kernels[k]
	if x == nil {
		x = &kernel{most: math.Inf(1)}
		m.kernels[k] = x
	}
	return x
}

// indexAttention makes the grids of attention, those of full tiles first, since the others are relative to them.
func (m *Model) indexAttention() {
	for _, a := range m.set.Attention {
		if a.Mask != Full {
			continue
		}
		x, s := m.kernelOf(a.key()), a.spot()
		x.full.add(s, math.Log(AttentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim)/a.Seconds))
		if a.Further > 0 {
			x.further.add(s, math.Log(m.ratio(&a)))
		}
		if x.floor == 0 || a.Seconds < x.floor {
			x.floor = a.Seconds
		}
	}
	for _, x := range m.kernels {
		x.full.build()
		x.further.build()
	}
	for _, a := range m.set.Attention {
		k := a.key()
		k.mask = Full
		if x := m.kernels[k]; x != nil && (a.Mask == Causal || a.Mask == Band) {
			rate, _ := x.full.look(a.spot())
			pairs := float64(Tile(a.Mask, a.Queries, a.Keys).Pairs())
			own := math.Log(AttentionFLOPs(pairs, a.Heads, a.Dim, a.Dim) / a.Seconds)
			x.masked(a.Mask).add(maskSpot(pairs/float64(a.Queries), float64(a.Dim)), own-rate)
		}
	}
	for _, x := range m.kernels {
		x.causal.build()
		x.band.build()
	}
	m.indexDocuments()
}

const manyTiles = 4

// indexDocuments makes the grids of calls with many tiles: the cost of adjacent tiles, relative to tiles alone.
func (m *Model) indexDocuments() {
	for _, a := range m.set.Attention {
		k := a.key()
		k.mask = Full
		if x := m.kernels[k]; x != nil && a.Mask == Documents && a.Tiles >= manyTiles {
			apart, _ := x.seconds(a.MeasuredTiles(), a.Heads, a.Dim, a.Dim)
			x.many.add(maskSpot(float64(a.Keys), float64(a.Dim)), math.Log(apart/a.Seconds))
		}
	}
	for _, x := range m.kernels {
		x.many.build()
	}
}

// MeasuredTiles returns the tiles of the call that was measured.
func (a *Attention) MeasuredTiles() []partition.Tile {
	list := make([]partition.Tile, 0, max(a.Tiles, 1))
	for i := range max(a.Tiles, 1) {
		t := Tile(a.Mask, a.Queries, a.Keys)
		t.Q = partition.Range{Lo: i * a.Queries, Hi: (i + 1) * a.Queries}
		t.K = partition.Range{Lo: i * a.Keys, Hi: (i + 1) * a.Keys}
		list = append(list, t)
	}
	return list
}

func (a *Attention) spot() spot {
	return tileSpot(float64(a.Queries*a.Heads), float64(a.Keys), float64(a.Dim))
}

// tileSpot returns the place of a tile with that many rows, of all heads, and keys.
func tileSpot(rows, keys, dim float64) spot {
	s := at(rows, keys)
	s[2] = perDim(dim)
	return s
}

// maskSpot returns the place of a masked tile by the mean number of keys that a query sees. Wasted work lies along the
// edges of a mask, as much for each query, however many keys it sees.
func maskSpot(seen, dim float64) spot {
	s := at(seen)
	s[2] = perDim(dim)
	return s
}

// perDim returns the coordinate of a head dim. A pair takes its softmax, whatever the dim, and its products by the dim,
// so that the rate is more nearly linear in the inverse of the dim than in its logarithm.
func perDim(dim float64) float64 { return -64 / max(dim, 1) }

// less returns the loss of a rate by a mask, or by adjacent tiles. Beyond the largest measured number of keys the loss
// is constant for each query, so that its share fades.
func (g *grid) less(s spot) float64 {
	rate, ok := g.look(s)
	if !ok {
		return 0
	}
	return -g.fade(-rate, 0, s)
}

// fade returns the logarithm of the relative cost x at s. Its excess over 1 halves with each doubling beyond an axis's
// largest size.
func (g *grid) fade(x float64, axis int, s spot) float64 {
	beyond := s[axis] - g.axis[axis][len(g.axis[axis])-1]
	return math.Log1p(math.Expm1(x) / math.Exp2(max(beyond, 0)))
}

func (x *kernel) masked(mask string) *grid {
	if mask == Causal {
		return &x.causal
	}
	return &x.band
}

// Tile returns the tile that a table's mask means.
func Tile(mask string, queries, keys int) partition.Tile {
	t := partition.Tile{Q: partition.Range{Hi: queries}, K: partition.Range{Hi: keys}, Band: partition.Full()}
	switch mask {
	case Causal, Documents:
		t.Band = partition.Causal()
	case Band:
		t.Band = partition.Band{Lo: -max(keys/4, 1), Hi: 0}
	}
	return t
}

// AttentionFLOPs counts the operations of a forward pass. The backward pass has 2.5 times as many. Its rate, measured
// likewise, includes them.
func AttentionFLOPs(pairs float64, heads, dim, dimV int) float64 {
	return 2 * pairs * float64(heads) * float64(dim+dimV)
}

// kernel finds the grids of a call. If the table lacks it, the most similar one replaces it: the other determinism,
// another type of the same size, another backend.
func (m *Model) kernel(c *planner.Call) *kernel {
	want := attentionKey{c.Backend, Name(c.DType), Full, c.Backward}
	if x := m.kernels[want]; x != nil {
		return x
	}
	best, k := -1, want
	for _, a := range m.set.Attention {
		if a.Mask != Full || a.Backward != c.Backward {
			continue
		}
		score := 0
		for i, same := range []bool{
			a.DType == want.dtype, a.Backend == want.backend, wide(a.DType) == wide(want.dtype),
		} {
			if same {
				score += 1 << i
			}
		}
		if score > best {
			best, k = score, attentionKey{a.Backend, a.DType, Full, a.Backward}
		}
	}
	return m.kernels[k]
}

func wide(dtype string) bool { return dtype == "fp32" || dtype == "fp64" }

// Has reports whether the table measured that backend in that type.
func (m *Model) Has(backend string, t tensor.DType) bool {
	return slices.ContainsFunc(m.set.Attention, func(a Attention) bool {
		return a.Backend == backend && a.DType == Name(t)
	})
}

// Call implements planner.Costs. The tiles of a call run side by side, so each has the rate of as many rows as all
// have together, and no call is faster than the least that was measured.
func (m *Model) Call(c planner.Call) float64 {
	x := m.kernel(&c)
	if x == nil || len(c.Tiles) == 0 || c.Heads == 0 {
		return 0
	}
	heads := c.Heads * max(c.Batch, 1)
	total, widest := x.seconds(c.Tiles, heads, c.Dim, c.DimV)
	total = max(total, x.floor)
	if !c.First {
		if ratio, ok := x.further.look(widest); ok {
			total *= math.Exp(x.further.fade(ratio, 1, widest)) // a fold takes the same time for any number of keys
		}
	}
	return total * m.slow / m.flops
}

// seconds returns the time of the first block of a pass with tiles side by side, and the place of the tile with most
// pairs.
func (x *kernel) seconds(tiles []partition.Tile, heads, dimK, dimV int) (total float64, widest spot) {
	dim, rows, most := float64(dimK+dimV)/2, 0, 0
	for i := range tiles {
		rows += tiles[i].Q.Len()
	}
	s := tileSpot(float64(rows*heads), 1, dim)
	for i := range tiles {
		t := &tiles[i]
		pairs, area := float64(t.Pairs()), float64(t.Q.Len())*float64(t.K.Len())
		s[1] = math.Log2(float64(max(t.K.Len(), 1)))
		rate, _ := x.full.look(s)
		if mask := maskOf(t, pairs, area); mask != Full {
			rate += x.masked(mask).less(maskSpot(pairs/float64(t.Q.Len()), dim))
		}
		if len(tiles) >= manyTiles {
			rate += x.many.less(spot{s[1], 0, s[2]})
		}
		total += AttentionFLOPs(pairs, heads, dimK, dimV) / math.Exp(min(rate, x.most))
		if i == 0 || int(pairs) > most {
			most, widest = int(pairs), s
		}
	}
	return total, widest
}

// maskOf returns the mask of a table most like a tile: Causal if it is cut on one side, Band if on both.
func maskOf(t *partition.Tile, pairs, area float64) string {
	switch {
	case pairs == area:
		return Full
	case t.Band.Lo <= t.K.Lo-(t.Q.Hi-1) || t.Band.Hi >= t.K.Hi-1-t.Q.Lo:
		return Causal
	}
	return Band
}

const axes = 3

// A spot is a point of a grid: the logarithms of its sizes.
type spot [axes]float64

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

func (g *grid) build() {
	for i := range g.axis {
		for s := range g.spots {
			g.axis[i] = append(g.axis[i], s[i])
		}
		slices.Sort(g.axis[i])
		g.axis[i] = slices.Compact(g.axis[i])
	}
}

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
