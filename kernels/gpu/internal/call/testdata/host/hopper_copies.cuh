// The instructions of kernels/gpu/internal/source/hopper_copies.cuh as functions on the host.
#pragma once
#include "hopper.cuh"

inline void copy16_line(unsigned dst, const void* src, bool valid) { start_copy(dst, src, 16, valid); }
template <int HALF> void wg_multiply_e4m3(float (&c)[HALF], unsigned long long a, unsigned long long b, bool keep) {
  static_assert(HALF == 32 || HALF == 96 || HALF == 128, "width");
  start_product({c, HALF, nullptr, a, b, false, false, keep, LOW_E4M3});
}
inline void copies_arrive(unsigned barrier) { arrive_after_copies(barrier); }
inline void store_box(const TensorMap& map, unsigned src, int element, int row, int head, int batch) {
  start_store_box(map, src, {element, row, head, batch});
}
