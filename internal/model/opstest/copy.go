package opstest

import (
	"math"

	"github.com/cprun/cprun/tensor"
)

// testCopy copies between all float types: values at the edges of each type, where rounding
// and ranges show, and random ones.
func testCopy(r *rig) {
	nan, inf := math.NaN(), math.Inf(1)
	edges := []float64{0, math.Copysign(0, -1), 1, -1, inf, -inf, nan,
		65504, 65519, 65520, -65520, 65536, 1e5, // the largest float16 and around
		0x1p-14, 0x1.ffep-15, 0x1.ffcp-15, 0x1p-24, 0x1p-25, 0x1.8p-25, -0x1.8p-24, 0x1p-26, // its subnormals
		1 + 0x1p-11, 1 + 0x3p-11, 1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1.8p-8, 2 - 0x1p-12, 2 - 0x1p-9, // ties
		3.3895313892515355e38, 3.4e38, 1e-40, -1e-45, 1e-30, 0x1p-126, 0x1.fp-127}
	for range 64 - len(edges) {
		edges = append(edges, r.rng.NormFloat64())
	}
	floats := []tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16}
	for _, from := range floats {
		src, values := r.put(from, edges, 2, 4, 2, 4)
		for _, to := range floats {
			dst := r.garbage(to, 2, 4, 2, 4)
			r.ops.Copy(dst, src)
			want := tensor.New(to, 2, 4, 2, 4)
			encode(want, values)
			r.equal(from.String()+" to "+to.String(), dst, decode(want))
		}
	}
	empty := r.garbage(tensor.F32, 1, 0, 1, 3)
	r.ops.Copy(r.garbage(tensor.BF16, 1, 0, 1, 3), empty)
	r.equal("nothing", empty, nil)
}
