package opstest_test

import (
	"context"
	"runtime"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/opstest"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

var (
	_ model.Ops     = (*cpu.Kernels)(nil)
	_ model.Experts = (*cpu.Kernels)(nil)
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newCPU(t *testing.T) opstest.Device {
	stream := tensor.NewHostStream("test")
	t.Cleanup(func() { stream.Close() })
	return opstest.Device{
		Ops:      cpu.New(stream),
		Upload:   func(host opstest.View) opstest.View { return host },
		Download: func(v opstest.View) (opstest.View, error) { return v, stream.Sync(context.Background()) },
	}
}

// levels lists the instruction sets of the kernels, and the types that the short form tests with each. The machine may
// lack some.
var levels = []struct {
	name  string
	short []tensor.DType
}{
	{"generic", []tensor.DType{tensor.F32, tensor.F64, tensor.F16}},
	{"avx2", []tensor.DType{tensor.F32, tensor.BF16}},
	{"avx512", []tensor.DType{tensor.F32, tensor.BF16}},
}

var dtypes = []tensor.DType{tensor.F32, tensor.F64, tensor.BF16, tensor.F16}

func TestOpsOnCPU(t *testing.T) {
	defer cpu.Use("")
	for _, level := range levels {
		if err := cpu.Use(level.name); err != nil {
			t.Log(err)
			continue
		}
		types := dtypes
		if testing.Short() {
			types = level.short
		}
		t.Run(level.name, func(t *testing.T) { opstest.TestOps(t, newCPU, types...) })
	}
}

// TestGOMAXPROCS checks that the number of processors changes no bit.
func TestGOMAXPROCS(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, dtype := range dtypes {
		runtime.GOMAXPROCS(1)
		want := opstest.Digest(t, newCPU(t), dtype)
		for _, n := range []int{2, 3, 4} {
			runtime.GOMAXPROCS(n)
			if got := opstest.Digest(t, newCPU(t), dtype); got != want {
				t.Errorf("%v with GOMAXPROCS %d: digest %x, with 1 %x", dtype, n, got, want)
			}
		}
	}
}
