// The conversion of kernels/gpu/internal/source/e4m3.cuh on the host, with the arithmetic of internal/base/half/e4m3.go.
#pragma once
#include "host.h"

inline unsigned e4m3(float x) {
  unsigned b = __float_as_uint(x), sign = b >> 24 & 0x80;
  b &= 0x7fffffff;
  if (b > 0x7f800000) return 0x7f;
  if (b < 0x3c800000) return sign | (__float_as_uint(__uint_as_float(b) + 0x1p14f) - 0x46800000);
  b -= (127 - 7) << 23;
  return sign | min((b + 0x7ffff + (b >> 20 & 1)) >> 20, 0x7e);
}

inline unsigned e4m3x2(float lo, float hi) { return e4m3(lo) | e4m3(hi) << 8; }
