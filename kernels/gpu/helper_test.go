//go:build cuda

package gpu

import (
	"context"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newTestCPU returns the CPU kernels to which tests compare the GPU.
func newTestCPU(t testing.TB) *cpu.Kernels {
	stream := tensor.NewHostStream("test")
	t.Cleanup(func() { stream.Close() })
	return cpu.New(stream)
}

func settle(t testing.TB, c *cpu.Kernels) {
	t.Helper()
	if err := c.Stream().Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func normal(rng *rand.Rand, shape ...int) View {
	v := tensor.New(tensor.F32, shape...)
	for i := range tensor.Data[float32](v) {
		tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
	}
	return v
}
