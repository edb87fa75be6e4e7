// Products of float32 for the flash kernels, with multiply-adds of every thread. The names are those in
// flash_mma.cuh. No tensor core multiplies float32 with all its bits.
//
// The lanes of a warp form 4 rows of 8. All lanes' parts of a product have the same size. With one 16-byte
// load, a lane gets four neighbours of k. If an operand is transposed, it gets four rows or columns
// of one k.
#pragma once
#include "flash.cuh"

using Stored = float; // an element of q, k, v and do, for load
#define FOR_TYPES(ENTRY) ENTRY(fp32, float)

constexpr int LANES_DOWN = 4, LANES_ACROSS = 8;

// A Fragment is a warp's share of a product; see flash_mma.cuh. A lane's rows and columns form runs of one load, or of
// two for loads along k, so that lanes read different banks.
template <int HEIGHT, int WIDTH, bool TRANS_A, bool TRANS_B> struct Fragment {
  static constexpr int RUN_A = TRANS_A ? 4 : 2, RUN_B = TRANS_B ? 4 : 2;
  static constexpr int ROWS = HEIGHT / LANES_DOWN, COLS = WIDTH / LANES_ACROSS, LANES = LANES_ACROSS;
  static_assert(HEIGHT == LANES_DOWN * RUN_A || HEIGHT % (2 * LANES_DOWN * RUN_A) == 0,
      "a warp's part begins at a multiple of its height");
  static_assert(WIDTH % (LANES_ACROSS * RUN_B) == 0, "a warp's part is made of runs of every lane");
  float x[ROWS][COLS];

  static __device__ __forceinline__ int first_row(unsigned lane) { return lane / LANES_ACROSS * RUN_A; }
  static __device__ __forceinline__ int first_col(unsigned lane) { return lane % LANES_ACROSS * RUN_B; }
  static __device__ __forceinline__ constexpr int row(int r) { return r / RUN_A * (LANES_DOWN * RUN_A) + r % RUN_A; }
  static __device__ __forceinline__ constexpr int col(int c) { return c / RUN_B * (LANES_ACROSS * RUN_B) + c % RUN_B; }
  __device__ __forceinline__ float& at(int r, int c) { return x[r][c]; }
  __device__ __forceinline__ float at(int r, int c) const { return x[r][c]; }

  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLS; c++) {
        f(x[r][c]);
      }
    }
  }

  template <class F> __device__ __forceinline__ void each_four(float factor, int row, int col, int end, F f) {
    static_assert(RUN_B == 4, "four neighbours are a run");
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int at = row + first_row(lane) + Fragment::row(r);
      if (at >= end) {
        continue;
      }
#pragma unroll
      for (int c = 0; c < COLS; c += 4) {
        const float z[4] = {factor * x[r][c], factor * x[r][c + 1], factor * x[r][c + 2], factor * x[r][c + 3]};
        f(at, col + first_col(lane) + Fragment::col(c), z);
      }
    }
  }
};

// An Operand is ROWS by COLS floats in shared memory, in panels as wide as a line of 128 bytes, or half
// of that if COLS requires it. Within a panel, the 16-byte pieces of a row are permuted by half its
// number, so that a column of pieces in eight pairs of rows uses different banks.
template <int ROWS, int COLS> struct Operand {
  static constexpr int PANEL = COLS % 32 == 0 ? 32 : 16, PIECE = 4; // PIECE elements are 16 bytes
  static constexpr int LINE = PANEL * 4, PANEL_BYTES = ROWS * LINE, BYTES = ROWS * COLS * 4;
  static_assert(COLS % PANEL == 0, "shape");

  // permuted returns the xor for the position of a piece in its row, in bytes.
  static __device__ __forceinline__ constexpr unsigned permuted(unsigned row) {
    return (row >> 1) % (PANEL / PIECE) * 16;
  }

  // offset returns the byte offset of element (row, col).
  static __device__ __forceinline__ unsigned offset(unsigned row, unsigned col) {
    return col / PANEL * PANEL_BYTES + row * LINE + (col % PANEL * 4 ^ permuted(row));
  }
};

// word returns element i of the four of a piece at col, for load; 0 beyond dim.
__device__ __forceinline__ unsigned word(const Stored* row, int col, int i, int dim, bool valid) {
  return valid && col + i < dim ? __float_as_uint(row[col + i]) : 0;
}

// Lines loads an operand in order [outer][k]: four of k at once. N lanes share the outer rows, RUN neighbours each in
// turn.
template <class Tile, int N> struct Lines {
  static constexpr int RUN = 2;
  unsigned base, mix;

  __device__ __forceinline__ Lines(unsigned smem, int at, int lane) {
    const unsigned row = at + lane * RUN;
    base = smem + row * Tile::LINE;
    mix = Tile::permuted(row);
  }

  // load loads elements k to k + 3 of the lane's i-th row. The first row's permutation leaves free the bits
  // that permute the lane's other rows, so one xor serves all.
  __device__ __forceinline__ void load(float (&x)[4], int i, int k) const {
    const int row = i / RUN * (N * RUN) + i % RUN;
    load_shared(base + k / Tile::PANEL * Tile::PANEL_BYTES + row * Tile::LINE +
            (k % Tile::PANEL * 4 ^ mix ^ Tile::permuted(row)),
        x);
  }
};

// Columns loads an operand in order [k][outer]: four outer ones at once, of N lanes in turn.
template <class Tile, int N> struct Columns {
  static constexpr int RUN = 4;
  unsigned base, mix;

  __device__ __forceinline__ Columns(unsigned smem, int at, int lane) {
    base = smem + at / Tile::PANEL * Tile::PANEL_BYTES;
    mix = (at % Tile::PANEL + lane * RUN) * 4;
  }

  // load loads the lane's i-th run of row k.
  __device__ __forceinline__ void load(float (&x)[4], int i, int k) const {
    const int col = i * (N * RUN);
    load_shared(base + col / Tile::PANEL * Tile::PANEL_BYTES + k * Tile::LINE +
            (mix ^ col % Tile::PANEL * 4 ^ Tile::permuted(k)),
        x);
  }
};

// InShared is an operand of multiply in shared memory; see flash_mma.cuh. A warp's part of it begins at
// at.
template <int ROWS, int COLS, bool TURNED, int ALIGN = 64> struct InShared {
  static constexpr bool TRANS = TURNED;
  using Tile = Operand<ROWS, COLS>;
  unsigned smem;
  int at;

  __device__ __forceinline__ InShared(unsigned smem, int at) : smem(smem), at(at) {}
};

template <class Tile, int N, bool TRANS> struct ReaderOf { using Type = Lines<Tile, N>; };
template <class Tile, int N> struct ReaderOf<Tile, N, true> { using Type = Columns<Tile, N>; };
template <class In, int N> using Reader = typename ReaderOf<typename In::Tile, N, In::TRANS>::Type;

// keep stores a fragment to an operand in shared memory, beginning at (row, col).
template <class T, int ROWS, int COLS, class F>
__device__ __forceinline__ void keep(unsigned smem, const F& x, int row, int col) {
  row += F::first_row(threadIdx.x % 32), col += F::first_col(threadIdx.x % 32);
#pragma unroll
  for (int r = 0; r < F::ROWS; r++) {
#pragma unroll
    for (int c = 0; c < F::COLS; c += 2) {
      store_shared(smem + Operand<ROWS, COLS>::offset(row + F::row(r), col + F::col(c)), __float_as_uint(x.at(r, c)),
          __float_as_uint(x.at(r, c + 1)));
    }
  }
}

// Left is the operand A in the registers of an earlier product. A lane needs complete rows, which several lanes share.
// So rows pass through shared memory, separately for each warp.
template <class T, int HEIGHT, int WIDTH> struct Left : InShared<SPLIT * BM, WIDTH, false> {
  __device__ __forceinline__ Left(const Fragment<HEIGHT, WIDTH, false, false>& c, unsigned smem)
      : InShared<SPLIT * BM, WIDTH, false>(smem, threadIdx.x / 32 * HEIGHT) {
    keep<T, SPLIT * BM, WIDTH>(smem, c, this->at, 0);
    __syncwarp();
  }
};

// STEP is the number of k in one step: those of a load along k.
constexpr int STEP = 4;

// add_lines adds x times B, in order [outer][k], beginning at k.
template <class F, class B>
__device__ __forceinline__ void add_lines(F& c, const float (&x)[F::ROWS][STEP], const B& b, int k) {
#pragma unroll
  for (int j = 0; j < F::COLS; j++) {
    float y[STEP];
    b.load(y, j, k);
#pragma unroll
    for (int i = 0; i < STEP; i++) {
#pragma unroll
      for (int r = 0; r < F::ROWS; r++) {
        c.x[r][j] += x[r][i] * y[i];
      }
    }
  }
}

// add_columns adds the i-th column of x times row k of B, in order [k][outer].
template <class F, class B>
__device__ __forceinline__ void add_columns(F& c, const float (&x)[F::ROWS][STEP], int i, const B& b, int k) {
#pragma unroll
  for (int j = 0; j < F::COLS; j += 4) {
    float y[4];
    b.load(y, j / 4, k);
#pragma unroll
    for (int r = 0; r < F::ROWS; r++) {
#pragma unroll
      for (int l = 0; l < 4; l++) {
        c.x[r][j + l] += x[r][i] * y[l];
      }
    }
  }
}

// multiply adds A B, over K, to c.
template <class T, int K, class F, class A, class B>
__device__ __forceinline__ void multiply(F& c, const A& a, const B& b) {
  // Larger steps would hide more of the latency of loads, but the kernel's code must fit the instruction cache.
  constexpr int EACH = F::ROWS * F::COLS * STEP, AT_ONCE = EACH < 256 ? 256 / EACH : 1;
  static_assert(K % STEP == 0, "shape");
  static_assert(!A::TRANS || B::TRANS, "there is no such product");
  static_assert(F::RUN_A == Reader<A, LANES_DOWN>::RUN && F::RUN_B == Reader<B, LANES_ACROSS>::RUN,
      "the fragment is of another product");
  const unsigned lane = threadIdx.x % 32;
  const Reader<A, LANES_DOWN> rows(a.smem, a.at, lane / LANES_ACROSS);
  const Reader<B, LANES_ACROSS> cols(b.smem, b.at, lane % LANES_ACROSS);
#pragma unroll AT_ONCE
  for (int k = 0; k < K; k += STEP) {
    float x[F::ROWS][STEP];
    if constexpr (!A::TRANS) {
#pragma unroll
      for (int r = 0; r < F::ROWS; r++) {
        rows.load(x[r], r, k);
      }
    }
    if constexpr (!B::TRANS) {
      add_lines(c, x, cols, k);
    } else {
#pragma unroll
      for (int i = 0; i < STEP; i++) {
        if constexpr (A::TRANS) {
#pragma unroll
          for (int r = 0; r < F::ROWS; r += 4) {
            float z[4];
            rows.load(z, r / 4, k + i);
            x[r][i] = z[0], x[r + 1][i] = z[1], x[r + 2][i] = z[2], x[r + 3][i] = z[3];
          }
        }
        add_columns(c, x, i, cols, k + i);
      }
    }
  }
}

// tanh_score, log2_of and quotient have full float32 precision, since results would show their errors.
__device__ __forceinline__ float tanh_score(float x) { return tanhf(x); }
__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ float quotient(float x, float y) { return x / y; }
