// AdamW, sums of squares, and the sums of other kernels' partial results.
#include "ops.cuh"

// Step holds the parameters of a step of AdamW, from the host.
struct Step {
  double max_norm; // 0: no clipping
  float keep, rate, root, new1, old2, new2, eps;
  float unscale; // 1 over the loss scale; 0: no scaling, and no step is skipped
};

// SKIPPED is the factor of a step that changes nothing.
constexpr float SKIPPED = -1;

// factor_of returns the factor of the gradient: 1 over its scale, times the clip. The comparison with the norm keeps
// NaN.
__device__ __forceinline__ float factor_of(const double* sum, const Step& h) {
  float unscale = 1;
  if (h.unscale > 0) {
    double norm2 = *sum;
    if (norm2 - norm2 != 0) return SKIPPED; // NaN or infinite
    unscale = h.unscale;
  }
  if (h.max_norm <= 0) return unscale;
  double clip = h.max_norm / (sqrt(*sum) * unscale + 1e-6);
  return clip >= 1 ? unscale : (float)clip * unscale;
}

__device__ __forceinline__ void update(float& p, float g, float& m, float& v, float factor, const Step& h) {
  g *= factor;
  m += (g - m) * h.new1;
  v = v * h.old2 + g * g * h.new2;
  p = p * h.keep - h.rate * m / (sqrtf(v) / h.root + h.eps);
}

// adamw updates p, m and v [n] and sets copied to p, in vectors of L elements. A thread has UPDATES vectors, a block
// apart. The device computes the gradient's factor, so that the host need not wait for it.
constexpr int UPDATES = 2;

template <class C, int L, bool COPIED>
__device__ __forceinline__ void adamw(float* p, C* copied, const float* g, float* m, float* v,
    const double* sum, long long n, const Step& h) {
  __shared__ float shared;
  long long at = ((long long)blockIdx.x * UPDATES * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
  float ps[UPDATES][L], gs[UPDATES][L], ms[UPDATES][L], vs[UPDATES][L];
#pragma unroll
  for (int u = 0; u < UPDATES; u++) {
    long long i = at + u * step;
    if (i >= n) continue;
    load(ps[u], (const float*)p + i), load(gs[u], g + i), load(ms[u], (const float*)m + i), load(vs[u],
        (const float*)v + i);
  }
  if (threadIdx.x == 0) shared = factor_of(sum, h);
  __syncthreads();
  if (shared == SKIPPED) return;
#pragma unroll
  for (int u = 0; u < UPDATES; u++) {
    long long i = at + u * step;
    if (i >= n) continue;
#pragma unroll
    for (int k = 0; k < L; k++) update(ps[u][k], gs[u][k], ms[u][k], vs[u][k], shared, h);
    store(p + i, ps[u]), store(m + i, ms[u]), store(v + i, vs[u]);
    if constexpr (COPIED) store(copied + i, ps[u]);
  }
}

#define ADAMW(NAME, C, COPIED)                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                         \
      adamw_##NAME(float* p, C* copied, const float* g, float* m, float* v, const double* sum, long long n, \
          Step h) {                                                                                         \
    adamw<C, 4, COPIED>(p, copied, g, m, v, sum, n, h);                                                     \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256)                                                         \
      adamw_any_##NAME(float* p, C* copied, const float* g, float* m, float* v, const double* sum,          \
          long long n, Step h) {                                                                            \
    adamw<C, 1, COPIED>(p, copied, g, m, v, sum, n, h);                                                     \
  }

ADAMW(none, float, false)
ADAMW(bf16, bf16_t, true)
ADAMW(fp16, fp16_t, true)
ADAMW(fp32, float, true)

// squares writes the sum of the squares of a block's share of g to partial. The shares depend on n and
// the number of blocks, which the host fixes. It adds in float64, in which squares are exact and no
// gradient overflows.
template <int L> __device__ __forceinline__ void squares(double* partial, const float* g, long long n) {
  constexpr int U = 4;
  __shared__ double scratch[32];
  double sum = 0;
  long long step = (long long)gridDim.x * blockDim.x * L;
  for (long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * L; at < n; at += U * step) {
    float x[U][L];
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int k = 0; k < L; k++) x[u][k] = 0;
      if (at + u * step < n) load(x[u], g + at + u * step);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
      for (int k = 0; k < L; k++) sum += (double)x[u][k] * x[u][k];
    }
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256) squares_fp32(double* partial, const float* g, long long n) {
  squares<4>(partial, g, n);
}

extern "C" __global__ void __launch_bounds__(256) squares_any_fp32(double* partial, const float* g,
    long long n) {
  squares<1>(partial, g, n);
}

// add_scalars adds the sum of partial [n] to sum. One block.
extern "C" __global__ void __launch_bounds__(1024) add_scalars(double* sum, const double* partial, int n) {
  __shared__ double scratch[32];
  double x = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) x += partial[i];
  x = block_sum(x, scratch);
  if (threadIdx.x == 0) *sum += x;
}

// add_columns adds the sum of the rows of partial [rows, n] to sum [n]. Blocks of 32 by 32.
extern "C" __global__ void __launch_bounds__(1024) add_columns(float* sum, const float* partial, int rows,
    int n) {
  __shared__ float shared[32][33];
  int c = blockIdx.x * 32 + threadIdx.x;
  float x = 0;
  if (c < n) {
#pragma unroll 4
    for (int r = threadIdx.y; r < rows; r += 32) x += partial[(long long)r * n + c];
  }
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  x = warp_sum(shared[threadIdx.x][threadIdx.y]); // now a warp has a column
  c = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x == 0 && c < n) sum[c] += x;
}

// sum_rows writes sums of the rows of x [rows, n] to partial [blocks, n]. A thread has some columns.
template <class T> __device__ __forceinline__ void sum_rows(float* partial, const T* x, int rows, int n) {
  for (int c = threadIdx.x; c < n; c += blockDim.x) {
    float sum = 0;
#pragma unroll 4
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) sum += to_float(x[row * n + c]);
    partial[(long long)blockIdx.x * n + c] = sum;
  }
}

#define SUM_ROWS(NAME, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(256) sum_rows_##NAME(float* partial, const T* x, int rows, \
      int n) {                                                                                      \
    sum_rows<T>(partial, x, rows, n);                                                               \
  }

SUM_ROWS(bf16, bf16_t)
SUM_ROWS(fp16, fp16_t)
SUM_ROWS(fp32, float)
