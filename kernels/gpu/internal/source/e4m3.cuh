// The conversion to E4M3, which GPUs have from sm_89. Tests run kernels without a GPU, with another definition.
#pragma once

// e4m3x2 rounds lo and hi to the nearest E4M3, at most 448, with lo in the low byte. NaN becomes 0x7f.
__device__ __forceinline__ unsigned e4m3x2(float lo, float hi) {
  unsigned short y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}
