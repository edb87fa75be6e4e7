// SwiGLU and GeGLU, y = act(gate) * up with silu or gelu (by tanh), and their backward passes.
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

// A Curve is an activation and its derivative.
struct Curve {
  float value, slope;
};

template <class T> struct SiLU {
  __device__ __forceinline__ static Curve at(float x) {
    Sigmoid s = sigmoid<T>(x);
    return {x * s.up, s.up * (1.0f + x * s.down)};
  }
};

// GELU is x * sigmoid(2u) with u = sqrt(2/pi) * (x + CUBIC * x^3), since 1 + tanh(u) = 2 sigmoid(2u). Beyond the bound
// the sigmoid is 0 or 1; powers of x stay finite.
template <class T> struct GELU {
  __device__ __forceinline__ static Curve at(float x) {
    constexpr float CUBIC = 0.044715f, TWICE = 1.5957691216057308f;
    float near = fminf(fmaxf(x, -64.0f), 64.0f), square = near * near;
    Sigmoid s = sigmoid<T>(TWICE * near * (1.0f + CUBIC * square));
    return {x * s.up, s.up * (1.0f + near * s.down * TWICE * (1.0f + 3 * CUBIC * square))};
  }
};

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
    for (int k = 0; k < L; k++) gs[k] = ACT::at(gs[k]).value * us[k];
    g[i].set(gs);
    put(y + at + i * step, g[i]);
  }
}

// gradient sets gate and up to their gradients.
template <class ACT, int L> __device__ __forceinline__ void gradient(const float (&dy)[L], float (&gate)[L],
    float (&up)[L]) {
#pragma unroll
  for (int k = 0; k < L; k++) {
    Curve c = ACT::at(gate[k]);
    gate[k] = dy[k] * up[k] * c.slope;
    up[k] = dy[k] * c.value;
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
    y[i] = from_float<T##_t>(ACT<T##_t>::at(to_float(gate[i])).value * to_float(up[i]));                      \
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
  GLU(geglu_, T, GELU)

GLUS(bf16)
GLUS(fp16)
GLUS(fp32)
