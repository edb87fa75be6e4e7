// RMSNorm over rows of n elements: y = x * inv * w, inv = 1 / sqrt(mean(x^2) + eps), and its
// backward pass. Between its two uses, a row stays in registers in the form of memory: V vectors of
// 16 bytes per thread.
#include "ops.cuh"

// norm normalises a or, with ADD, sum = a + b, rounded to T. A row belongs to one warp, or to one block if blockDim.y
// is 1: blockDim.x threads, blockDim.y rows.
template <class T, int V, bool ADD>
__device__ __forceinline__ void norm(T* y, float* inv, T* sum, const T* a, const T* b, const float* w,
    int rows, int n, float eps) {
  constexpr int L = LANES<T>;
  __shared__ float scratch[32];
  int row = blockIdx.x * blockDim.y + threadIdx.y, vecs = n / L;
  if (row >= rows) return; // an entire warp, for which no other waits
  long long at = (long long)row * n;
  Vec<T> x[V], add[ADD ? V : 1];
#pragma unroll
  for (int i = 0; i < V; i++) {
    int c = threadIdx.x + i * blockDim.x;
    if (c >= vecs) continue;
    x[i] = stream(a + at + c * L);
    if constexpr (ADD) add[i] = stream(b + at + c * L);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
    int c = threadIdx.x + i * blockDim.x;
    if (c >= vecs) continue;
    float xs[L];
    if constexpr (ADD) {
      float bs[L];
      x[i].get(xs), add[i].get(bs);
#pragma unroll
      for (int k = 0; k < L; k++) xs[k] += bs[k];
      x[i].set(xs);
      put(sum + at + c * L, x[i]);
    }
    x[i].get(xs);
#pragma unroll
    for (int k = 0; k < L; k++) squares += xs[k] * xs[k];
  }
  float scale = 1.0f / sqrtf(block_sum(squares, scratch) / n + eps);
  if (threadIdx.x == 0) inv[row] = scale;
#pragma unroll
  for (int i = 0; i < V; i++) {
    int c = threadIdx.x + i * blockDim.x;
    if (c < vecs) {
      float xs[L], ws[L];
      cached(ws, w + c * L);
      x[i].get(xs);
#pragma unroll
      for (int k = 0; k < L; k++) xs[k] = xs[k] * scale * ws[k];
      x[i].set(xs);
      put(y + at + c * L, x[i]);
    }
  }
}

// norm_any does the same for any n and alignment, with one block per row. A thread reads back only its own writes.
template <class T, bool ADD>
__device__ __forceinline__ void norm_any(T* y, float* inv, T* sum, const T* a, const T* b, const float* w,
    int n, float eps) {
  __shared__ float scratch[32];
  long long at = (long long)blockIdx.x * n;
  float squares = 0;
  for (int c = threadIdx.x; c < n; c += blockDim.x) {
    float x = to_float(a[at + c]);
    if constexpr (ADD) {
      sum[at + c] = from_float<T>(x + to_float(b[at + c]));
      x = to_float(sum[at + c]);
    }
    squares += x * x;
  }
  float scale = 1.0f / sqrtf(block_sum(squares, scratch) / n + eps);
  if (threadIdx.x == 0) inv[blockIdx.x] = scale;
  const T* x = ADD ? sum : a;
  for (int c = threadIdx.x; c < n; c += blockDim.x) y[at + c] = from_float<T>(to_float(x[at + c]) * scale * w[c]);
}

#define NORM(NAME, T, V)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                        \
      rmsnorm_##NAME##_##V(T* y, float* inv, const T* x, const float* w, int rows, int n, float eps) {     \
    norm<T, V, false>(y, inv, nullptr, x, nullptr, w, rows, n, eps);                                       \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                        \
      add_rmsnorm_##NAME##_##V(T* y, float* inv, T* sum, const T* a, const T* b, const float* w, int rows, \
          int n, float eps) {                                                                              \
    norm<T, V, true>(y, inv, sum, a, b, w, rows, n, eps);                                                  \
  }

// NormRow holds a row's inputs of the backward pass.
template <class T, int V> struct NormRow {
  Vec<T> dy[V], x[V], dx[V];
  float inv;

  __device__ __forceinline__ void load(const T* dys, const T* xs, const T* dxs, const float* invs,
      long long row, int n, bool accumulate) {
    inv = invs[row];
#pragma unroll
    for (int i = 0; i < V; i++) {
      int c = (threadIdx.x + i * blockDim.x) * LANES<T>;
      dy[i].raw = x[i].raw = dx[i].raw = make_uint4(0, 0, 0, 0);
      if (c >= n) continue;
      dy[i] = stream(dys + row * n + c), x[i] = stream(xs + row * n + c);
      if (accumulate) dx[i] = stream(dxs + row * n + c);
    }
  }
};

// norm_backward: with g = dy * w, dx = inv * g - x * inv^3 * mean(g * x). With accumulate, it adds that to
// dx. A block sums the gradient of w over its rows in registers, and writes it to its row of partial
// [blocks, n]. If registers allow, it loads the next row during the sums of the
// current one.
template <class T, int V>
__device__ __forceinline__ void norm_backward(T* dx, float* partial, const T* dy, const T* x,
    const float* inv, const float* w, int rows, int n, int accumulate) {
  constexpr int L = LANES<T>;
  constexpr bool AHEAD = V <= 2;
  __shared__ float scratch[2][32];
  float sums[V][L] = {};
  NormRow<T, V> now, next;
  if (AHEAD && blockIdx.x < rows) next.load(dy, x, dx, inv, blockIdx.x, n, accumulate);
  int turn = 0;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    if constexpr (AHEAD) {
      now = next;
      if (row + gridDim.x < rows) next.load(dy, x, dx, inv, row + gridDim.x, n, accumulate);
    } else {
      now.load(dy, x, dx, inv, row, n, accumulate);
    }
    float dot = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
      int c = (threadIdx.x + i * blockDim.x) * L;
      if (c >= n) continue;
      float dys[L], xs[L], ws[L];
      now.dy[i].get(dys), now.x[i].get(xs), cached(ws, w + c);
#pragma unroll
      for (int k = 0; k < L; k++) {
        float product = dys[k] * xs[k];
        dot += product * ws[k];
        sums[i][k] += product * now.inv;
      }
    }
    float back = block_sum(dot, scratch[turn]) / n * now.inv * now.inv * now.inv;
#pragma unroll
    for (int i = 0; i < V; i++) {
      int c = (threadIdx.x + i * blockDim.x) * L;
      if (c >= n) continue;
      float dys[L], xs[L], ws[L], out[L];
      now.dy[i].get(dys), now.x[i].get(xs), now.dx[i].get(out), cached(ws, w + c);
#pragma unroll
      for (int k = 0; k < L; k++) {
        float d = dys[k] * ws[k] * now.inv - xs[k] * back;
        out[k] = accumulate ? out[k] + d : d;
      }
      now.dx[i].set(out);
      put(dx + row * n + c, now.dx[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++) {
    int c = (threadIdx.x + i * blockDim.x) * L;
    if (c >= n) continue;
    float4* to = (float4*)(partial + (long long)blockIdx.x * n + c);
#pragma unroll
    for (int k = 0; k < L; k += 4) to[k / 4] = make_float4(sums[i][k], sums[i][k + 1], sums[i][k + 2],
        sums[i][k + 3]);
  }
}

// norm_backward_any does the same for any n and alignment, and sums in memory.
template <class T>
__device__ __forceinline__ void norm_backward_any(T* dx, float* partial, const T* dy, const T* x,
    const float* inv, const float* w, int rows, int n, int accumulate) {
  __shared__ float scratch[2][32];
  partial += (long long)blockIdx.x * n;
  for (int c = threadIdx.x; c < n; c += blockDim.x) partial[c] = 0;
  int turn = 0;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    long long at = row * n;
    float scale = inv[row], dot = 0;
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
      float product = to_float(dy[at + c]) * to_float(x[at + c]);
      dot += product * w[c];
      partial[c] += product * scale;
    }
    float back = block_sum(dot, scratch[turn]) / n * scale * scale * scale;
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
      float d = to_float(dy[at + c]) * w[c] * scale - to_float(x[at + c]) * back;
      dx[at + c] = from_float<T>(accumulate ? to_float(dx[at + c]) + d : d);
    }
  }
}

#define NORM_BACKWARD(NAME, T, V, THREADS, BLOCKS)                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                       \
      rmsnorm_backward_##NAME##_##V(T* dx, float* partial, const T* dy, const T* x, const float* inv, \
          const float* w, int rows, int n, int accumulate) {                                          \
    norm_backward<T, V>(dx, partial, dy, x, inv, w, rows, n, accumulate);                             \
  }

#define NORMS(NAME, T)                                                                                    \
  NORM(NAME, T, 1) NORM(NAME, T, 2) NORM(NAME, T, 4) NORM(NAME, T, 8) NORM(NAME, T, 12) NORM(NAME, T, 16) \
  NORM_BACKWARD(NAME, T, 1, 512, 2) NORM_BACKWARD(NAME, T, 2, 512, 1) NORM_BACKWARD(NAME, T, 4, 512, 1)   \
  extern "C" __global__ void __launch_bounds__(256)                                                       \
      rmsnorm_##NAME##_any(T* y, float* inv, const T* x, const float* w, int n, float eps) {              \
    norm_any<T, false>(y, inv, nullptr, x, nullptr, w, n, eps);                                           \
  }                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                       \
      add_rmsnorm_##NAME##_any(T* y, float* inv, T* sum, const T* a, const T* b, const float* w, int n,   \
          float eps) {                                                                                    \
    norm_any<T, true>(y, inv, sum, a, b, w, n, eps);                                                      \
  }                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                       \
      rmsnorm_backward_##NAME##_any(T* dx, float* partial, const T* dy, const T* x, const float* inv,     \
          const float* w, int rows, int n, int accumulate) {                                              \
    norm_backward_any<T>(dx, partial, dy, x, inv, w, rows, n, accumulate);                                \
  }

NORMS(bf16, bf16_t)
NORMS(fp16, fp16_t)
NORMS(fp32, float)
