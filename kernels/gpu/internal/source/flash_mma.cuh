// Products of 16-bit floats for the flash kernels, with mma instructions: operands in shared memory and
// in registers, and a warp's fragment of a product. flash_simt.cuh has the same names for float32.
#pragma once
#include "flash.cuh"

using Stored = unsigned short; // an element of q, k, v and do, for load
#define FOR_TYPES(ENTRY) ENTRY(bf16, bf16_t) ENTRY(fp16, fp16_t)

// A Fragment is a warp's share of a product, HEIGHT by WIDTH. This lane has ROWS times COLS of it: at(r, c) belongs to
// row first_row(lane) + row(r) and column first_col(lane) + col(c). If c is even, c + 1 is the next column. LANES
// neighbouring lanes have the same rows. The order of operands in memory matters only in float32.
template <int HEIGHT, int WIDTH, bool TRANS_A, bool TRANS_B> struct Fragment {
  static constexpr int MT = HEIGHT / 16, NT = WIDTH / 8;
  static constexpr int ROWS = MT * 2, COLS = NT * 2, LANES = 4;
  static_assert(HEIGHT % 16 == 0 && WIDTH % 16 == 0, "a warp's part is made of 16 by 16");
  float x[MT][NT][4];

  template <class L> static __device__ __forceinline__ L first_row(L lane) { return lane / 4; }
  template <class L> static __device__ __forceinline__ L first_col(L lane) { return lane % 4 * 2; }
  static __device__ __forceinline__ constexpr int row(int r) { return r / 2 * 16 + r % 2 * 8; }
  static __device__ __forceinline__ constexpr int col(int c) { return c / 2 * 8 + c % 2; }
  __device__ __forceinline__ float& at(int r, int c) { return x[r / 2][c / 2][r % 2 * 2 + c % 2]; }
  __device__ __forceinline__ float at(int r, int c) const { return x[r / 2][c / 2][r % 2 * 2 + c % 2]; }

  // each calls f for all elements of this lane, in any order.
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT * 4; n++) {
        f(x[m][n / 4][n % 4]);
      }
    }
  }

  // each_four calls f(row, col, four) with factor times four neighbours in a row, relative to a fragment that begins
  // at (row, col). It skips the rows since end. Two neighbouring lanes hold four floats in two rows; they exchange
  // halves, so that each has four in one row.
  template <class F> __device__ __forceinline__ void each_four(float factor, int row, int col, int end, F f) {
    const int lane = threadIdx.x % 32, odd = lane % 2, i = row + lane / 4;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float(&c)[4] = x[m][n];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          c[j] *= factor;
        }
        float a = __shfl_xor_sync(0xffffffff, odd ? c[0] : c[2], 1),
              b = __shfl_xor_sync(0xffffffff, odd ? c[1] : c[3], 1);
        int at = i + m * 16 + odd * 8, from = col + n * 8 + (lane % 4 - odd) * 2;
        if (at < end) {
          float z[4] = {odd ? a : c[0], odd ? b : c[1], odd ? c[2] : a, odd ? c[3] : b};
          f(at, from, z);
        }
      }
    }
  }
};

// An Operand is ROWS by COLS 16-bit elements in shared memory, in panels as wide as a line of 128 bytes, or half
// of that if COLS requires it. Within a panel, the 16-byte pieces of a row are permuted by the row, so that a
// column of pieces in eight rows uses different banks.
template <int ROWS, int COLS> struct Operand {
  static constexpr int PANEL = COLS % 64 == 0 ? 64 : 32, PIECE = 8; // PIECE elements are 16 bytes
  static constexpr int BYTES = ROWS * COLS * 2;
  static_assert(COLS % PANEL == 0 && ROWS % 16 == 0, "shape");

  // offset returns the offset of element (row, col), in bytes. col is a multiple of 8, or an element
  // of that piece.
  static __device__ __forceinline__ unsigned offset(int row, int col) {
    unsigned panel = col / PANEL * (ROWS * PANEL * 2), piece = col % PANEL / 8;
    if constexpr (PANEL == 64) {
      return panel + row * 128 + ((piece ^ (row & 7)) << 4) + col % 8 * 2;
    } else {
      return panel + row * 64 + ((piece ^ (row >> 1 & 3)) << 4) + col % 8 * 2;
    }
  }
};

// word returns the i-th pair of elements of the piece at col, for load; 0 beyond dim.
__device__ __forceinline__ unsigned word(const Stored* row, int col, int i, int dim, bool valid) {
  unsigned a = valid && col + 2 * i < dim ? row[col + 2 * i] : 0;
  unsigned b = valid && col + 2 * i + 1 < dim ? row[col + 2 * i + 1] : 0;
  return a | b << 16;
}

// InShared is an operand of multiply in shared memory, as [outer][k] or, with TRANS, as
// [k][outer]; outer is m of A and n of B. A warp's part begins at a multiple of ALIGN.
template <int ROWS, int COLS, bool TRANS, int ALIGN = 64> struct InShared {
  using Tile = Operand<ROWS, COLS>;
  unsigned of_a, of_b; // a lane's addresses of the first fragment, as A and as B
  int at;

  __device__ __forceinline__ InShared(unsigned smem, int at) : at(ALIGN % Tile::PANEL == 0 ? 0 : at) {
    int l = threadIdx.x % 32, from = at - this->at;
    if (TRANS) {
      of_a = smem + Tile::offset(l % 8 + l / 16 * 8, from + l / 8 % 2 * 8);
      of_b = smem + Tile::offset(l % 16, from + l / 16 * 8);
    } else {
      of_a = smem + Tile::offset(at + l % 16, l / 16 * 8);
      of_b = smem + Tile::offset(at + l % 8 + l / 16 * 8, l / 8 % 2 * 8);
    }
  }

  // hide keeps the compiler from computing all addresses before a loop around the product.
  __device__ __forceinline__ void hide() {
    hide_value(of_a);
    hide_value(of_b);
  }

  // move returns an address (row, col) further, both multiples of 16 (row: of 8). Permuting pieces is an exclusive or
  // of row and column, so the column's can come later; it costs an instruction, and keeping all addresses costs
  // registers.
  static __device__ __forceinline__ unsigned move(unsigned address, int row, int col) {
    return (address + Tile::offset(row, 0) + Tile::offset(0, col / Tile::PANEL * Tile::PANEL)) ^
        (col % Tile::PANEL * 2);
  }

  // a loads A's fragment of 16 outer by 16 k; b loads B's two fragments of 8 outer by 16 k.
  __device__ __forceinline__ void a(unsigned (&d)[4], int outer, int k) const {
    if (TRANS) {
      ldmatrix_trans(d, move(of_a, k, at + outer));
    } else {
      ldmatrix(d, move(of_a, outer, k));
    }
  }
  __device__ __forceinline__ void b(unsigned (&d)[4], int outer, int k) const {
    if (TRANS) {
      ldmatrix_trans(d, move(of_b, k, at + outer));
    } else {
      ldmatrix(d, move(of_b, outer, k));
    }
  }
};

// Left is the operand A in the registers of an earlier product, rounded to T. It needs no shared memory.
template <class T, int HEIGHT, int WIDTH> struct Left {
  unsigned x[HEIGHT / 16][WIDTH / 16][4];

  __device__ __forceinline__ Left(const Fragment<HEIGHT, WIDTH, false, false>& c, unsigned) {
#pragma unroll
    for (int m = 0; m < HEIGHT / 16; m++) {
#pragma unroll
      for (int n = 0; n < WIDTH / 4; n++) {
        x[m][n / 4][n % 4] = pack<T>(c.x[m][n / 2][n % 2 * 2], c.x[m][n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void hide() {}

  __device__ __forceinline__ void a(unsigned (&d)[4], int outer, int k) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      d[i] = x[outer / 16][k / 16][i];
    }
  }
};

// keep stores a fragment to an operand in shared memory, beginning at (row, col).
template <class T, int ROWS, int COLS, class F>
__device__ __forceinline__ void keep(unsigned smem, const F& c, int row, int col) {
  row += F::first_row(threadIdx.x % 32), col += F::first_col(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < F::MT; m++) {
#pragma unroll
    for (int n = 0; n < F::NT; n++) {
      store_shared(smem + Operand<ROWS, COLS>::offset(row + m * 16, col + n * 8), pack<T>(c.x[m][n][0], c.x[m][n][1]));
      store_shared(
          smem + Operand<ROWS, COLS>::offset(row + m * 16 + 8, col + n * 8), pack<T>(c.x[m][n][2], c.x[m][n][3]));
    }
  }
}

// multiply adds A B, over K, to c.
template <class T, int K, class F, class A, class B> __device__ __forceinline__ void multiply(F& c, A a, B b) {
  static_assert(K % 16 == 0, "shape");
  a.hide();
  b.hide();
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    unsigned fa[F::MT][4];
#pragma unroll
    for (int m = 0; m < F::MT; m++) {
      a.a(fa[m], 16 * m, k);
    }
#pragma unroll
    for (int n = 0; n < F::NT; n += 2) {
      unsigned fb[4];
      b.b(fb, 8 * n, k);
#pragma unroll
      for (int m = 0; m < F::MT; m++) {
        mma<T>(c.x[m][n], fa[m], fb[0], fb[1]);
        mma<T>(c.x[m][n + 1], fa[m], fb[2], fb[3]);
      }
    }
  }
}

// tanh_score returns tanh with an absolute error of a few roundings of 1, enough for a score. tanh.approx has 11 bits.
__device__ __forceinline__ float tanh_score(float x) {
  return 1 - __fdividef(2, 1 + exp2_fast(2 * LOG2E * x));
}

// log2_of and quotient have errors of 2 units in the last place, which 16-bit results do not show.
__device__ __forceinline__ float log2_of(float x) { return __log2f(x); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
