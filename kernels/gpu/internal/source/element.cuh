// The 16-bit types and the instructions of the memory-bound kernels, one function each. The kernels
// themselves are ordinary C++. Tests run them without a GPU, with other definitions of these
// functions.
#pragma once

struct bf16_t { unsigned short bits; };
struct fp16_t { unsigned short bits; };

// pack rounds lo and hi to T, with lo in the low half.
template <class T> __device__ unsigned pack(float lo, float hi);
template <> __device__ __forceinline__ unsigned pack<bf16_t>(float lo, float hi) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <> __device__ __forceinline__ unsigned pack<fp16_t>(float lo, float hi) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// unpack reverses pack; it is exact.
template <class T> __device__ void unpack(unsigned x, float& lo, float& hi);
template <> __device__ __forceinline__ void unpack<bf16_t>(unsigned x, float& lo, float& hi) {
  lo = __uint_as_float(x << 16);
  hi = __uint_as_float(x & 0xffff0000u);
}
template <> __device__ __forceinline__ void unpack<fp16_t>(unsigned x, float& lo, float& hi) {
  lo = half_to_float((unsigned short)x);
  hi = half_to_float((unsigned short)(x >> 16));
}

// load_streaming loads 16 bytes without caching them in L1. The same thread may write them later, so
// operations in place can use it.
__device__ __forceinline__ uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_streaming8(const void* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

// exp2_fast has an error of 2 units in the last place. It returns 0 if the result is subnormal
// in float32.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
