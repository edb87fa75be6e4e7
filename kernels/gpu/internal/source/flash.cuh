// Common parts of the flash kernels: their parameters and the walk over tiles. flash_products.cuh has
// their products.
//
// A block of the grid has "own" rows (queries in the forward pass, keys in the backward pass) and
// visits "other" rows. The host transposes tiles accordingly.
//
// Compiled with INLINE_TILES, the number of tiles that fit the arguments.
#pragma once
#include "mma.cuh"

// Strided is a tensor [batch, seq, heads, dim]; strides count elements; dim has stride 1.
struct Strided {
  void* at;
  long long batch, seq, head;
};

// A Tile lets own row i see other row j if lo <= j - i <= hi. Tiles are sorted by own_lo. reach is the largest own_hi
// so far; with it, a binary search finds the tiles that overlap a block.
struct Tile {
  int own_lo, own_hi, other_lo, other_hi, lo, hi, reach, unused;
};

// Bits of FlashParams.flags.
constexpr int ALIGNED = 1;   // q, k, v, do: rows consist of aligned pieces of 16 bytes
constexpr int ALIGNED_O = 2; // accumulators: the same
constexpr int SCALED = 4;    // scores are first multiplied by inner
constexpr int CAPPED = 8;    // scores are outer * tanh(inner * q.k)

struct FlashParams {
  Strided q, k, v, dout, o, lse, delta, dq, dk, dv; // o: the accumulator
  const Tile* tiles;                                // NULL: the tiles are in few
  int tile_count, seq_q, seq_k, heads, kv_heads, dim, dim_v, flags;
  // A probability is exp2(unit * s - LSE * log2 e), unit > 0. Gradients of q and k are scaled
  // by scale.
  float unit, inner, outer, inverse, scale; // inverse: 1 / outer
  int unused;
  Tile few[INLINE_TILES];

  __device__ const Tile& tile(int i) const { return tiles ? tiles[i] : few[i]; }
};

#define INF __int_as_float(0x7f800000)
static_assert(sizeof(FlashParams) == 768, "FlashParams of params.go is laid out so");

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

template <class T> __device__ __forceinline__ T* head_of(const Strided& s, int batch, int head) {
  return (T*)s.at + batch * s.batch + head * s.head;
}

// A Walk visits, tile by tile, the blocks of STEP other rows that are visible to any of the own rows
// [own, own + OWN). It has few fields, since the kernels are short of registers.
template <int OWN, int STEP> struct Walk {
  const FlashParams& p;
  int own, index, end_tile; // the current tile, and the first that cannot overlap the block
  int other, end;           // the block begins at other; the tile's last block ends before end
  int begin;                // down: the beginning of the tile's first block

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

  // first returns the index of the first tile for which after holds. It then also holds for all
  // later tiles.
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

  // next advances to the next block and returns false if there is none.
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

  // A walk down visits the same blocks in reverse order: previous goes from the last to the first.
  __device__ __forceinline__ void restart_down() {
    index = end_tile;
    other = begin = 0;
  }

  __device__ __forceinline__ bool previous() {
    other -= STEP;
    while (other < begin) {
      if (--index < first_tile()) {
        return false;
      }
      const Tile& t = tile();
      int lo = max(own, t.own_lo), hi = min(own + OWN, t.own_hi);
      begin = max(t.other_lo, lo + t.lo);
      end = lo < hi ? min(t.other_hi, hi + t.hi) : begin;
      other = begin + (end - begin + STEP - 1) / STEP * STEP - STEP;
    }
    return true;
  }

  // whole reports whether every own row sees every other row of the block.
  __device__ __forceinline__ bool whole() const {
    const Tile& t = tile();
    return t.own_lo <= own && own + OWN <= t.own_hi && own + OWN - 1 + t.lo <= other &&
        other + STEP <= min(t.other_hi, own + t.hi + 1);
  }

  // covers reports whether some tile has own row i, which may see nothing.
  __device__ bool covers(int i) const {
    for (int t = first_tile(); t < end_tile; t++) {
      if (p.tile(t).own_lo <= i && i < p.tile(t).own_hi) {
        return true;
      }
    }
    return false;
  }

  // sees reports whether own row i sees any other row.
  __device__ bool sees(int i) const {
    for (int n = first_tile(); n < end_tile; n++) {
      const Tile& t = p.tile(n);
      if (t.own_lo <= i && i < t.own_hi && max(t.other_lo, i + t.lo) < min(t.other_hi, i + t.hi + 1)) {
        return true;
      }
    }
    return false;
  }
};

// NOT_A_NUMBER is the sum of a row if all its keys have scores of -inf, which only a broken input gives.
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
