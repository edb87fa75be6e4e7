package state

import (
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

// Memory to send gradients in bf16 holds the largest bucket, and only if ranks share gradients.
func TestWire(t *testing.T) {
	flat := layout(4)
	largest := int64(0)
	for _, b := range flat.Buckets {
		largest = max(largest, b.Size())
	}
	for _, c := range []struct {
		ranks int
		shard Sharding
		half  bool
		want  int64
	}{
		{4, ShardOptimizer, true, 2 * largest}, {4, ShardGradients, true, 2 * largest},
		{4, ShardGradients, false, 0}, {4, ShardNone, true, 0}, {1, ShardGradients, true, 0},
	} {
		bytes := func(half bool) int64 {
			m := Meter{}
			s := must.Have(New(m, Options{Layout: flat, Groups: Groups(flat, Group{Size: c.ranks}), Shard: c.shard,
				Compute: tensor.F32, HalfWire: half}))
			if got := !s.Wire.IsZero(); got != (half && c.want > 0) {
				t.Errorf("%+v: memory for the wire: %t", c, got)
			}
			return m[Gradients]
		}
		if got := bytes(c.half) - bytes(false); got != c.want {
			t.Errorf("%+v: %d more bytes of gradients, want %d", c, got, c.want)
		}
	}
}
