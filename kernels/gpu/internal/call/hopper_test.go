//go:build cuda

package call

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// A tensorMap has the layout of TensorMap in testdata/host, since the driver's format is secret.
type tensorMap struct {
	At          uint64
	Extents     [4]uint64 // dim, seq, heads, batch
	Strides     [3]uint64 // of seq, heads and batch, in bytes
	Box         [2]uint64 // elements, rows
	Size        uint64    // of an element, in bytes
	Permutation uint64    // 128, or 0
	_           [4]uint64
}

// mapOf returns the map of a view, for boxes of 128 bytes by rows rows.
func (h *host) mapOf(v View, rows int) tensorMap {
	size := v.DType().Size()
	m := tensorMap{At: v.Addr(), Box: [2]uint64{uint64(128 / size), uint64(rows)}, Size: uint64(size), Permutation: 128}
	for i, a := range []tensor.Axis{tensor.Dim, tensor.Seq, tensor.Heads, tensor.Batch} {
		m.Extents[i] = uint64(v.Len(a))
		if i > 0 {
			m.Strides[i-1] = uint64(v.Stride(a)) * uint64(size)
		}
	}
	h.move(&m.At)
	return m
}

// products holds a kernel: the first warpgroup multiplies, and the second loads the matrices.
const products = `
#include "hopper.cuh"
struct Product { TensorMap a, b; float* c; int head, batch; };
constexpr int AROWS = TURN_A ? DEPTH : 64, ACOLS = TURN_A ? 64 : DEPTH;
constexpr int BROWS = TURN_B ? DEPTH : WIDTH, BCOLS = TURN_B ? WIDTH : DEPTH;
using A = Panels<AROWS, ACOLS>;
using B = Panels<BROWS, BCOLS>;

template <class P> void bring(unsigned to, const TensorMap& map, unsigned barrier, const Product& p) {
  for (int i = 0; i < P::COUNT; i++) {
    copy_box(to + i * P::PANEL, map, barrier, 64 * i, 0, p.head, p.batch);
  }
}

extern "C" void products(Product p) {
  extern __shared__ char shared[];
  const unsigned a = smem_address(shared), b = a + A::BYTES, full = b + B::BYTES, empty = full + 8;
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init(empty, 4);
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    for (int i = 0; i < 2 && threadIdx.x == 128; i++) {
      barrier_wait(empty, i & 1 ^ 1);
      barrier_expect(full, A::BYTES + B::BYTES);
      bring<A>(a, p.a, full, p);
      bring<B>(b, p.b, full, p);
    }
    return;
  }
  float c[WIDTH / 2];
  for (int i = 0; i < 2; i++) {
    barrier_wait(full, i);
    wg_begin();
    for (int k = 0; k < DEPTH; k += 16) {
      const unsigned long long right = TURN_B ? B::across(b, k) : B::along(b, 0, k);
#if REGISTERS
      const int lane = threadIdx.x % 32;
      unsigned left[4];
      ldmatrix(left, a + A::offset(threadIdx.x / 32 * 16 + lane % 16, k + lane / 16 * 8));
      wg_multiply<TYPE, TURN_B>(c, left, right, i || k);
#else
      wg_multiply<TYPE, TURN_A, TURN_B>(c, TURN_A ? A::across(a, k) : A::along(a, 0, k), right, i || k);
#endif
    }
    wg_commit();
    wg_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(empty);
    }
  }
  for (int i = 0; i < WIDTH / 2; i++) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    p.c[row * WIDTH + col] = c[i];
  }
}
`

// A product is one product of the kernel, with the wanted result: twice A B.
type product struct {
	n, k                   int
	bfloat, transA, transB bool
	registers              bool
}

func (p product) String() string {
	return fmt.Sprintf("64 by %d over %d, bfloat %t, turned round %t and %t, A in registers %t", p.n, p.k, p.bfloat,
		p.transA, p.transB, p.registers)
}

// TestProductsOnHost compares the host's copies and products of Hopper with plain sums.
func TestProductsOnHost(t *testing.T) {
	h := newHost(t)
	for i, p := range []product{
		{n: 64, k: 64}, {n: 128, k: 128, transB: true}, {n: 96, k: 96, bfloat: true}, {n: 96, k: 32, transB: true},
		{n: 24, k: 128, transA: true, bfloat: true}, {n: 256, k: 64, bfloat: true, transB: true},
		{n: 64, k: 128, transA: true}, {n: 176, k: 48, transA: true, transB: true, bfloat: true},
		{n: 128, k: 64, registers: true}, {n: 192, k: 128, registers: true, transB: true, bfloat: true},
	} {
		t.Run(p.String(), func(t *testing.T) {
			h.t, h.used = t, 0
			for range 2 { // in both orders of threads
				p.run(h, fmt.Sprintf("products_%d", i))
			}
		})
	}
}

func (p product) run(h *host, name string) {
	kind, dtype := "fp16_t", tensor.F16
	if p.bfloat {
		kind, dtype = "bf16_t", tensor.BF16
	}
	_, err := h.compiler.text(name, []byte(products), "TYPE="+kind, fmt.Sprint("WIDTH=", p.n), fmt.Sprint("DEPTH=", p.k),
		fmt.Sprint("TURN_A=", p.transA), fmt.Sprint("TURN_B=", p.transB), fmt.Sprint("REGISTERS=", p.registers))
	ok(h.t, err)
	// The last rows and columns of the matrices are outside of the tensors.
	const heads, batch = 3, 2
	left, right := [2]int{64, p.k}, [2]int{p.n, p.k}
	if p.transA {
		left = [2]int{p.k, 64}
	}
	if p.transB {
		right = [2]int{p.k, p.n}
	}
	draw := func(seed uint64, of [2]int) View {
		m, err := h.alloc(int64(2 * batch * heads * of[0] * of[1]))
		ok(h.t, err)
		rng := rand.New(rand.NewPCG(seed, 0))
		v := tensor.Dense(m, dtype, 0, [4]int{batch, of[0] - 5, heads, of[1] - 8})
		each(v, func(float32, [4]int) float32 { return float32(rng.IntN(9) - 4) })
		return v
	}
	a, b := draw(1, left), draw(2, right)
	m, err := h.alloc(int64(4 * 64 * p.n))
	ok(h.t, err)
	arg := struct {
		a, b        tensorMap
		c           uint64
		head, batch int32
	}{h.mapOf(a, left[0]), h.mapOf(b, right[0]), uint64(uintptr(m.Ptr())), 2, 1}
	h.move(&arg.c)
	panel := func(of [2]int) int { return (of[1] + 63) / 64 * of[0] * 128 }
	ok(h.t, h.start(name, "products", [3]int{1, 1, 1}, [2]int{256, 1}, panel(left)+panel(right)+16, argumentsOf(&arg)))

	at := func(v View, row, col int) float64 {
		if row >= v.Len(tensor.Seq) || col >= v.Len(tensor.Dim) {
			return 0
		}
		return float64(value(v, [4]int{1, row, 2, col}))
	}
	got := tensor.Data[float32](tensor.Dense(m, tensor.F32, 0, [4]int{1, 1, 64, p.n}))
	for i := range 64 {
		for j := range p.n {
			want := 0.0
			for k := range p.k {
				x, y := [2]int{i, k}, [2]int{j, k}
				if p.transA {
					x = [2]int{k, i}
				}
				if p.transB {
					y = [2]int{k, j}
				}
				want += 2 * at(a, x[0], x[1]) * at(b, y[0], y[1])
			}
			if float64(got[i*p.n+j]) != want {
				h.t.Fatalf("element %d, %d is %v, want %v", i, j, got[i*p.n+j], want)
			}
		}
	}
}
