// The activations of gated MLPs.
#pragma once
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

// A Gate has the factor of up and its derivative, which most activations leave as it is.
struct Gate {
  __device__ __forceinline__ static Curve up(float x) { return {x, 1.0f}; }
};

template <class T> struct SiLU : Gate {
  __device__ __forceinline__ static Curve at(float x) {
    Sigmoid s = sigmoid<T>(x);
    return {x * s.up, s.up * (1.0f + x * s.down)};
  }
};

// GELU is x * sigmoid(2u) with u = sqrt(2/pi) * (x + CUBIC * x^3), since 1 + tanh(u) = 2 sigmoid(2u). Beyond the bound
// the sigmoid is 0 or 1; powers of x stay finite.
template <class T> struct GELU : Gate {
  __device__ __forceinline__ static Curve at(float x) {
    constexpr float CUBIC = 0.044715f, TWICE = 1.5957691216057308f;
    float near = fminf(fmaxf(x, -64.0f), 64.0f), square = near * near;
    Sigmoid s = sigmoid<T>(TWICE * near * (1.0f + CUBIC * square));
    return {x * s.up, s.up * (1.0f + near * s.down * TWICE * (1.0f + 3 * CUBIC * square))};
  }
};

// Clamped is min(x, LIMIT) * sigmoid(STEEP * min(x, LIMIT)), and its factor of up is clip(up, -LIMIT, LIMIT) + 1. There
// is no gradient beyond a limit, and one at it. NaN stays NaN.
template <class T> struct Clamped {
  static constexpr float LIMIT = 7.0f, STEEP = 1.702f;

  __device__ __forceinline__ static Curve at(float x) {
    bool beyond = x > LIMIT;
    x = beyond ? LIMIT : x;
    Sigmoid s = sigmoid<T>(STEEP * x);
    return {x * s.up, beyond ? 0.0f : s.up * (1.0f + STEEP * x * s.down)};
  }
  __device__ __forceinline__ static Curve up(float x) {
    if (fabsf(x) > LIMIT) return {copysignf(LIMIT, x) + 1.0f, 0.0f};
    return {x + 1.0f, 1.0f};
  }
};

// gradient sets gate and up to their gradients.
template <class ACT, int L> __device__ __forceinline__ void gradient(const float (&dy)[L], float (&gate)[L],
    float (&up)[L]) {
#pragma unroll
  for (int k = 0; k < L; k++) {
    Curve c = ACT::at(gate[k]), u = ACT::up(up[k]);
    gate[k] = dy[k] * u.value * c.slope;
    up[k] = dy[k] * c.value * u.slope;
  }
}
