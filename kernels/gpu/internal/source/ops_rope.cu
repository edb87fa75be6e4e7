// The norm of q and k over each head, RoPE in the layout of halves, and the backward pass of both
// in one kernel.
//
// A head takes a group of lanes: the smallest power of two that holds its pairs of vectors. Lane j has
// vector j of the first half and vector j of the second. A group processes several heads of a token
// at once, as one item of work, and loads the token's angles once for all of them. If heads rotate in part, the elements
// after the rotated ones form pairs as well, of their halves, with angle 0.
#include "ops.cuh"

// Rope describes the groups, and the position of a thread.
struct Rope {
  int tokens, heads, half, turned, lanes; // pairs of a head, those that rotate, lanes of a head

  __device__ __forceinline__ int lane() const { return threadIdx.x & (lanes - 1); }
  // a and b are the elements of pair c in a head.
  __device__ __forceinline__ int a(int c) const { return c < turned ? c : c + turned; }
  __device__ __forceinline__ int b(int c) const { return c < turned ? c + turned : c + half; }

  template <int L>
  __device__ __forceinline__ void angles(float (&co)[L], float (&si)[L], const float* cos, const float* sin,
      int token, int c) const {
    long long at = (long long)token * turned + c;
    if (c < turned) {
      cached(co, cos + at), cached(si, sin + at);
      return;
    }
#pragma unroll
    for (int k = 0; k < L; k++) co[k] = 1, si[k] = 0;
  }
  __device__ __forceinline__ void angle(float& co, float& si, const float* cos, const float* sin,
      long long token, int c) const {
    co = c < turned ? cos[token * turned + c] : 1, si = c < turned ? sin[token * turned + c] : 0;
  }
};

// norm_rope without NORM (w is NULL) only rotates. y may be x. HEADS is the number of heads in an item.
template <class T, bool NORM>
__device__ __forceinline__ void norm_rope(T* y, float* inv, const T* x, const float* w, const float* cos,
    const float* sin, Rope r, float eps) {
  constexpr int L = LANES<T>, HEADS = 4;
  int items = (r.heads + HEADS - 1) / HEADS, c = r.lane() * L;
  unsigned item = (blockIdx.x * blockDim.x + threadIdx.x) / r.lanes;
  int token = item / items, head = item % items * HEADS;
  bool mine = token < r.tokens && c < r.half; // the others add 0 to sums
  int a = r.a(c), b = r.b(c);
  long long at = ((long long)token * r.heads + head) * 2 * r.half;
  Vec<T> x1[HEADS], x2[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    x1[h].raw = x2[h].raw = make_uint4(0, 0, 0, 0);
    if (!mine || head + h >= r.heads) continue;
    x1[h] = stream(x + at + h * 2 * r.half + a), x2[h] = stream(x + at + h * 2 * r.half + b);
  }
  float scale[HEADS];
  if constexpr (NORM) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float xa[L], xb[L], squares = 0;
      x1[h].get(xa), x2[h].get(xb);
#pragma unroll
      for (int k = 0; k < L; k++) squares += xa[k] * xa[k] + xb[k] * xb[k];
      scale[h] = 1.0f / sqrtf(group_sum(squares, r.lanes) / (2 * r.half) + eps);
      if (mine && r.lane() == 0 && head + h < r.heads) inv[(long long)token * r.heads + head + h] = scale[h];
    }
  }
  if (!mine) return;
  float co[L], si[L], w1[L], w2[L];
  r.angles(co, si, cos, sin, token, c);
  if constexpr (NORM) cached(w1, w + a), cached(w2, w + b);
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (head + h >= r.heads) continue;
    float xa[L], xb[L];
    x1[h].get(xa), x2[h].get(xb);
#pragma unroll
    for (int k = 0; k < L; k++) {
      if constexpr (NORM) xa[k] *= scale[h] * w1[k], xb[k] *= scale[h] * w2[k];
      float turned = xa[k] * co[k] - xb[k] * si[k];
      xb[k] = xb[k] * co[k] + xa[k] * si[k];
      xa[k] = turned;
    }
    x1[h].set(xa), x2[h].set(xb);
    put(y + at + h * 2 * r.half + a, x1[h]), put(y + at + h * 2 * r.half + b, x2[h]);
  }
}

// norm_rope_backward rotates dy, of type D, back. With NORM, it also computes the gradient of the norm's
// input, as norm_backward does, and writes the block's sum of the gradient of w to its row of partial
// [blocks, 2 * half]. dx may be dy. Vectors are 16 bytes of D.
template <class T, class D, bool NORM>
__device__ __forceinline__ void norm_rope_backward(T* dx, float* partial, const D* dy, const T* x,
    const float* inv, const float* w, const float* cos, const float* sin, Rope r) {
  constexpr int L = LANES<D>, HEADS = 16 / L;
  __shared__ float shared[NORM ? 256 * 2 * L : 1];
  int items = (r.heads + HEADS - 1) / HEADS, c = r.lane() * L, groups = blockDim.x / r.lanes;
  int at1 = r.a(c), at2 = r.b(c);
  float w1[L] = {}, w2[L] = {}, sum1[L] = {}, sum2[L] = {};
  if constexpr (NORM) {
    if (c < r.half) cached(w1, w + at1), cached(w2, w + at2);
  }
  long long count = (long long)r.tokens * items;
  // All threads of a block do the same number of rounds, since sums over lanes need a full warp.
  for (long long first = (long long)blockIdx.x * groups; first < count; first += (long long)gridDim.x * groups) {
    unsigned item = first + threadIdx.x / r.lanes;
    int token = item / items, head = item % items * HEADS;
    bool mine = token < r.tokens && c < r.half;
    long long at = ((long long)token * r.heads + head) * 2 * r.half;
    Vec<D> d1[HEADS], d2[HEADS];
    float x1[HEADS][L] = {}, x2[HEADS][L] = {}, scale[HEADS] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      d1[h].raw = d2[h].raw = make_uint4(0, 0, 0, 0);
      if (!mine || head + h >= r.heads) continue;
      long long i = at + h * 2 * r.half;
      d1[h] = stream(dy + i + at1), d2[h] = stream(dy + i + at2);
      if constexpr (NORM) {
        load(x1[h], x + i + at1), load(x2[h], x + i + at2);
        scale[h] = inv[(long long)token * r.heads + head + h];
      }
    }
    float co[L] = {}, si[L] = {};
    if (mine) r.angles(co, si, cos, sin, token, c);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float a[L], b[L], dot = 0;
      d1[h].get(a), d2[h].get(b);
#pragma unroll
      for (int k = 0; k < L; k++) {
        float turned = a[k] * co[k] + b[k] * si[k];
        b[k] = b[k] * co[k] - a[k] * si[k];
        a[k] = turned;
      }
      if constexpr (NORM) {
#pragma unroll
        for (int k = 0; k < L; k++) {
          sum1[k] += a[k] * x1[h][k] * scale[h], sum2[k] += b[k] * x2[h][k] * scale[h];
          a[k] *= w1[k], b[k] *= w2[k];
          dot += a[k] * x1[h][k] + b[k] * x2[h][k];
        }
        float back = group_sum(dot, r.lanes) / (2 * r.half) * scale[h] * scale[h] * scale[h];
#pragma unroll
        for (int k = 0; k < L; k++) {
          a[k] = a[k] * scale[h] - x1[h][k] * back;
          b[k] = b[k] * scale[h] - x2[h][k] * back;
        }
      }
      if (!mine || head + h >= r.heads) continue;
      store(dx + at + h * 2 * r.half + at1, a), store(dx + at + h * 2 * r.half + at2, b);
    }
  }
  if constexpr (NORM) {
    float* own = shared + threadIdx.x / r.lanes * 2 * r.half;
#pragma unroll
    for (int k = 0; k < L; k++) {
      if (c < r.half) own[at1 + k] = sum1[k], own[at2 + k] = sum2[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * r.half; i += blockDim.x) {
      float sum = 0;
      for (int g = 0; g < groups; g++) sum += shared[g * 2 * r.half + i];
      partial[(long long)blockIdx.x * 2 * r.half + i] = sum;
    }
  }
}

// norm_rope_any does the same for any head dim and alignment, with one warp per head.
template <class T>
__device__ __forceinline__ void norm_rope_any(T* y, float* inv, const T* x, const float* w, const float* cos,
    const float* sin, Rope r, float eps) {
  long long head = (long long)blockIdx.x * blockDim.y + threadIdx.y, token = head / r.heads;
  if (token >= r.tokens) return;
  x += head * 2 * r.half, y += head * 2 * r.half;
  float scale = 1;
  if (w) {
    float squares = 0;
    for (int i = threadIdx.x; i < 2 * r.half; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    scale = 1.0f / sqrtf(warp_sum(squares) / (2 * r.half) + eps);
    if (threadIdx.x == 0) inv[head] = scale;
  }
  for (int i = threadIdx.x; i < r.half; i += 32) {
    int at1 = r.a(i), at2 = r.b(i);
    float a = to_float(x[at1]), b = to_float(x[at2]), co, si;
    r.angle(co, si, cos, sin, token, i);
    if (w) a *= scale * w[at1], b *= scale * w[at2];
    y[at1] = from_float<T>(a * co - b * si);
    y[at2] = from_float<T>(b * co + a * si);
  }
}

// norm_rope_backward_any has a row of partial for each warp, and sums there.
template <class T, class D>
__device__ __forceinline__ void norm_rope_backward_any(T* dx, float* partial, const D* dy, const T* x,
    const float* inv, const float* w, const float* cos, const float* sin, Rope r) {
  int n = 2 * r.half;
  partial += (long long)blockIdx.x * n;
  if (w) {
    for (int i = threadIdx.x; i < r.half; i += 32) partial[i] = partial[r.half + i] = 0;
  }
  for (long long head = blockIdx.x; head < (long long)r.tokens * r.heads; head += gridDim.x) {
    long long at = head * n, token = head / r.heads;
    float scale = w ? inv[head] : 1, dot = 0;
    if (w) {
      for (int i = threadIdx.x; i < r.half; i += 32) {
        int at1 = r.a(i), at2 = r.b(i);
        float a = to_float(dy[at + at1]), b = to_float(dy[at + at2]), co, si;
        r.angle(co, si, cos, sin, token, i);
        float ga = (a * co + b * si) * to_float(x[at + at1]), gb = (b * co - a * si) * to_float(x[at + at2]);
        partial[at1] += ga * scale, partial[at2] += gb * scale;
        dot += ga * w[at1] + gb * w[at2];
      }
      dot = warp_sum(dot);
    }
    float back = dot / n * scale * scale * scale;
    for (int i = threadIdx.x; i < r.half; i += 32) {
      int at1 = r.a(i), at2 = r.b(i);
      float a = to_float(dy[at + at1]), b = to_float(dy[at + at2]), co, si;
      r.angle(co, si, cos, sin, token, i);
      float ga = a * co + b * si, gb = b * co - a * si;
      if (w) {
        ga = ga * w[at1] * scale - to_float(x[at + at1]) * back;
        gb = gb * w[at2] * scale - to_float(x[at + at2]) * back;
      }
      dx[at + at1] = from_float<T>(ga), dx[at + at2] = from_float<T>(gb);
    }
  }
}

#define ROPE(NAME, T)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) rope_##NAME(T* y, const T* x, const float* cos,          \
      const float* sin, Rope r) {                                                                            \
    norm_rope<T, false>(y, nullptr, x, nullptr, cos, sin, r, 0);                                             \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(256)                                                          \
      norm_rope_##NAME(T* y, float* inv, const T* x, const float* w, const float* cos, const float* sin,     \
          Rope r, float eps) {                                                                               \
    norm_rope<T, true>(y, inv, x, w, cos, sin, r, eps);                                                      \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(256)                                                          \
      norm_rope_any_##NAME(T* y, float* inv, const T* x, const float* w, const float* cos, const float* sin, \
          Rope r, float eps) {                                                                               \
    norm_rope_any<T>(y, inv, x, w, cos, sin, r, eps);                                                        \
  }

// D names the type of dy: the type of dx, or float32.
#define ROPE_BACKWARD(NAME, T, D)                                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                   \
      rope_backward_##NAME(T* dx, const D* dy, const float* cos, const float* sin, Rope r) {          \
    norm_rope_backward<T, D, false>(dx, nullptr, dy, nullptr, nullptr, nullptr, cos, sin, r);         \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                   \
      norm_rope_backward_##NAME(T* dx, float* partial, const D* dy, const T* x, const float* inv,     \
          const float* w, const float* cos, const float* sin, Rope r) {                               \
    norm_rope_backward<T, D, true>(dx, partial, dy, x, inv, w, cos, sin, r);                          \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(32)                                                    \
      norm_rope_backward_any_##NAME(T* dx, float* partial, const D* dy, const T* x, const float* inv, \
          const float* w, const float* cos, const float* sin, Rope r) {                               \
    norm_rope_backward_any<T, D>(dx, partial, dy, x, inv, w, cos, sin, r);                            \
  }

ROPE(bf16, bf16_t)
ROPE(fp16, fp16_t)
ROPE(fp32, float)
ROPE_BACKWARD(bf16_bf16, bf16_t, bf16_t)
ROPE_BACKWARD(bf16_fp32, bf16_t, float)
ROPE_BACKWARD(fp16_fp16, fp16_t, fp16_t)
ROPE_BACKWARD(fp16_fp32, fp16_t, float)
ROPE_BACKWARD(fp32_fp32, float, float)
