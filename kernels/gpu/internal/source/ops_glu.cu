// Gated activations, y = act(gate) * up, and their backward passes.
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

using fp32_t = float;
#define GLUS(T)          \
  GLU(swiglu_, T, SiLU) \
  GLU(geglu_, T, GELU)  \
  GLU(clamped_, T, Clamped)

GLUS(bf16)
GLUS(fp16)
GLUS(fp32)
