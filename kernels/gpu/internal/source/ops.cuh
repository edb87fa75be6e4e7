// Common parts of the memory-bound kernels: element types, loads and stores of 16 bytes, and sums over
// warps and blocks.
//
// The speed of such a kernel depends on its bytes in flight, so a thread loads all its elements
// before other work. Streamed data does not enter L1, which caches weights and angles that many rows
// share.
#pragma once
#include "element.cuh"

// LANES is the number of elements in a load of 16 bytes.
template <class T> constexpr int LANES = 16 / int(sizeof(T));

template <class T> __device__ float to_float(T x);
template <> __device__ __forceinline__ float to_float(float x) { return x; }
template <> __device__ __forceinline__ float to_float(double x) { return (float)x; }
template <> __device__ __forceinline__ float to_float(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
template <> __device__ __forceinline__ float to_float(fp16_t x) { return half_to_float(x.bits); }

template <class T> __device__ T from_float(float x);
template <> __device__ __forceinline__ float from_float(float x) { return x; }
template <> __device__ __forceinline__ double from_float(float x) { return x; }
template <> __device__ __forceinline__ bf16_t from_float(float x) {
  return bf16_t{(unsigned short)pack<bf16_t>(x, 0.0f)};
}
template <> __device__ __forceinline__ fp16_t from_float(float x) {
  return fp16_t{(unsigned short)pack<fp16_t>(x, 0.0f)};
}

// A Vec is 16 bytes of T as in memory. Registers hold rows in this form.
template <class T> struct Vec {
  uint4 raw;

  __device__ __forceinline__ void get(float (&x)[LANES<T>]) const {
    if constexpr (sizeof(T) == 4) {
      x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
      x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    } else {
      unpack<T>(raw.x, x[0], x[1]), unpack<T>(raw.y, x[2], x[3]);
      unpack<T>(raw.z, x[4], x[5]), unpack<T>(raw.w, x[6], x[7]);
    }
  }

  __device__ __forceinline__ void set(const float (&x)[LANES<T>]) {
    if constexpr (sizeof(T) == 4) {
      raw = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
          __float_as_uint(x[3]));
    } else {
      raw = make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
  }
};

// stream loads 16 bytes that are read only once.
template <class T> __device__ __forceinline__ Vec<T> stream(const T* p) { return {load_streaming(p)}; }

template <class T> __device__ __forceinline__ void put(T* p, const Vec<T>& v) { *(uint4*)p = v.raw; }

// cached loads N floats, a multiple of 4, that other rows also read.
template <int N> __device__ __forceinline__ void cached(float (&x)[N], const float* p) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float4 v = __ldg((const float4*)(p + i));
    x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
  }
}

// load loads L floats from L elements at p: a vector of 16 or 8 bytes, or one element.
template <int L, class T> __device__ __forceinline__ void load(float (&x)[L], const T* p) {
  if constexpr (L == 1) {
    x[0] = to_float(p[0]);
  } else if constexpr (L * sizeof(T) == 8) {
    uint2 v = load_streaming8(p);
    unpack<T>(v.x, x[0], x[1]), unpack<T>(v.y, x[2], x[3]);
  } else {
    stream(p).get(x);
  }
}

// store does the reverse.
template <int L, class T> __device__ __forceinline__ void store(T* p, const float (&x)[L]) {
  if constexpr (L == 1) {
    p[0] = from_float<T>(x[0]);
  } else if constexpr (L * sizeof(T) == 8) {
    *(uint2*)p = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
  } else {
    Vec<T> v;
    v.set(x);
    put(p, v);
  }
}

// group_sum returns the sum of x over groups of lanes, a power of two, with the same bits in each lane.
template <class T> __device__ __forceinline__ T group_sum(T x, int lanes) {
  for (int i = lanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// block_sum returns the sum of x over the block, a multiple of 32 threads in x, with the same bits in each
// thread. scratch holds a value for each warp. It must not be reused before a barrier; alternating between
// two is enough.
template <class T> __device__ __forceinline__ T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  if (blockDim.x == 32) return x;
  int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : T(0));
}

// block_max does the same for the largest x. It skips NaN.
__device__ __forceinline__ float block_max(float x, float* scratch) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  if (blockDim.x == 32) return x;
  int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < warps ? scratch[lane] : scratch[0];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
