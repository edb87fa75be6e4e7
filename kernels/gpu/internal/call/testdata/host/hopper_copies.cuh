// The instructions of kernels/gpu/internal/source/hopper_copies.cuh as functions on the host.
#pragma once
#include "hopper.cuh"

inline void copy16_line(unsigned dst, const void* src, bool valid) { start_copy(dst, src, 16, valid); }
inline void copies_arrive(unsigned barrier) { arrive_after_copies(barrier); }
inline void store_box(const TensorMap& map, unsigned src, int element, int row, int head, int batch) {
  start_store_box(map, src, {element, row, head, batch});
}
