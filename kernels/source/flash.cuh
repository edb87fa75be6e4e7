// What the flash kernels share: their parameters, the walk over tiles, tiles of operands in
// shared memory and matrix products of them.
//
// Rows are "own" where a block of the grid owns them (queries in the forward pass, keys in the
// backward pass) and "other" where it walks over them. The host turns tiles round accordingly.
//
// Compiled with INLINE_TILES, how many tiles fit into the arguments.
#pragma once
#include "mma.cuh"

// Strided is a tensor [batch, seq, heads, dim]; strides count elements, that of dim is 1.
struct Strided {
  void* at;
  long long batch, seq, head;
};

// Tile says that own row i sees other row j where lo <= j - i <= hi. Tiles are sorted by own_lo;
// reach is the largest own_hi up to here, so that those that meet a block are found by halving.
struct Tile {
  int own_lo, own_hi, other_lo, other_hi, lo, hi, reach, unused;
};

// Bits of FlashParams.flags.
constexpr int ALIGNED = 1;   // q, k, v, do: rows of 16 byte pieces that begin on 16 bytes
constexpr int ALIGNED_O = 2; // accumulators: the same
constexpr int SCALED = 4;    // scores are multiplied by inner before all else
constexpr int CAPPED = 8;    // they are outer * tanh(inner * q.k)

struct FlashParams {
  Strided q, k, v, dout, o, lse, delta, dq, dk, dv; // o: the accumulator
  const Tile* tiles;                                // NULL: they are in few
  int tile_count, seq_q, seq_k, heads, kv_heads, dim, dim_v, flags;
  // A probability is exp2(unit * s - LSE * log2 e), unit > 0. Gradients of q and k are scaled
  // by scale.
  float unit, inner, outer, inverse, scale; // inverse: 1 / outer
  int unused;
  Tile few[INLINE_TILES];

  __device__ const Tile& tile(int i) const { return tiles ? tiles[i] : few[i]; }
};

#define INF __int_as_float(0x7f800000)
static_assert(sizeof(FlashParams) == 768, "kernels/flash.go lays it out so");

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

template <class T> __device__ __forceinline__ T* head_of(const Strided& s, int batch, int head) {
  return (T*)s.at + batch * s.batch + head * s.head;
}

// Walk visits the blocks of STEP other rows that own rows [own, own + OWN) see any of, tile by
// tile. It keeps little, as registers are what the kernels are short of.
template <int OWN, int STEP> struct Walk {
  const FlashParams& p;
  int own, index, end_tile; // the present tile, and the first that cannot meet the block
  int other, end;           // the block begins at other; the tile's last block ends before end

  __device__ __forceinline__ Walk(const FlashParams& p, int own) : p(p), own(own) {
    int at = own;
    end_tile = first([=](const Tile& t) { return t.own_lo >= at + OWN; });
    restart();
  }

  __device__ __forceinline__ int first_tile() const {
    int at = own;
    return first([=](const Tile& t) { return t.reach > at; });
  }

  __device__ __forceinline__ void restart() {
    index = first_tile() - 1;
    other = end = 0;
  }

  // first is the index of the first tile for which after holds, which it then does for all
  // that follow.
  template <class F> __device__ __forceinline__ int first(F after) const {
    int lo = 0, hi = p.tile_count;
    while (lo < hi) {
      int mid = (lo + hi) / 2;
      if (after(p.tile(mid))) {
        hi = mid;
      } else {
        lo = mid + 1;
      }
    }
    return lo;
  }

  __device__ __forceinline__ const Tile& tile() const { return p.tile(index); }

  // next goes to the next block; false where there is none.
  __device__ __forceinline__ bool next() {
    other += STEP;
    while (other >= end) {
      if (++index >= end_tile) {
        return false;
      }
      const Tile& t = tile();
      int lo = max(own, t.own_lo), hi = min(own + OWN, t.own_hi);
      other = max(t.other_lo, lo + t.lo);
      end = lo < hi ? min(t.other_hi, hi + t.hi) : other;
    }
    return true;
  }

  // whole says that every own row sees every other row of the block.
  __device__ __forceinline__ bool whole() const {
    const Tile& t = tile();
    return t.own_lo <= own && own + OWN <= t.own_hi && own + OWN - 1 + t.lo <= other && other + STEP <= min(t.other_hi, own + t.hi + 1);
  }

  // covers says that some tile has own row i, whether it sees anything or not.
  __device__ bool covers(int i) const {
    for (int t = first_tile(); t < end_tile; t++) {
      if (p.tile(t).own_lo <= i && i < p.tile(t).own_hi) {
        return true;
      }
    }
    return false;
  }
};

// Operand is ROWS by COLS 16 bit elements in shared memory, in panels as wide as a line of 128
// bytes, or half of that where COLS asks for it. Within a panel the 16 byte pieces of a row are
// permuted by the row, so that eight rows of a column of pieces lie in different banks.
template <int ROWS, int COLS> struct Operand {
  static constexpr int PANEL = COLS % 64 == 0 ? 64 : 32;
  static constexpr int BYTES = ROWS * COLS * 2;
  static_assert(COLS % PANEL == 0 && ROWS % 16 == 0, "shape");

  // offset is where element (row, col) lies, in bytes; col is a multiple of 8, or lies behind
  // one in its piece.
  static __device__ __forceinline__ unsigned offset(int row, int col) {
    unsigned panel = col / PANEL * (ROWS * PANEL * 2), piece = col % PANEL / 8;
    if constexpr (PANEL == 64) {
      return panel + row * 128 + ((piece ^ (row & 7)) << 4) + col % 8 * 2;
    } else {
      return panel + row * 64 + ((piece ^ (row >> 1 & 3)) << 4) + col % 8 * 2;
    }
  }
};

// load starts copies of rows [row, row + ROWS) of one head to shared memory; rows outside
// [lo, hi) and columns from dim on become 0.
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void load(unsigned smem, const unsigned short* src, long long stride, int row, int lo, int hi, int dim, bool aligned) {
  constexpr int PIECES = COLS / 8;
  if (aligned) {
    constexpr int PASS = THREADS / PIECES; // rows at a time
    unsigned thread = threadIdx.x;
    hide_value(thread); // as in InShared
    int r = thread / PIECES, col = thread % PIECES * 8;
    const unsigned short* x = src + (row + r) * stride + col;
#pragma unroll
    for (int i = 0; i < ROWS; i += PASS) {
      bool mine = (THREADS % PIECES == 0 || r < PASS) && (ROWS % PASS == 0 || i + r < ROWS);
      bool valid = (unsigned)(row + r + i - lo) < (unsigned)(hi - lo) && col < dim;
      if (mine) {
        copy16(smem + Operand<ROWS, COLS>::offset(r + i, col), x, valid);
      }
      x += PASS * stride;
    }
    return;
  }
  for (int at = threadIdx.x; at < ROWS * PIECES; at += THREADS) {
    int r = at / PIECES, col = at % PIECES * 8;
    const unsigned short* x = src + (row + r) * stride;
    bool valid = row + r >= lo && row + r < hi;
    unsigned w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned a = valid && col + 2 * j < dim ? x[col + 2 * j] : 0;
      unsigned b = valid && col + 2 * j + 1 < dim ? x[col + 2 * j + 1] : 0;
      w[j] = a | b << 16;
    }
    store_shared(smem + Operand<ROWS, COLS>::offset(r, col), w[0], w[1], w[2], w[3]);
  }
}

// InShared is an operand of multiply that lies in shared memory as [outer][k], or, TRANS, as
// [k][outer]; outer is m of A and n of B. A warp's part of it begins at a multiple of ALIGN.
template <int ROWS, int COLS, bool TRANS, int ALIGN = 64> struct InShared {
  using Tile = Operand<ROWS, COLS>;
  unsigned of_a, of_b; // what a lane addresses of the first fragment, as A and as B
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

  // hide keeps the compiler from making all addresses ahead of a loop around the product.
  __device__ __forceinline__ void hide() {
    hide_value(of_a);
    hide_value(of_b);
  }

  // move is an address (row, col) further on, both multiples of 16 (row: of 8). Permuting
  // pieces is an exclusive or of row and column, so that of the column can come later; it costs
  // an instruction where keeping all addresses costs registers.
  static __device__ __forceinline__ unsigned move(unsigned address, int row, int col) {
    return (address + Tile::offset(row, 0) + Tile::offset(0, col / Tile::PANEL * Tile::PANEL)) ^ (col % Tile::PANEL * 2);
  }

  // a is A's fragment of 16 outer by 16 k; b is B's of two times 8 outer by 16 k.
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

// InRegisters is A that is what an earlier product left in registers, rounded to T.
template <class T, int MT, int NT> struct InRegisters {
  unsigned x[MT][NT / 2][4];

  __device__ __forceinline__ explicit InRegisters(const float (&c)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT * 2; n++) {
        x[m][n / 4][n % 4] = pack<T>(c[m][n / 2][n % 2 * 2], c[m][n / 2][n % 2 * 2 + 1]);
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

// multiply adds A B, over K, to c: 16 MT by 8 NT, a warp's part of a product.
template <class T, int K, int MT, int NT, class A, class B> __device__ __forceinline__ void multiply(float (&c)[MT][NT][4], A a, B b) {
  static_assert(NT % 2 == 0 && K % 16 == 0, "shape");
  a.hide();
  b.hide();
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    unsigned fa[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      a.a(fa[m], 16 * m, k);
    }
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      unsigned fb[4];
      b.b(fb, 8 * n, k);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma<T>(c[m][n], fa[m], fb[0], fb[1]);
        mma<T>(c[m][n + 1], fa[m], fb[2], fb[3]);
      }
    }
  }
}

template <int MT, int NT> __device__ __forceinline__ void clear(float (&c)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
    }
  }
}

// tanh_score is tanh with an absolute error of a few roundings of 1, which is what a score
// wants; tanh.approx has only 11 bits.
__device__ __forceinline__ float tanh_score(float x) {
  return 1 - __fdividef(2, 1 + exp2_fast(2 * LOG2E * x));
}

// transform makes scores of products where a factor alone does not do it.
template <int MT, int NT> __device__ __forceinline__ void transform(float (&s)[MT][NT][4], const FlashParams& p) {
  if (p.flags & CAPPED) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT * 4; n++) {
        s[m][n / 4][n % 4] = p.outer * tanh_score(p.inner * s[m][n / 4][n % 4]);
      }
    }
  } else if (p.flags & SCALED) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT * 4; n++) {
        s[m][n / 4][n % 4] *= p.inner;
      }
    }
  }
}
