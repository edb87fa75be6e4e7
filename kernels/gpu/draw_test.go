//go:build cuda

package gpu

import (
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Any part of the sequence is that of the host, in all types.
func TestDraw(t *testing.T) {
	rig := newCUDARig(t)
	const block = kernels.NormalBlock
	for seed, c := range []struct{ lo, n int64 }{
		{0, 1}, {0, 31}, {5, 33}, {0, block}, {block - 1, 2}, {3 * block, 17*block + 5}, {block + 77, 5 * block},
	} {
		numbers := kernels.Normals{Seed: uint64(seed), Stream: 1<<63 + 12345*uint64(seed), Std: 0.02}
		want := make([]float32, 0, c.n+2*block)
		first := c.lo / block
		for b := first; b*block < c.lo+c.n; b++ {
			r := numbers.Block(uint64(b))
			for range block {
				want = append(want, float32(r.NormFloat64()*numbers.Std))
			}
		}
		want = want[c.lo-first*block:][:c.n]
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
			r := rig.within(t)
			v := r.upload(tensor.New(dtype, int(c.n)))
			r.Draw(v, c.lo, numbers)
			wrong := 0
			for i, x := range r.values(v) {
				if float64(x) != near.Round(float64(want[i]), dtype) {
					wrong++
				}
			}
			if wrong > 0 {
				t.Errorf("%v, elements %d to %d: %d are not those of the host", dtype, c.lo, c.lo+c.n, wrong)
			}
		}
	}
}
