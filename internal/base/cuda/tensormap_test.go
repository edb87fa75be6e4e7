//go:build cuda

package cuda

import (
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

// fetchSource copies a box to out. mapKinds defines PARAMETER, MAP and FENCE.
const fetchSource = `
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void fetch(PARAMETER, float *out, int x, int y) {
  __shared__ alignas(128) float tile[4][16];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    FENCE
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                 "r"((unsigned)sizeof tile) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(MAP), "r"(bar), "r"(x), "r"(y) : "memory");
  }
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar) : "memory");
  out[threadIdx.x] = tile[threadIdx.x / 16][threadIdx.x % 16];
}`

// mapKinds lists the ways to pass a tensor map to a kernel.
var mapKinds = map[string]*strings.Replacer{
	"first argument": strings.NewReplacer("PARAMETER", "const __grid_constant__ Map map", "MAP", "&map", "FENCE", ""),
	"second argument": strings.NewReplacer("PARAMETER", "int zero, const __grid_constant__ Map map", "MAP", "&map",
		"FENCE", ""),
	"memory": strings.NewReplacer("PARAMETER", "const Map *map", "MAP", "map", "FENCE",
		`asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");`),
}

// A map that a GPU rejects breaks its context, so each way runs in a separate process.
func TestTensorMap(t *testing.T) {
	for kind := range mapKinds {
		t.Run(kind, func(t *testing.T) { child(t, "TestTensorMapChild", "CPRUN_TEST_MAP="+kind) })
	}
}

func TestTensorMapChild(t *testing.T) {
	asChild(t)
	d := device(t)
	if d.Arch < 90 {
		t.Skip("TMA begins at sm_90")
	}
	s := stream(t, d, "tma")
	kind := os.Getenv("CPRUN_TEST_MAP")
	f := must.Have(compile(t, d, mapKinds[kind].Replace(fetchSource)).Function("fetch", 0))
	const rows, cols, x0, y0 = 8, 32, 20, 6
	src := make([]float32, rows*cols)
	for i := range src {
		src[i] = float32(i + 1)
	}
	in, out := put(t, s, src), must.Have(d.Alloc(4*64))
	m := must.Have(d.TensorMap(
		Tiled{Type: tensor.F32, Addr: in.addr, Shape: []int{cols, rows}, Strides: []int64{4 * cols}, Box: []int{16, 4}},
	))
	args := new(Args)
	switch kind {
	case "memory":
		args.Addr(put(t, s, m[:]).addr)
	case "second argument":
		args.Int(0).Bytes(m[:], 64)
	default:
		args.Bytes(m[:], 64)
	}
	s.Launch(f, Launch{Grid: Dim{X: 1}, Block: Dim{X: 64}}, args.Addr(out.addr).Int(x0).Int(y0))
	for i, got := range get[float32](t, s, out.addr, 64) {
		x, y, want := x0+i%16, y0+i/16, float32(0)
		if x < cols && y < rows {
			want = src[y*cols+x]
		}
		if got != want {
			t.Errorf("element (%d, %d) is %v, want %v", y, x, got, want)
		}
	}
	if _, err := d.TensorMap(Tiled{Type: tensor.F32, Addr: in.addr + 4, Shape: []int{cols, rows},
		Strides: []int64{4 * cols}, Box: []int{16, 4}}); err == nil {
		t.Error("a tensor map of an address that is not aligned")
	}
}
