package call

import (
	"math"
	"sync"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
)

// Strips returns the tables of the ziggurat of Marsaglia and Tsang (doi:10.18637/jss.v005.i08), for 128 strips.
var Strips = sync.OnceValue(func() *source.Strips {
	const edge, area, unit = 3.442619855899, 9.91256303526217e-3, 1 << 31 // where the tail begins; of each strip
	t := new(source.Strips)
	density := func(x float64) float64 { return math.Exp(-x * x / 2) }
	base := area / density(edge) // the width of a rectangle like the strip that holds the tail
	t.K[0], t.W[0], t.F[0] = uint32(edge/base*unit), float32(base/unit), 1
	outer := edge
	for i := 127; ; i-- {
		t.W[i], t.F[i] = float32(outer/unit), float32(density(outer))
		if i == 1 {
			return t // K[1] is 0: no part of the topmost strip is wholly below the curve
		}
		inner := math.Sqrt(-2 * math.Log(area/outer+density(outer)))
		t.K[i], outer = uint32(inner/outer*unit), inner
	}
})
