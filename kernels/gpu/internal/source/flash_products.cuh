// The products of the flash kernels: with FLOAT32, float32 arithmetic on all threads, otherwise matrix
// instructions on 16-bit floats.
#pragma once
#ifdef FLOAT32
#include "flash_simt.cuh"
#else
#include "flash_mma.cuh"
#endif

// load starts copies of rows [row, row + ROWS) of one head to shared memory. Rows outside of
// [lo, hi) and columns since dim become 0.
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void load(
    unsigned smem, const Stored* src, long long stride, int row, int lo, int hi, int dim, bool aligned) {
  using To = Operand<ROWS, COLS>;
  constexpr int PIECES = COLS / To::PIECE;
  if (aligned) {
    constexpr int PASS = THREADS / PIECES; // rows at a time
    unsigned thread = threadIdx.x;
    hide_value(thread); // as in InShared of flash_mma.cuh
    int r = thread / PIECES, col = thread % PIECES * To::PIECE;
    const Stored* x = src + (row + r) * stride + col;
#pragma unroll
    for (int i = 0; i < ROWS; i += PASS) {
      bool mine = (THREADS % PIECES == 0 || r < PASS) && (ROWS % PASS == 0 || i + r < ROWS);
      bool valid = (unsigned)(row + r + i - lo) < (unsigned)(hi - lo) && col < dim;
      if (mine) {
        copy16(smem + To::offset(r + i, col), x, valid);
      }
      x += PASS * stride;
    }
    return;
  }
  for (int at = threadIdx.x; at < ROWS * PIECES; at += THREADS) {
    int r = at / PIECES, col = at % PIECES * To::PIECE;
    const Stored* x = src + (row + r) * stride;
    bool valid = row + r >= lo && row + r < hi;
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      w[i] = word(x, col, i, dim, valid);
    }
    store_shared(smem + To::offset(r, col), w[0], w[1], w[2], w[3]);
  }
}

template <class F> __device__ __forceinline__ void clear(F& c) {
  c.each([](float& x) { x = 0; });
}

// transform computes scores from products if that takes more than a factor.
template <class F> __device__ __forceinline__ void transform(F& s, const FlashParams& p) {
  if (p.flags & CAPPED) {
    s.each([&](float& x) { x = p.outer * tanh_score(p.inner * x); });
  } else if (p.flags & SCALED) {
    s.each([&](float& x) { x *= p.inner; });
  }
}

// same_row returns f over x of all lanes that share a row of F.
template <class F, class G> __device__ __forceinline__ float same_row(float x, G f) {
#pragma unroll
  for (int lane = 1; lane < F::LANES; lane *= 2) {
    x = f(x, __shfl_xor_sync(0xffffffff, x, lane));
  }
  return x;
}
