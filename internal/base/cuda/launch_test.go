//go:build cuda

package cuda

import (
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

func TestArguments(t *testing.T) {
	d := device(t)
	s := stream(t, d, "arguments")
	f := must.Have(compile(t, d, `
struct alignas(16) Pair { long long a, b; };
extern "C" __global__ void arguments(double *out, int a, long long b, int c, float d, double e, int f,
    const __grid_constant__ Pair g, char *h, int i) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f; out[6] = g.a;
  out[7] = g.b; out[8] = h == nullptr; out[9] = i;
}`).Function("arguments", 0))
	out := must.Have(d.Alloc(80))
	pair := make([]byte, 16)
	pair[0], pair[9] = 7, 1
	args := new(Args).View(tensor.Dense(out, tensor.F64, 0, [4]int{1, 1, 1, 10})).Int(-1).Int64(1<<40).Int(3).
		Float(0.5).Int64(int64(math.Float64bits(1e100))).Int(6).Bytes(pair, 16).View(tensor.View{}).Int(9)
	s.Launch(f, Launch{Grid: Dim{X: 1}, Block: Dim{X: 1}}, args)
	want := []float64{-1, 1 << 40, 3, 0.5, 1e100, 6, 7, 256, 1, 9}
	if got := get[float64](t, s, out.addr, 10); !slices.Equal(got, want) {
		t.Errorf("the kernel got %v, want %v", got, want)
	}
}

// A struct has the layout of its fields as separate parameters, aligned to its largest field.
func TestStructArgument(t *testing.T) {
	x := struct {
		At    uint64
		Scale float64
		Few   [2]struct{ Lo, Hi int32 }
		Unit  float32
		Rows  int32
	}{At: 1 << 40, Scale: 1e100, Unit: 0.5, Rows: -3}
	x.Few[1].Lo, x.Few[1].Hi = 7, -8
	got := Struct(new(Args).Int(2), &x).Int(9)
	want := new(Args).Int(2).Addr(x.At).Int64(int64(math.Float64bits(x.Scale))).Int(0).Int(0).Int(7).Int(-8).
		Float(0.5).Int(-3).Int(9)
	if got.n != want.n || got.buf != want.buf || got.apart {
		t.Errorf("%d bytes %x, want %d bytes %x", got.n, got.buf[:got.n], want.n, want.buf[:want.n])
	}
	if got.count != 3 || got.at[1] != 8 {
		t.Errorf("%d parameters, the second at %d; want 3, at 8", got.count, got.at[1])
	}
	if n := testing.AllocsPerRun(100, func() {
		var a Args
		Struct(&a, &x)
	}); n != 0 {
		t.Errorf("a struct takes %v allocations", n)
	}
}

func TestGridAndSharedMemory(t *testing.T) {
	d := device(t)
	s := stream(t, d, "shared")
	f := must.Have(compile(t, d, `
extern "C" __global__ void fill(int *x, int bytes) {
  extern __shared__ char buf[];
  buf[bytes - 1] = 1;
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int threads = blockDim.x * blockDim.y * blockDim.z;
  x[block * threads + (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x] = buf[bytes - 1];
}`).Function("fill", d.SharedPerBlock))
	x := put(t, s, make([]int32, 24*24+1))
	s.Launch(f, Launch{Grid: Dim{2, 3, 4}, Block: Dim{4, 3, 2}, Shared: d.SharedPerBlock},
		new(Args).Addr(x.addr).Int(d.SharedPerBlock))
	s.Launch(f, Launch{Grid: Dim{X: 0}, Block: Dim{X: 1}}, new(Args).Addr(x.addr).Int(1)) // an empty grid does nothing
	got := get[int32](t, s, x.addr, 24*24+1)
	if i := slices.Index(got, 0); i != 24*24 {
		t.Errorf("element %d was not written", i)
	}
	if n, err := f.Blocks(128, 1024); err != nil || n < 1 {
		t.Errorf("%d blocks on an SM, %v", n, err)
	}
}
