// The layout of wg_multiply operands in shared memory; see hopper.cuh.
#pragma once

// matrix describes an operand of wg_multiply in shared memory: 128-byte rows, with 16-byte pieces permuted by the row
// in its group of eight, as TMA writes them. Its start may move by 32 bytes, 16 elements, along a row.
// wide, in bytes, is the distance of panels of 64 elements, for a transposed operand; deep is the distance of groups of
// eight rows.
__device__ __forceinline__ unsigned long long matrix(unsigned address, unsigned wide = 0, unsigned deep = 1024) {
  return (unsigned long long)(address >> 4 & 0x3fff) | (unsigned long long)(wide >> 4) << 16 |
      (unsigned long long)(deep >> 4) << 32 | 1ull << 62;
}

// Panels is ROWS by COLS 16-bit elements in shared memory, aligned to 1024 bytes, as copies of boxes of 64 elements by
// ROWS write them: panels of 64 columns. The last panel may be wider than the used columns.
template <int ROWS, int COLS> struct Panels {
  static constexpr int COUNT = (COLS + 63) / 64, PANEL = ROWS * 128, BYTES = COUNT * PANEL;
  static_assert(ROWS % 8 == 0 && COLS % 16 == 0, "shape");

  // Offsets from the start of the panels are constants in a product's loop, and cost no masks there.
  //
  // along describes an operand in order [outer][k], from a multiple of 8 rows and of 16 columns.
  static __device__ __forceinline__ unsigned long long along(unsigned at, int row, int k) {
    return matrix(at) + (unsigned)row * 8 + ((k / 64 * PANEL + k % 64 * 2) >> 4);
  }

  // across describes one in order [k][outer], from a multiple of 8 rows and of 64 columns.
  static __device__ __forceinline__ unsigned long long across(unsigned at, int k, int col = 0) {
    return matrix(at, PANEL) + (unsigned)(col / 64) * (PANEL >> 4) + k * 8;
  }

  // offset returns the offset of element (row, col), in bytes. col is a multiple of 8, or an element of that piece.
  static __device__ __forceinline__ unsigned offset(int row, int col) {
    return col / 64 * PANEL + row * 128 + ((col % 64 / 8 ^ (row & 7)) << 4) + col % 8 * 2;
  }
};
