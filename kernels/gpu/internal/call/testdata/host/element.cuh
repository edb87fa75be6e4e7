// The instructions of kernels/gpu/internal/source/element.cuh that attention uses, as functions on the host.
#pragma once
#include "host.h"

struct bf16_t { unsigned short bits; };
struct fp16_t { unsigned short bits; };

inline unsigned short round_to(bf16_t, float x) {
  unsigned u = __float_as_uint(x);
  return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline unsigned short round_to(fp16_t, float x) {
  _Float16 h = (_Float16)x;
  unsigned short bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float value_of(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
inline float value_of(fp16_t x) {
  _Float16 h;
  memcpy(&h, &x.bits, 2);
  return h;
}

template <class T> void unpack(unsigned x, float& lo, float& hi) {
  lo = value_of(T{(unsigned short)x}), hi = value_of(T{(unsigned short)(x >> 16)});
}
template <class T> unsigned pack(float lo, float hi) { return round_to(T(), lo) | (unsigned)round_to(T(), hi) << 16; }

inline uint4 load_streaming(const void* p) { return *(const uint4*)p; }
inline uint2 load_streaming8(const void* p) { return *(const uint2*)p; }

inline float exp2_fast(float x) {
  float y = exp2f(x);
  return y < 1.17549435e-38f ? 0 : y; // subnormal numbers count as 0
}

inline float half_to_float(unsigned short bits) { return value_of(fp16_t{bits}); }
