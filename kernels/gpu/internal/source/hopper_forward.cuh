// Parts that the forward kernels for Hopper share: their arguments, the order of work, softmax, and the fold into
// earlier results.
//
// A file that includes it defines before BM and BN, the queries and keys of a step, VALUES, the floats of O of a
// thread, LOADED, how many pairs of old floats fold keeps in registers, and rows_sync, a barrier of the threads that
// share rows.
#pragma once

using QueryWalk = Walk<BM, BN>;

// Bits of HopperForward.pass.
constexpr int FIRST = 1; // O and LSE are not initialised
constexpr int LAST = 2;  // O goes to out, in 16 bits

struct HopperForward {
  TensorMap q, k, v;
  Strided out;
  unsigned* next;   // the number of the next item of work; 0 before and after
  const int* order; // the blocks of queries, most work first; NULL: the last first
  int pass, blocks, heads_beside, all_heads; // all_heads: over the batch, a multiple of heads_beside
  const unsigned* needs; // see pass_gates of hopper_gates.cuh
  Gate* gates;
  int early; // the first blocks in that order; all heads take them before the others, which may have to wait for keys
  int unused[11];
  FlashParams p;
};
static_assert(sizeof(HopperForward) == 3 * 128 + 128 + 768, "HopperForward of params.go is laid out so");

// The producer passes Work to the consumers with Q.
struct Work { int own, head, batch, kind; };
constexpr int NOTHING = 0, SOME = 1, OVER = 2; // kind: no query sees any key; some does; there is no more work

// A Step comes with a block of keys.
struct Step { int other, tile, flags, unused; };
constexpr int MASKED = 1, RAGGED = 2, FINAL = 4; // RAGGED: rows of V are in no tile, and may be NaN

// A Turn cycles through the stages of a buffer. parity names the phase in which the current stage is
// filled; in the opposite phase, the stage was emptied.
template <int COUNT> struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == COUNT) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int COUNT>
__device__ __forceinline__ void load_panels(
    unsigned to, int bytes, const TensorMap& map, unsigned barrier, int row, int head, int batch, int column = 0) {
  barrier_expect(barrier, COUNT * bytes);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    copy_box(to + i * bytes, map, barrier, column + 64 * i, row, head, batch);
  }
}

__device__ __forceinline__ void tell(unsigned at, int a, int b, int c, int d) {
  store_shared(at, (unsigned)a, (unsigned)b, (unsigned)c, (unsigned)d);
}

// take sets work to an item of work, and returns its block of queries.
__device__ __forceinline__ int take(const HopperForward& x, int item, Work& work) {
  const int early = x.all_heads * x.early;
  const bool late = item >= early;
  const int number = late ? item - early : item, section = x.heads_beside * (late ? x.blocks - x.early : x.early),
            rest = number % section;
  const int at = rest / x.heads_beside + (late ? x.early : 0),
            both = number / section * x.heads_beside + rest % x.heads_beside;
  const int block = x.order ? x.order[at] : x.blocks - 1 - at;
  work.own = block * BM, work.head = both % x.p.heads, work.batch = both / x.p.heads;
  return block;
}

__device__ __forceinline__ Step step_at(unsigned at) {
  Step s;
  load_shared_words(at, s.other, s.tile, s.flags, s.unused);
  return s;
}

__device__ __forceinline__ Work work_at(unsigned at) {
  Work w;
  load_shared_words(at, w.own, w.head, w.batch, w.kind);
  return w;
}

// Rows holds the softmax of two rows, 8 apart, that four threads share.
struct Rows {
  float base[2] = {-INF, -INF}; // unit times the largest score, -inf before any
  float sum[2] = {0, 0};        // sum of exp2(unit * s - base), over this thread's columns
};

// State holds a quarter of these rows of O.
struct State : Rows {
  float o[VALUES] = {}; // sum of exp2(unit * s - base) v
};

// Lane describes the position of a thread in its block.
struct Lane {
  int group, row, col; // row: the first of its rows, in the block of queries; col: its first column
  bool first;          // of its warp
  __device__ __forceinline__ Lane() {
    const int l = threadIdx.x % 32;
    group = threadIdx.x / 128 - 1;
    row = group * 64 + threadIdx.x % 128 / 32 * 16 + l / 4;
    col = l % 4 * 2;
    first = l == 0;
  }
};

// release arrives at a barrier for this warp, which has read the memory that the barrier guards.
__device__ __forceinline__ void release(unsigned barrier, const Lane& lane) {
  __syncwarp();
  if (arrives_for_warp()) {
    barrier_arrive(barrier);
  }
}

// score computes scores from products if that takes more than a factor.
__device__ __forceinline__ void score(float (&s)[BN / 2], const FlashParams& p) {
  if (!CAP) {
    return;
  }
  if (p.flags & CAPPED) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
      s[i] = p.outer * tanh_score(p.inner * s[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
      s[i] *= p.inner;
    }
  }
}

// mask hides the pairs that the step's tile hides.
__device__ __forceinline__ void mask(float (&s)[BN / 2], const FlashParams& p, const Step& step, int row, int col) {
  const Tile& tile = p.tile(step.tile);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r, column = step.other + col;
    const bool in = i >= tile.own_lo && i < tile.own_hi;
    const int lo = i + tile.lo - column, hi = (in ? min(tile.other_hi, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int c = 0; c < BN / 4; c++) {
      const int j = c / 2 * 8 + c % 2;
      float& x = s[c / 2 * 4 + 2 * r + c % 2];
      x = j >= lo && j < hi ? x : -INF;
    }
  }
}

// soften turns scores into probabilities relative to a base. o must be rescaled to it.
__device__ __forceinline__ void soften(float (&s)[BN / 2], Rows& rows, float (&shrink)[2], float unit) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int c = 1; c < BN / 8; c++) {
      most = fmaxf(most, fmaxf(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    const float old = rows.base[r];
    rows.base[r] = fmaxf(old, most * unit);
    const float base = rows.base[r] == -INF ? 0 : rows.base[r]; // a row that has seen no key gets zeros
    shrink[r] = exp2_fast(old - base);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < BN / 8; c++) {
      float &a = s[4 * c + 2 * r], &b = s[4 * c + 2 * r + 1];
      a = exp2_fast(a * unit - base);
      b = exp2_fast(b * unit - base);
      sum += a + b;
    }
    rows.sum[r] = rows.sum[r] * shrink[r] + sum;
  }
}

// shrink_values rescales o to the new base. In later blocks, a row's base changes less and less often.
__device__ __forceinline__ void shrink_values(float (&o)[VALUES], const float (&shrink)[2]) {
  if (!__any_sync(0xffffffff, shrink[0] != 1 || shrink[1] != 1)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    o[i] *= shrink[i / 2 % 2];
  }
}

// store_rounded writes a row's values in 16 bits. Four threads share a row. Each has two floats of each of four pieces
// of 16 bytes; they exchange them, so that each writes one piece.
template <class T>
__device__ __forceinline__ void store_rounded(
    Stored* row, const float (&o)[VALUES], int r, float factor, int dim, bool valid) {
  const int l = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < VALUES / 4; c += 4) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool there = c + i < VALUES / 4;
      x[i] = there ? pack<T>(factor * o[(c + i) * 4 + 2 * r], factor * o[(c + i) * 4 + 2 * r + 1]) : 0;
    }
    // Two rounds of exchanges transpose a 4 by 4 matrix of words.
    const bool odd = l & 1, high = l & 2;
    const unsigned a = __shfl_xor_sync(0xffffffff, odd ? x[0] : x[1], 1),
                   b = __shfl_xor_sync(0xffffffff, odd ? x[2] : x[3], 1);
    odd ? (x[0] = a, x[2] = b) : (x[1] = a, x[3] = b);
    const unsigned d = __shfl_xor_sync(0xffffffff, high ? x[0] : x[2], 2),
                   e = __shfl_xor_sync(0xffffffff, high ? x[1] : x[3], 2);
    high ? (x[0] = d, x[1] = e) : (x[2] = d, x[3] = e);
    const int col = (c + l) * 8;
    if (valid && col < dim) {
      *(uint4*)(row + col) = {x[0], x[1], x[2], x[3]};
    }
  }
}

// settle adds up the sums of the threads that share rows. If the sum is 0 though the row sees a key, all its scores are
// -inf, and the sum becomes NaN. tile is the last one that overlaps the block; row is the thread's first row.
__device__ __forceinline__ void settle(const FlashParams& p, Rows& rows, int row, int tile) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 2);
  }
  if (rows.sum[0] != 0 && rows.sum[1] != 0) {
    return;
  }
  for (; tile >= 0 && p.tile(tile).reach > row; tile--) {
    const Tile& t = p.tile(tile);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row + 8 * r;
      const bool seen = t.own_lo <= i && i < t.own_hi && max(t.other_lo, i + t.lo) < min(t.other_hi, i + t.hi + 1);
      rows.sum[r] = seen && rows.sum[r] == 0 ? NOT_A_NUMBER : rows.sum[r];
    }
  }
}

// load_old loads two floats of each of the columns c, c+1, ... of eight.
template <int N>
__device__ __forceinline__ void load_old(float2 (&old)[N], const float* row, int c, int col, int dim, bool reads) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    old[n] = reads && 8 * (c + n) + col < dim ? *(const float2*)(row + 8 * (c + n)) : float2{0, 0};
  }
}

// fold merges the settled state with O and LSE, and stores them. The old state counts as one more key, with its LSE as
// the score and its O as the value. A thread loads the old O of several columns before it stores one, since each load
// after a store would wait for memory alone. first is the first column of O.
template <class T>
__device__ __forceinline__ void fold(
    const HopperForward& x, State& state, const Work& work, const Lane& lane, int first = 0) {
  const FlashParams& p = x.p;
  const int dim = p.dim_v - first;
  float *o = head_of<float>(p.o, work.batch, work.head), *lse = head_of<float>(p.lse, work.batch, work.head);
  Stored* out = head_of<Stored>(x.out, work.batch, work.head);
  if (state.sum[0] == 0 || state.sum[1] == 0) { // a row that sees no key: 0 times a NaN in V is NaN
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      state.o[i] = state.sum[i / 2 % 2] == 0 ? 0 : state.o[i];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = state.sum[r];
    const int i = work.own + lane.row + 8 * r;
    const bool valid = i < p.seq_q, reads = valid && !(x.pass & FIRST);
    const float before = reads ? lse[i * p.lse.seq] * LOG2E : -INF;
    float* row = o + i * p.o.seq + first + lane.col;
    float2 old[LOADED];
    load_old(old, row, 0, lane.col, dim, reads);
    rows_sync(); // all threads of the row have read LSE
    const bool any = sum != 0; // NaN counts: a NaN or Inf of a key reaches O and LSE
    const float now = any ? state.base[r] : -INF, most = fmaxf(before, now), top = most == -INF ? 0 : most;
    float a = exp2_fast(before - top), b = any ? exp2_fast(now - top) : 0;
    const float total = a + b * sum;
    a = total != 0 ? quotient(a, total) : 0;
    b = total != 0 ? quotient(b, total) : 0;
    const bool stores = valid && !(x.pass & LAST) && (any || x.pass & FIRST);
#pragma unroll
    for (int c = 0; c < VALUES / 4; c++) {
      float &y = state.o[4 * c + 2 * r], &z = state.o[4 * c + 2 * r + 1];
      if (c > 0 && c % LOADED == 0) {
        load_old(old, row, c, lane.col, dim, reads);
      }
      y *= b, z *= b;
      if (reads) {
        y += a * old[c % LOADED].x, z += a * old[c % LOADED].y;
      }
      if (stores && 8 * c + lane.col < dim) {
        *(float2*)(row + 8 * c) = {y, z};
      }
    }
    if (x.pass & LAST) {
      store_rounded<T>(out + i * x.out.seq + first, state.o, r, 1, dim, valid);
    }
    if (valid && first + lane.col == 0 && (any || x.pass & FIRST)) {
      lse[i * p.lse.seq] = total != 0 ? (top + log2_of(total)) * LN2 : -INF;
    }
  }
}
