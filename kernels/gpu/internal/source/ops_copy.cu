// Converting copies, maps, additions and zeros. Flat kernels process dense memory, in vectors or single elements.
// Strided kernels process any views, one element per thread.
#include "ops.cuh"

// COPIES is the number of vectors per thread, a block apart. A vector is 16 bytes of the wider type: with
// larger ones, the lanes of a warp would load with gaps.
constexpr int COPIES = 4;
template <class D, class S> constexpr int VECTOR = sizeof(D) == 2 && sizeof(S) == 2 ? 8 : 4;

template <class D, class S, int L> __device__ __forceinline__ void copy(D* dst, const S* src, long long n) {
  long long at = ((long long)blockIdx.x * COPIES * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
  float x[COPIES][L];
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    if (at + i * step < n) load(x[i], src + at + i * step);
  }
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    if (at + i * step < n) store(dst + at + i * step, x[i]);
  }
}

template <class D, class S, int L> __device__ __forceinline__ void add(D* dst, const S* src, long long n) {
  long long at = ((long long)blockIdx.x * COPIES * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
  float x[COPIES][L], y[COPIES][L];
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    if (at + i * step < n) load(x[i], src + at + i * step), load(y[i], (const D*)dst + at + i * step);
  }
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    if (at + i * step >= n) continue;
#pragma unroll
    for (int k = 0; k < L; k++) y[i][k] += x[i][k];
    store(dst + at + i * step, y[i]);
  }
}

// Layout is the shape of views and their strides in elements.
struct Layout {
  int shape[4];
  long long dst[4], src[4];

  // at sets the offsets of element i in row-major order.
  __device__ __forceinline__ void at(long long i, long long& d, long long& s) const {
    d = s = 0;
#pragma unroll
    for (int a = 3; a >= 0; a--) {
      long long k = i % shape[a];
      i /= shape[a], d += k * dst[a], s += k * src[a];
    }
  }
};

#define FLAT(NAME, OP, D, S)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) NAME(D* dst, const S* src, long long n) {            \
    OP<D, S, VECTOR<D, S>>(dst, src, n);                                                                 \
  }                                                                                                      \
  FLAT_ANY(NAME, OP, D, S)

#define FLAT_ANY(NAME, OP, D, S)                                                                         \
  extern "C" __global__ void __launch_bounds__(256) NAME##_any(D* dst, const S* src, long long n) {      \
    OP<D, S, 1>(dst, src, n);                                                                            \
  }

#define COPY(NAME, D, S)        \
  FLAT(copy_##NAME, copy, D, S) \
  COPY_STRIDED(NAME, D, S)

// float64 serves tests and scalars; it has no vectors.
#define COPY_ONE(NAME, D, S)        \
  FLAT_ANY(copy_##NAME, copy, D, S) \
  COPY_STRIDED(NAME, D, S)

#define COPY_STRIDED(NAME, D, S)                                                                        \
  extern "C" __global__ void __launch_bounds__(256) copy_strided_##NAME(D* dst, const S* src, Layout l, \
      long long n) {                                                                                    \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, d, s;                               \
    if (i >= n) return;                                                                                 \
    l.at(i, d, s);                                                                                      \
    dst[d] = from_float<D>(to_float(src[s]));                                                           \
  }

#define ADD(NAME, D, S)                                                                                \
  FLAT(add_##NAME, add, D, S)                                                                          \
  extern "C" __global__ void __launch_bounds__(256) add_strided_##NAME(D* dst, const S* src, Layout l, \
      long long n) {                                                                                   \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, d, s;                              \
    if (i >= n) return;                                                                                \
    l.at(i, d, s);                                                                                     \
    dst[d] = from_float<D>(to_float(dst[d]) + to_float(src[s]));                                       \
  }

// Names have the type of the destination, then of the source.
COPY_ONE(fp64_fp32, double, float)
COPY_ONE(fp64_bf16, double, bf16_t)
COPY_ONE(fp64_fp16, double, fp16_t)
COPY_ONE(fp32_fp64, float, double)
COPY(fp32_bf16, float, bf16_t)
COPY(fp32_fp16, float, fp16_t)
COPY_ONE(bf16_fp64, bf16_t, double)
COPY(bf16_fp32, bf16_t, float)
COPY(bf16_fp16, bf16_t, fp16_t)
COPY_ONE(fp16_fp64, fp16_t, double)
COPY(fp16_fp32, fp16_t, float)
COPY(fp16_bf16, fp16_t, bf16_t)
ADD(fp32_fp32, float, float)
ADD(bf16_bf16, bf16_t, bf16_t)
ADD(fp16_fp16, fp16_t, fp16_t)
ADD(fp32_bf16, float, bf16_t)
ADD(fp32_fp16, float, fp16_t)

struct Affine {
  __device__ __forceinline__ static float at(float x, float scale, float shift) { return x * scale + shift; }
};

struct SoftCap {
  __device__ __forceinline__ static float at(float x, float limit, float inverse) {
    return limit * tanhf(x * inverse);
  }
};

// map sets y to F of x.
template <class F, class T, int L>
__device__ __forceinline__ void map(T* y, const T* x, long long n, float a, float b) {
  long long at = ((long long)blockIdx.x * COPIES * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    if (at + i * step >= n) continue;
    float v[L];
    load(v, x + at + i * step);
#pragma unroll
    for (int k = 0; k < L; k++) v[k] = F::at(v[k], a, b);
    store(y + at + i * step, v);
  }
}

#define MAP(NAME, F, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) NAME(T* y, const T* x, long long n, float a, float b) { \
    map<F, T, LANES<T>>(y, x, n, a, b);                                                                \
  }                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256) NAME##_any(T* y, const T* x, long long n, float a,    \
      float b) {                                                                                          \
    map<F, T, 1>(y, x, n, a, b);                                                                       \
  }

#define SCALE(NAME, L, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(256) NAME(T* y, const T* x, long long n,   \
      const float* by) {                                                                  \
    map<Affine, T, L>(y, x, n, *by, 0.0f);                                                \
  }

#define MAPS(NAME, T)                \
  MAP(affine_##NAME, Affine, T)      \
  MAP(softcap_##NAME, SoftCap, T)    \
  SCALE(scale_##NAME, LANES<T>, T)   \
  SCALE(scale_##NAME##_any, 1, T)

MAPS(bf16, bf16_t)
MAPS(fp16, fp16_t)
MAPS(fp32, float)

// Elements of the same type move as words of their size, which keeps every bit. Without src, they
// become 0.
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define MOVE(NAME, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) move_strided_##NAME(T* dst, const T* src, Layout l, \
      long long n) {                                                                                    \
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, d, s;                               \
    if (i >= n) return;                                                                                 \
    l.at(i, d, s);                                                                                      \
    dst[d] = src ? src[s] : T(0);                                                                       \
  }

MOVE(8, u64)
MOVE(4, unsigned)
MOVE(2, u16)
MOVE(1, u8)

// kept_by returns the factor of an element: 0 if it is dropped. The random number is that of kernels.Dropout.
__device__ __forceinline__ float kept_by(u64 key, u64 least, float kept, int token, int column) {
  u64 x = key + 0x9e3779b97f4a7c15ull * ((u64)(unsigned)token << 32 | (unsigned)column);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) >> 32 < least ? 0.0f : kept;
}

// dropout sets y to x with dropped elements. A vector lies in one row of columns elements.
template <class T, int L>
__device__ __forceinline__ void dropout(T* y, const T* x, const int* tokens, long long n, long long columns, u64 key,
    u64 least, float kept) {
  long long at = ((long long)blockIdx.x * COPIES * blockDim.x + threadIdx.x) * L, step = blockDim.x * L;
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    long long e = at + i * step;
    if (e >= n) continue;
    int token = tokens[e / columns], column = int(e % columns);
    float v[L];
    load(v, x + e);
#pragma unroll
    for (int k = 0; k < L; k++) {
      float f = kept_by(key, least, kept, token, column + k);
      v[k] = f == 0.0f ? 0.0f : v[k] * f;
    }
    store(y + e, v);
  }
}

#define DROPOUT(NAME, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) dropout_##NAME(T* y, const T* x, const int* tokens,    \
      long long n, long long columns, u64 key, u64 least, float kept) {                                    \
    dropout<T, LANES<T>>(y, x, tokens, n, columns, key, least, kept);                                      \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) dropout_##NAME##_any(T* y, const T* x,                 \
      const int* tokens, long long n, long long columns, u64 key, u64 least, float kept) {                 \
    dropout<T, 1>(y, x, tokens, n, columns, key, least, kept);                                             \
  }

DROPOUT(bf16, bf16_t)
DROPOUT(fp16, fp16_t)
DROPOUT(fp32, float)
