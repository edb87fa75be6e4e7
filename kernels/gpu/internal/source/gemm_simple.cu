// Matrix products of any shape and alignment: C = A B + beta D, if cuBLASLt has no algorithm, such as
// for 16-bit matrices with an odd number of columns. A block of 16 x 16 threads computes a tile of
// 64 x 64, each thread 4 x 4 of it, from tiles of A and B in shared
// memory as float32.
#include "element.cuh"

constexpr int TILE = 64, DEPTH = 16, SIDE = 16, EACH = TILE / SIDE;

// A Matrix is m rows of n columns with the given strides. A transposed matrix has other
// strides.
template <class T> struct Matrix {
  const T* at;
  long long row, column;
};

template <class T> __device__ __forceinline__ float value(T x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    float lo, hi;
    unpack<T>(x.bits, lo, hi);
    return lo;
  }
}

template <class T> __device__ __forceinline__ T round_to(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    T y;
    y.bits = (unsigned short)pack<T>(x, 0.0f);
    return y;
  }
}

// stage loads rows [i, i + TILE) and columns [l, l + DEPTH) of x into tile, transposed. Elements
// outside become 0. Neighbouring threads go along the contiguous axis of x.
template <class T>
__device__ __forceinline__ void stage(
    float (&tile)[DEPTH][TILE + 1], Matrix<T> x, long long i, long long l, long long rows, long long depth) {
  int thread = threadIdx.y * SIDE + threadIdx.x;
#pragma unroll
  for (int step = 0; step < TILE * DEPTH; step += SIDE * SIDE) {
    int at = step + thread;
    int r = x.column == 1 ? at / DEPTH : at % TILE, d = x.column == 1 ? at % DEPTH : at / TILE;
    bool inside = i + r < rows && l + d < depth;
    tile[d][r] = inside ? value(x.at[(i + r) * x.row + (l + d) * x.column]) : 0.0f;
  }
}

// C, D: dense m by n with ldc and ldd. B is given transposed, n rows of k columns.
template <class T, class C>
__device__ __forceinline__ void gemm(
    C* c, long long ldc, const C* d, long long ldd, Matrix<T> a, Matrix<T> b, long long m, long long n, long long k) {
  __shared__ float as[DEPTH][TILE + 1], bs[DEPTH][TILE + 1];
  long long j = (long long)blockIdx.x * TILE;
  // The grid has few blocks along y, and m may be large.
  for (long long i = (long long)blockIdx.y * TILE; i < m; i += (long long)gridDim.y * TILE) {
    float sum[EACH][EACH] = {};
    for (long long l = 0; l < k; l += DEPTH) {
      stage(as, a, i, l, m, k);
      stage(bs, b, j, l, n, k);
      __syncthreads();
#pragma unroll
      for (int e = 0; e < DEPTH; e++) {
        float x[EACH], y[EACH];
#pragma unroll
        for (int r = 0; r < EACH; r++) {
          x[r] = as[e][threadIdx.y + r * SIDE];
          y[r] = bs[e][threadIdx.x + r * SIDE];
        }
#pragma unroll
        for (int r = 0; r < EACH; r++) {
#pragma unroll
          for (int s = 0; s < EACH; s++) sum[r][s] = fmaf(x[r], y[s], sum[r][s]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++) {
#pragma unroll
      for (int s = 0; s < EACH; s++) {
        long long row = i + threadIdx.y + r * SIDE, column = j + threadIdx.x + s * SIDE;
        if (row < m && column < n) {
          float x = sum[r][s];
          if (d) x += value(d[row * ldd + column]);
          c[row * ldc + column] = round_to<C>(x);
        }
      }
    }
  }
}

#define GEMM(NAME, T, C) \
  extern "C" __global__ void __launch_bounds__(SIDE* SIDE) gemm_##NAME(C* c, long long ldc, const C* d, long long ldd, \
      Matrix<T> a, Matrix<T> b, long long m, long long n, long long k) { \
    gemm<T, C>(c, ldc, d, ldd, a, b, m, n, k); \
  }

GEMM(bf16_bf16, bf16_t, bf16_t)
GEMM(bf16_fp32, bf16_t, float)
GEMM(fp16_fp16, fp16_t, fp16_t)
GEMM(fp16_fp32, fp16_t, float)
GEMM(fp32_fp32, float, float)
