// Gated activations, y = act(gate) * up, gates, y = x * sigmoid(gate), and their backward passes.
#include "glu.cuh"

// The elements of a block: each thread has VECTORS of L, a block apart.
constexpr int VECTORS = 4, VECTORS_BACKWARD = 2;

template <class T, class ACT> __device__ __forceinline__ void glu(T* y, const T* gate, const T* up, long long n) {
  constexpr int L = LANES<T>;
  long long at = ((long long)blockIdx.x * VECTORS * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
  Vec<T> g[VECTORS], u[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (at + i * step + L <= n) g[i] = stream(gate + at + i * step), u[i] = stream(up + at + i * step);
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (at + i * step + L > n) continue;
    float gs[L], us[L];
    g[i].get(gs), u[i].get(us);
#pragma unroll
    for (int k = 0; k < L; k++) gs[k] = ACT::at(gs[k]).value * ACT::up(us[k]).value;
    g[i].set(gs);
    put(y + at + i * step, g[i]);
  }
}

template <class T, class ACT> __device__ __forceinline__ void glu_backward(T* dgate, T* dup, const T* dy,
    const T* gate, const T* up, long long n) {
  constexpr int L = LANES<T>;
  long long at = ((long long)blockIdx.x * VECTORS_BACKWARD * blockDim.x + threadIdx.x) * L,
      step = blockDim.x * L;
  Vec<T> d[VECTORS_BACKWARD], g[VECTORS_BACKWARD], u[VECTORS_BACKWARD];
#pragma unroll
  for (int i = 0; i < VECTORS_BACKWARD; i++) {
    if (at + i * step + L > n) continue;
    d[i] = stream(dy + at + i * step), g[i] = stream(gate + at + i * step), u[i] = stream(up + at + i * step);
  }
#pragma unroll
  for (int i = 0; i < VECTORS_BACKWARD; i++) {
    if (at + i * step + L > n) continue;
    float ds[L], gs[L], us[L];
    d[i].get(ds), g[i].get(gs), u[i].get(us);
    gradient<ACT>(ds, gs, us);
    g[i].set(gs), u[i].set(us);
    put(dgate + at + i * step, g[i]), put(dup + at + i * step, u[i]);
  }
}

// The kernels process vectors of elements. The kernels _any process single elements, for any alignment
// and for the remainder.
#define GLU(NAME, T, ACT)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) NAME##T(T##_t* y, const T##_t* gate, const T##_t* up,     \
      long long n) {                                                                                          \
    glu<T##_t, ACT<T##_t>>(y, gate, up, n);                                                                   \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) NAME##backward_##T(T##_t* dgate, T##_t* dup,              \
      const T##_t* dy, const T##_t* gate, const T##_t* up, long long n) {                                     \
    glu_backward<T##_t, ACT<T##_t>>(dgate, dup, dy, gate, up, n);                                             \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) NAME##any_##T(T##_t* y, const T##_t* gate,                \
      const T##_t* up, long long n) {                                                                         \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                                           \
    if (i >= n) return;                                                                                       \
    y[i] = from_float<T##_t>(ACT<T##_t>::at(to_float(gate[i])).value * ACT<T##_t>::up(to_float(up[i])).value);\
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) NAME##backward_any_##T(T##_t* dgate, T##_t* dup,          \
      const T##_t* dy, const T##_t* gate, const T##_t* up, long long n) {                                     \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                                           \
    if (i >= n) return;                                                                                       \
    float d[1] = {to_float(dy[i])}, g[1] = {to_float(gate[i])}, u[1] = {to_float(up[i])};                     \
    gradient<ACT<T##_t>>(d, g, u);                                                                            \
    dgate[i] = from_float<T##_t>(g[0]), dup[i] = from_float<T##_t>(u[0]);                                     \
  }

// gate_rows has a warp for each row. The gate is each element's, or one for all of them.
template <class T, int L> __device__ __forceinline__ void gate_rows(T* y, const T* x, const T* gate, int rows, int n,
    int each) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  long long at = (long long)row * n;
  float one = sigmoid<T>(to_float(gate[each ? at : row])).up;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float v[L], g[L];
    load(v, x + at + c);
    if (each) load(g, gate + at + c);
#pragma unroll
    for (int i = 0; i < L; i++) v[i] *= each ? sigmoid<T>(g[i]).up : one;
    store(y + at + c, v);
  }
}

// gate_rows_backward works in place: a thread loads its elements before it stores results.
template <class T, int L> __device__ __forceinline__ void gate_rows_backward(T* dx, const T* dy, const T* x, T* dgate,
    const T* gate, int rows, int n, int each) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  long long at = (long long)row * n;
  Sigmoid s = {};
  if (!each) s = sigmoid<T>(to_float(gate[row]));
  float sum = 0;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float d[L], v[L], g[L];
    load(d, dy + at + c), load(v, x + at + c);
    if (each) load(g, gate + at + c);
#pragma unroll
    for (int i = 0; i < L; i++) {
      if (each) s = sigmoid<T>(g[i]);
      g[i] = d[i] * v[i] * s.up * s.down;
      sum += g[i];
      d[i] *= s.up;
    }
    store(dx + at + c, d);
    if (each) store(dgate + at + c, g);
  }
  sum = warp_sum(sum);
  if (!each && threadIdx.x == 0) dgate[row] = from_float<T>(sum);
}

#define GATES(NAME, T, L)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) gate_##NAME##T(T##_t* y, const T##_t* x,                  \
      const T##_t* gate, int rows, int n, int each) {                                                         \
    gate_rows<T##_t, L>(y, x, gate, rows, n, each);                                                           \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) gate_backward_##NAME##T(T##_t* dx, const T##_t* dy,       \
      const T##_t* x, T##_t* dgate, const T##_t* gate, int rows, int n, int each) {                           \
    gate_rows_backward<T##_t, L>(dx, dy, x, dgate, gate, rows, n, each);                                      \
  }

using fp32_t = float;
#define GLUS(T)            \
  GATES(, T, LANES<T##_t>) \
  GATES(any_, T, 1)        \
  GLU(swiglu_, T, SiLU)    \
  GLU(geglu_, T, GELU)     \
  GLU(clamped_, T, Clamped)

GLUS(bf16)
GLUS(fp16)
GLUS(fp32)
