// Attention forward for Hopper, after FlashAttention-3 (arXiv:2407.08608): a block of threads takes BM
// queries of a head, 64 for each of its GROUPS consumer warpgroups, and visits blocks of BN keys. One thread
// of another warpgroup loads Q, K and V with TMA, two blocks ahead. While a warpgroup computes the
// probabilities of its scores, the tensor cores compute products of the others, and its own product
// with the probabilities of the previous block.
//
// The grid is as large as the GPU, and its blocks take more queries when they are done with theirs.
// At the end, the kernel folds in earlier results, O and LSE in global memory.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, GROUPS, BN, STAGES, the number of blocks to load ahead,
// and CAP, 1 if scores may take more than a factor. With SHARED_P, products read probabilities from shared memory, not
// from registers. That is slower and for tests: the bits differ only if the compiler assigned wrong registers.
// EVERY_LANE is also for tests; see hopper_lanes.cuh.
#include "flash_products.cuh"
#include "hopper_gates.cuh"
#include "hopper_lanes.cuh"

constexpr int BM = 64 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int KEYS = BN / 2, VALUES = HEAD_V / 2; // floats of a thread in a product

using QTile = Panels<BM, HEAD_QK>;
using KTile = Panels<BN, HEAD_QK>;
using VTile = Panels<BN, HEAD_V>;
using PTile = Panels<BM, BN>;
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

struct Shared {
  static constexpr int Q = 0, K = Q + QTile::BYTES, V = K + STAGES * KTile::BYTES, P = V + STAGES * VTile::BYTES,
                       STEPS = P + SHARED_P * PTile::BYTES;
  static constexpr int WORK = STEPS + STAGES * 16, BARRIERS = WORK + 16;
  static constexpr int Q_FULL = BARRIERS, Q_EMPTY = Q_FULL + 8, K_FULL = Q_EMPTY + 8, K_EMPTY = K_FULL + 8 * STAGES;
  static constexpr int V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES, BYTES = V_EMPTY + 8 * STAGES;
};

// A Turn cycles through the stages of a buffer. parity names the phase in which the current stage is
// filled; in the opposite phase, the stage was emptied.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int COUNT>
__device__ __forceinline__ void load_panels(
    unsigned to, int bytes, const TensorMap& map, unsigned barrier, int row, int head, int batch) {
  barrier_expect(barrier, COUNT * bytes);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    copy_box(to + i * bytes, map, barrier, 64 * i, row, head, batch);
  }
}

__device__ __forceinline__ void tell(unsigned at, int a, int b, int c, int d) {
  store_shared(at, (unsigned)a, (unsigned)b, (unsigned)c, (unsigned)d);
}

// produce assigns work and starts its loads. One thread runs it.
__device__ __forceinline__ void produce(const HopperForward& x, unsigned base) {
  const FlashParams& p = x.p;
  Turn turn;
  unsigned free = 1; // the parity of the phase in which the consumers read Q
  unsigned passed = 0;
  const int early = x.all_heads * x.early, total = x.all_heads * x.blocks;
  for (;;) {
    const int item = atomicInc(x.next, total + gridDim.x - 1); // the last call sets it to 0 again
    if (item >= total) {
      break;
    }
    const bool late = item >= early;
    const int number = late ? item - early : item, section = x.heads_beside * (late ? x.blocks - x.early : x.early),
              rest = number % section;
    const int at = rest / x.heads_beside + (late ? x.early : 0),
              both = number / section * x.heads_beside + rest % x.heads_beside;
    const int block = x.order ? x.order[at] : x.blocks - 1 - at, own = block * BM, head = both % p.heads,
              batch = both / p.heads;
    QueryWalk walk(p, own);
    bool more = walk.next();
    if (!more && !(x.pass & (FIRST | LAST))) {
      continue;
    }
    barrier_wait(base + Shared::Q_EMPTY, free);
    free ^= 1;
    tell(base + Shared::WORK, own, head, batch, more ? SOME : NOTHING);
    if (!more) {
      barrier_arrive(base + Shared::Q_FULL);
      continue;
    }
    load_panels<QTile::COUNT>(base + Shared::Q, QTile::PANEL, x.q, base + Shared::Q_FULL, own, head, batch);
    const int kv_head = head / (p.heads / p.kv_heads);
    pass_gates(x.needs, x.gates, block, passed);
    while (more) {
      const int other = walk.other, tile = walk.index, end = p.tile(tile).other_hi;
      int flags = (walk.whole() ? 0 : MASKED) | (other + BN > end && end < p.seq_k ? RAGGED : 0);
      more = walk.next();
      flags |= more ? 0 : FINAL;
      barrier_wait(base + Shared::K_EMPTY + 8 * turn.stage, turn.parity ^ 1);
      tell(base + Shared::STEPS + 16 * turn.stage, other, tile, flags, 0);
      load_panels<KTile::COUNT>(base + Shared::K + turn.stage * KTile::BYTES, KTile::PANEL, x.k,
          base + Shared::K_FULL + 8 * turn.stage, other, kv_head, batch);
      barrier_wait(base + Shared::V_EMPTY + 8 * turn.stage, turn.parity ^ 1);
      load_panels<VTile::COUNT>(base + Shared::V + turn.stage * VTile::BYTES, VTile::PANEL, x.v,
          base + Shared::V_FULL + 8 * turn.stage, other, kv_head, batch);
      turn.next();
    }
  }
  barrier_wait(base + Shared::Q_EMPTY, free);
  tell(base + Shared::WORK, 0, 0, 0, OVER);
  barrier_arrive(base + Shared::Q_FULL);
}

__device__ __forceinline__ Step step_at(unsigned base, int stage) {
  Step s;
  load_shared_words(base + Shared::STEPS + 16 * stage, s.other, s.tile, s.flags, s.unused);
  return s;
}

// State holds a quarter of each of two rows of the warpgroup, 8 apart.
struct State {
  float o[VALUES]; // sum of exp2(unit * s - base) v
  float base[2];   // unit times the largest score, -inf before any
  float sum[2];    // sum of exp2(unit * s - base), over this thread's columns
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

// blank zeroes the rows of V that are in no tile: 0 times NaN is NaN. All consumers call it.
__device__ __forceinline__ void blank(const FlashParams& p, unsigned v, const Step& step) {
  for (int row = p.tile(step.tile).other_hi - step.other + (threadIdx.x - 128) / 32; row < BN; row += 4 * GROUPS) {
    for (int i = threadIdx.x % 32; i < VTile::COUNT * 8; i += 32) {
      store_shared(v + i / 8 * VTile::PANEL + row * 128 + i % 8 * 16, 0, 0, 0, 0);
    }
  }
  shared_for_engine();
  some_sync(1 + GROUPS, 128 * GROUPS);
}

// score computes scores from products if that takes more than a factor.
__device__ __forceinline__ void score(float (&s)[KEYS], const FlashParams& p) {
  if (!CAP) {
    return;
  }
  if (p.flags & CAPPED) {
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      s[i] = p.outer * tanh_score(p.inner * s[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      s[i] *= p.inner;
    }
  }
}

// mask hides the pairs that the step's tile hides.
__device__ __forceinline__ void mask(float (&s)[KEYS], const FlashParams& p, const Step& step, int row, int col) {
  const Tile& tile = p.tile(step.tile);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r, column = step.other + col;
    const bool in = i >= tile.own_lo && i < tile.own_hi;
    const int lo = i + tile.lo - column, hi = (in ? min(tile.other_hi, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int c = 0; c < KEYS / 2; c++) {
      const int j = c / 2 * 8 + c % 2;
      float& x = s[c / 2 * 4 + 2 * r + c % 2];
      x = j >= lo && j < hi ? x : -INF;
    }
  }
}

// soften turns scores into probabilities relative to a base. o must be rescaled to it.
__device__ __forceinline__ void soften(float (&s)[KEYS], State& state, float (&shrink)[2], float unit) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int c = 1; c < KEYS / 4; c++) {
      most = fmaxf(most, fmaxf(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    const float old = state.base[r];
    state.base[r] = fmaxf(old, most * unit);
    const float base = state.base[r] == -INF ? 0 : state.base[r]; // a row that has seen no key gets zeros
    shrink[r] = exp2_fast(old - base);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < KEYS / 4; c++) {
      float &a = s[4 * c + 2 * r], &b = s[4 * c + 2 * r + 1];
      a = exp2_fast(a * unit - base);
      b = exp2_fast(b * unit - base);
      sum += a + b;
    }
    state.sum[r] = state.sum[r] * shrink[r] + sum;
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

// round_off converts probabilities to the left operand of the next product.
template <class T>
__device__ __forceinline__ void round_off(
    unsigned (&y)[KEYS / 2], const float (&s)[KEYS], unsigned base, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    y[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }
  if (SHARED_P) {
    const int l = threadIdx.x % 32, row = lane.row - l / 4 + l % 16, col = l / 16 * 8;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
      stmatrix(base + Shared::P + PTile::offset(row, 4 * i + col), y[i], y[i + 1], y[i + 2], y[i + 3]);
    }
    shared_for_engine();
    some_sync(2 + GROUPS + lane.group, 128);
  }
}

// products_qk starts s = Q K', and products_pv starts o += P V.
template <class T> __device__ __forceinline__ void products_qk(float (&s)[KEYS], unsigned q, unsigned k, int row) {
#pragma unroll
  for (int i = 0; i < HEAD_QK; i += 16) {
    wg_multiply<T, false, false>(s, QTile::along(q, row, i), KTile::along(k, 0, i), i > 0);
  }
  wg_commit();
}

template <class T>
__device__ __forceinline__ void products_pv(
    float (&o)[VALUES], const unsigned (&y)[KEYS / 2], unsigned p, unsigned v, int row) {
#pragma unroll
  for (int i = 0; i < BN; i += 16) {
    const unsigned a[4] = {y[i / 4], y[i / 4 + 1], y[i / 4 + 2], y[i / 4 + 3]};
    if (SHARED_P) {
      wg_multiply<T, false, true>(o, PTile::along(p, row, i), VTile::across(v, i), true);
    } else {
      wg_multiply<T, true>(o, a, VTile::across(v, i), true);
    }
  }
  wg_commit();
}

// store_rounded writes a row's values in 16 bits. Four threads share a row. Each has two floats of each of four pieces
// of 16 bytes; they exchange them, so that each writes one piece.
template <class T>
__device__ __forceinline__ void store_rounded(
    Stored* row, const float (&o)[VALUES], int r, float factor, int dim, bool valid) {
  const int l = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < HEAD_V / 8; c += 4) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool there = c + i < HEAD_V / 8;
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

// settle sets rows with a sum of 0. If a row sees no key, it gets o = 0, since 0 times a NaN in V is NaN. Otherwise
// all its scores are -inf, and its sum becomes NaN. tile is the last one that overlaps the block; row is the thread's
// first row.
__device__ __forceinline__ void settle(const FlashParams& p, State& state, int row, int tile) {
  bool seen[2] = {};
  for (; tile >= 0 && p.tile(tile).reach > row; tile--) {
    const Tile& t = p.tile(tile);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row + 8 * r;
      seen[r] |= t.own_lo <= i && i < t.own_hi && max(t.other_lo, i + t.lo) < min(t.other_hi, i + t.hi + 1);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (state.sum[r] != 0) {
      continue;
    }
    state.sum[r] = seen[r] ? NOT_A_NUMBER : 0;
#pragma unroll
    for (int c = 0; c < HEAD_V / 8; c++) {
      state.o[4 * c + 2 * r] = state.o[4 * c + 2 * r + 1] = 0;
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

// fold merges the state with O and LSE, and stores them. tile is the last one that overlaps the block. The old state
// counts as one more key, with its LSE as the score and its O as the value. A thread loads the old O of several columns
// before it stores one, since each load after a store would wait for memory alone.
template <class T>
__device__ __forceinline__ void fold(
    const HopperForward& x, State& state, const Work& work, const Lane& lane, int tile) {
  const FlashParams& p = x.p;
  float *o = head_of<float>(p.o, work.batch, work.head), *lse = head_of<float>(p.lse, work.batch, work.head);
  Stored* out = head_of<Stored>(x.out, work.batch, work.head);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    state.sum[r] += __shfl_xor_sync(0xffffffff, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(0xffffffff, state.sum[r], 2);
  }
  if (state.sum[0] == 0 || state.sum[1] == 0) {
    settle(p, state, work.own + lane.row, tile);
  }
  constexpr int LOADED = HEAD_V / 8 < 16 ? HEAD_V / 8 : 16;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = state.sum[r];
    const int i = work.own + lane.row + 8 * r;
    const bool valid = i < p.seq_q, reads = valid && !(x.pass & FIRST);
    const float before = reads ? lse[i * p.lse.seq] * LOG2E : -INF;
    float* row = o + i * p.o.seq + lane.col;
    float2 old[LOADED];
    load_old(old, row, 0, lane.col, p.dim_v, reads);
    __syncwarp(); // all lanes of the row have read LSE
    const bool any = sum != 0; // NaN counts: a NaN or Inf of a key reaches O and LSE
    const float now = any ? state.base[r] : -INF, most = fmaxf(before, now), top = most == -INF ? 0 : most;
    float a = exp2_fast(before - top), b = any ? exp2_fast(now - top) : 0;
    const float total = a + b * sum;
    a = total != 0 ? quotient(a, total) : 0;
    b = total != 0 ? quotient(b, total) : 0;
    const bool stores = valid && !(x.pass & LAST) && (any || x.pass & FIRST);
#pragma unroll
    for (int c = 0; c < HEAD_V / 8; c++) {
      float &y = state.o[4 * c + 2 * r], &z = state.o[4 * c + 2 * r + 1];
      if (c > 0 && c % LOADED == 0) {
        load_old(old, row, c, lane.col, p.dim_v, reads);
      }
      y *= b, z *= b;
      if (reads) {
        y += a * old[c % LOADED].x, z += a * old[c % LOADED].y;
      }
      if (stores && 8 * c + lane.col < p.dim_v) {
        *(float2*)(row + 8 * c) = {y, z};
      }
    }
    if (x.pass & LAST) {
      store_rounded<T>(out + i * x.out.seq, state.o, r, 1, p.dim_v, valid);
    }
    if (valid && lane.col == 0 && (any || x.pass & FIRST)) {
      lse[i * p.lse.seq] = total != 0 ? (top + log2_of(total)) * LN2 : -INF;
    }
  }
}

// consume computes one block of queries, and returns its last tile.
template <class T>
__device__ __forceinline__ int consume(
    const HopperForward& x, unsigned base, const Work& work, const Lane& lane, State& state, Turn& turn) {
  const FlashParams& p = x.p;
  const unsigned q = base + Shared::Q;
  float s[KEYS], shrink[2];
  unsigned y[KEYS / 2];

  barrier_wait(base + Shared::K_FULL + 8 * turn.stage, turn.parity);
  Step step = step_at(base, turn.stage);
  wg_begin();
  products_qk<T>(s, q, base + Shared::K + turn.stage * KTile::BYTES, lane.group * 64);
  wg_wait<0>();
  hold(s);
  release(base + Shared::K_EMPTY + 8 * turn.stage, lane);
  score(s, p);
  if (step.flags & MASKED) {
    mask(s, p, step, work.own + lane.row, lane.col);
  }
  soften(s, state, shrink, p.unit);
  round_off<T>(y, s, base, lane);

  while (!(step.flags & FINAL)) {
    const Turn before = turn;
    const unsigned v = base + Shared::V + before.stage * VTile::BYTES;
    turn.next();
    barrier_wait(base + Shared::V_FULL + 8 * before.stage, before.parity);
    if (step.flags & RAGGED) {
      blank(p, v, step);
    }
    barrier_wait(base + Shared::K_FULL + 8 * turn.stage, turn.parity);
    step = step_at(base, turn.stage);
    some_sync(1 + lane.group, 256);
    wg_begin();
    products_qk<T>(s, q, base + Shared::K + turn.stage * KTile::BYTES, lane.group * 64);
    products_pv<T>(state.o, y, base + Shared::P, v, lane.group * 64);
    some_arrive(1 + (lane.group + 1) % GROUPS, 256);
    wg_wait<1>();
    hold(s);
    release(base + Shared::K_EMPTY + 8 * turn.stage, lane);
    score(s, p);
    if (step.flags & MASKED) {
      mask(s, p, step, work.own + lane.row, lane.col);
    }
    soften(s, state, shrink, p.unit);
    wg_wait<0>();
    hold(state.o);
    hold(y);
    release(base + Shared::V_EMPTY + 8 * before.stage, lane);
    round_off<T>(y, s, base, lane);
    shrink_values(state.o, shrink);
  }

  release(base + Shared::Q_EMPTY, lane);
  const unsigned v = base + Shared::V + turn.stage * VTile::BYTES;
  barrier_wait(base + Shared::V_FULL + 8 * turn.stage, turn.parity);
  if (step.flags & RAGGED) {
    blank(p, v, step);
  }
  wg_begin();
  products_pv<T>(state.o, y, base + Shared::P, v, lane.group * 64);
  wg_wait<0>();
  hold(state.o);
  release(base + Shared::V_EMPTY + 8 * turn.stage, lane);
  turn.next();
  return step.tile;
}

template <class T> __device__ __forceinline__ void forward(const HopperForward& x) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = smem_address(shared);
  if (threadIdx.x == 0) {
    barrier_init(base + Shared::Q_FULL, 1);
    barrier_init(base + Shared::Q_EMPTY, 4 * GROUPS * LANES);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + Shared::K_FULL + 8 * i, 1);
      barrier_init(base + Shared::V_FULL + 8 * i, 1);
      barrier_init(base + Shared::K_EMPTY + 8 * i, 4 * GROUPS * LANES);
      barrier_init(base + Shared::V_EMPTY + 8 * i, 4 * GROUPS * LANES);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    wg_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      produce(x, base);
    }
    return;
  }
  wg_registers_more<CONSUMER_REGISTERS>();
  const Lane lane;
  if (lane.group == GROUPS - 1) {
    some_arrive(1, 256); // the first warpgroup has the first turn
  }
  Turn turn;
  for (unsigned parity = 0;; parity ^= 1) {
    barrier_wait(base + Shared::Q_FULL, parity);
    Work work;
    load_shared_words(base + Shared::WORK, work.own, work.head, work.batch, work.kind);
    if (work.kind == OVER) {
      return;
    }
    State state;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      state.o[i] = 0;
    }
    state.base[0] = state.base[1] = -INF;
    state.sum[0] = state.sum[1] = 0;
    int tile = -1;
    if (work.kind == SOME) {
      tile = consume<T>(x, base, work, lane, state, turn);
    } else {
      release(base + Shared::Q_EMPTY, lane);
    }
    fold<T>(x, state, work, lane, tile);
  }
}

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) \
      hopper_forward_##name(const __grid_constant__ HopperForward x) { \
    forward<T>(x); \
  }
FOR_TYPES(ENTRY)
