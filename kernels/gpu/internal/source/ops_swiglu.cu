// SwiGLU, y = silu(gate) * up, and its backward pass.
#include "ops.cuh"

// Sigmoid holds sigmoid(x) in up and 1 - sigmoid(x) in down, both in full precision and without
// overflow: it takes the exponential of -|x|.
struct Sigmoid {
  float up, down;
};

template <class T> __device__ __forceinline__ Sigmoid sigmoid(float x) {
  float e, r;
  if constexpr (sizeof(T) == 4) {
    e = expf(-fabsf(x)), r = 1.0f / (1.0f + e);
  } else {
    e = exp2_fast(-1.4426950408889634f * fabsf(x)), r = __fdividef(1.0f, 1.0f + e);
  }
  return x < 0 ? Sigmoid{e * r, r} : Sigmoid{r, e * r};
}

// The elements of a block: each thread has VECTORS of L, a block apart.
constexpr int VECTORS = 4, VECTORS_BACKWARD = 2;

template <class T> __device__ __forceinline__ void swiglu(T* y, const T* gate, const T* up, long long n) {
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
    for (int k = 0; k < L; k++) gs[k] = gs[k] * sigmoid<T>(gs[k]).up * us[k];
    g[i].set(gs);
    put(y + at + i * step, g[i]);
  }
}

// gradient sets gate and up to their gradients.
template <class T, int L> __device__ __forceinline__ void gradient(const float (&dy)[L], float (&gate)[L],
    float (&up)[L]) {
#pragma unroll
  for (int k = 0; k < L; k++) {
    Sigmoid s = sigmoid<T>(gate[k]);
    float dgate = dy[k] * up[k] * s.up * (1.0f + gate[k] * s.down);
    up[k] = dy[k] * gate[k] * s.up;
    gate[k] = dgate;
  }
}

template <class T> __device__ __forceinline__ void swiglu_backward(T* dgate, T* dup, const T* dy,
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
    gradient<T>(ds, gs, us);
    g[i].set(gs), u[i].set(us);
    put(dgate + at + i * step, g[i]), put(dup + at + i * step, u[i]);
  }
}

// The kernels process vectors of elements. The kernels _any process single elements, for any alignment
// and for the remainder.
#define SWIGLU(NAME, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) swiglu_##NAME(T* y, const T* gate, const T* up,        \
      long long n) {                                                                                       \
    swiglu<T>(y, gate, up, n);                                                                             \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                        \
      swiglu_backward_##NAME(T* dgate, T* dup, const T* dy, const T* gate, const T* up, long long n) {     \
    swiglu_backward<T>(dgate, dup, dy, gate, up, n);                                                       \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                        \
      swiglu_any_##NAME(T* y, const T* gate, const T* up, long long n) {                                   \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                                        \
    if (i >= n) return;                                                                                    \
    float g = to_float(gate[i]);                                                                           \
    y[i] = from_float<T>(g * sigmoid<T>(g).up * to_float(up[i]));                                          \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                        \
      swiglu_backward_any_##NAME(T* dgate, T* dup, const T* dy, const T* gate, const T* up, long long n) { \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                                        \
    if (i >= n) return;                                                                                    \
    float d[1] = {to_float(dy[i])}, g[1] = {to_float(gate[i])}, u[1] = {to_float(up[i])};                  \
    gradient<T>(d, g, u);                                                                                  \
    dgate[i] = from_float<T>(g[0]), dup[i] = from_float<T>(u[0]);                                          \
  }

SWIGLU(bf16, bf16_t)
SWIGLU(fp16, fp16_t)
SWIGLU(fp32, float)
