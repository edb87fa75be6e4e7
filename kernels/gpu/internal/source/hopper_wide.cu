// Attention forward for Hopper with head dims over 256. The registers of two warpgroups hold O of only 64 queries, so
// the warpgroups have roles. One loads. One computes P, the probabilities of BN keys at a time, and stores it in shared
// memory. Two multiply P with V, each for half of the columns. P is up to two steps ahead, so that the tensor cores
// have work during softmax. K comes in panels of 64 columns, V in pieces of 32 keys and half of the columns. The rest
// is as in hopper_forward.cu.
//
// Compiled with HEAD, the head dim rounded up, BN, and CAP and EVERY_LANE as in hopper_forward.cu.
#include "flash_products.cuh"
#include "hopper_gates.cuh"
#include "hopper_lanes.cuh"

constexpr int BM = 64, HALF = HEAD / 2;
constexpr int KEYS = BN / 2, VALUES = HALF / 2; // floats of a thread in a product
constexpr int THREADS = 512, WEIGHING_REGISTERS = 65536 / 128 - PRODUCER_REGISTERS - 2 * CONSUMER_REGISTERS;
constexpr int STAGES = 4; // of K, and of V
constexpr int ROWS = 32;  // keys of a piece of V
constexpr int LOADED = 4;
__device__ __forceinline__ void rows_sync() { some_sync(1, 256); }
#include "hopper_forward.cuh"

using QTile = Panels<BM, HEAD>;
using KPiece = Panels<BN, 64>;
using VPiece = Panels<ROWS, HALF>;
using PTile = Panels<BM, BN>;
constexpr int PIECES = HEAD / 64;
static_assert(PIECES == 2 * BN / ROWS, "K and V have as many pieces");
static_assert(PIECES % STAGES == 0, "a step begins with the first stage");

constexpr int BEGIN = 8; // of Step.flags: the first step of a block of queries

// Passed is what a step of the probabilities passes to the products with V.
struct Passed {
  static constexpr int WORK = 0, STEP = 16, SHRINK = 32, BASE = SHRINK + 4 * BM, SUM = BASE + 4 * BM,
                       BYTES = SUM + 4 * BM;
};

struct Shared {
  static constexpr int Q = 0, K = Q + QTile::BYTES, V = K + STAGES * KPiece::BYTES, P = V + STAGES * VPiece::BYTES,
                       PASSED = P + 2 * PTile::BYTES, STEP = PASSED + 2 * Passed::BYTES, WORK = STEP + 16;
  static constexpr int Q_FULL = WORK + 16, Q_EMPTY = Q_FULL + 8, K_FULL = Q_EMPTY + 8, K_EMPTY = K_FULL + 8 * STAGES;
  static constexpr int V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES, P_FULL = V_EMPTY + 8 * STAGES,
                       P_EMPTY = P_FULL + 16, BYTES = P_EMPTY + 16;
};

// Loads are the loads of a block, in the order of their use.
struct Loads {
  const HopperForward& x;
  unsigned base;
  Turn<STAGES> k, v;
  bool later = false;     // V of the step before is still to come
  int other, head, batch; // of that V

  __device__ __forceinline__ void load_k(int piece, int next, int kv_head, int of) {
    barrier_wait(base + Shared::K_EMPTY + 8 * k.stage, k.parity ^ 1);
    load_panels<1>(base + Shared::K + k.stage * KPiece::BYTES, KPiece::PANEL, x.k, base + Shared::K_FULL + 8 * k.stage,
        next, kv_head, of, 64 * piece);
    k.next();
  }

  __device__ __forceinline__ void load_v(int piece) {
    barrier_wait(base + Shared::V_EMPTY + 8 * v.stage, v.parity ^ 1);
    load_panels<VPiece::COUNT>(base + Shared::V + v.stage * VPiece::BYTES, VPiece::PANEL, x.v,
        base + Shared::V_FULL + 8 * v.stage, other + piece / 2 * ROWS, head, batch, piece % 2 * HALF);
    v.next();
  }

  // step loads K of the next step, and V of the one before.
  __device__ __forceinline__ void step(int next, int kv_head, int of) {
#pragma unroll 1
    for (int i = 0; i < PIECES; i++) {
      load_k(i, next, kv_head, of);
      if (later) {
        load_v(i);
      }
    }
    other = next, head = kv_head, batch = of, later = true;
  }

  __device__ __forceinline__ void rest() {
#pragma unroll 1
    for (int i = 0; later && i < PIECES; i++) {
      load_v(i);
    }
    later = false;
  }
};

// produce assigns work and starts its loads. One thread runs it.
__device__ __forceinline__ void produce(const HopperForward& x, unsigned base) {
  const FlashParams& p = x.p;
  Loads loads{x, base};
  unsigned passed = 0;
  const int total = x.all_heads * x.blocks;
  for (unsigned parity = 0;; parity ^= 1) {
    const int item = atomicInc(x.next, total + gridDim.x - 1); // the last call sets it to 0 again
    barrier_wait(base + Shared::Q_EMPTY, parity ^ 1);
    if (item >= total) {
      loads.rest();
      tell(base + Shared::WORK, 0, 0, 0, OVER);
      barrier_arrive(base + Shared::Q_FULL);
      return;
    }
    Work work;
    const int block = take(x, item, work), kv_head = work.head / (p.heads / p.kv_heads);
    QueryWalk walk(p, work.own);
    bool more = walk.next();
    tell(base + Shared::WORK, work.own, work.head, work.batch, more ? SOME : NOTHING);
    if (!more) {
      loads.rest();
      barrier_arrive(base + Shared::Q_FULL);
      continue;
    }
    load_panels<QTile::COUNT>(base + Shared::Q, QTile::PANEL, x.q, base + Shared::Q_FULL, work.own,
        work.head, work.batch);
    if (x.needs) { // the block before must not wait for keys of this one
      loads.rest();
    }
    pass_gates(x.needs, x.gates, block, passed);
    for (int begin = BEGIN; more; begin = 0) {
      const int other = walk.other, tile = walk.index, end = p.tile(tile).other_hi;
      int flags = begin | (walk.whole() ? 0 : MASKED) | (other + BN > end && end < p.seq_k ? RAGGED : 0);
      more = walk.next();
      flags |= more ? 0 : FINAL;
      barrier_wait(base + Shared::K_EMPTY, loads.k.parity ^ 1);
      tell(base + Shared::STEP, other, tile, flags, 0);
      loads.step(other, kv_head, work.batch);
    }
  }
}

// scores computes the scores of a step, and releases K.
template <class T>
__device__ __forceinline__ Step scores(float (&s)[KEYS], unsigned base, const Lane& lane, Turn<STAGES>& k) {
  Step step;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    barrier_wait(base + Shared::K_FULL + 8 * k.stage, k.parity);
    if (i == 0) {
      step = step_at(base + Shared::STEP);
    }
    wg_begin();
#pragma unroll
    for (int j = 0; j < 64; j += 16) {
      wg_multiply<T, false, false>(s, QTile::along(base + Shared::Q, 0, 64 * i + j),
          KPiece::along(base + Shared::K + k.stage * KPiece::BYTES, 0, j), i + j > 0);
    }
    wg_commit();
    if (i > 0) {
      wg_wait<1>();
      release(base + Shared::K_EMPTY + 8 * ((k.stage + STAGES - 1) % STAGES), lane);
    }
    k.next();
  }
  wg_wait<0>();
  hold(s);
  release(base + Shared::K_EMPTY + 8 * ((k.stage + STAGES - 1) % STAGES), lane);
  return step;
}

// weigh computes probabilities. A warpgroup runs it.
template <class T> __device__ __forceinline__ void weigh(const HopperForward& x, unsigned base) {
  const FlashParams& p = x.p;
  const Lane lane;
  Turn<STAGES> k;
  Turn<2> turn;
  for (unsigned parity = 0;; parity ^= 1) {
    barrier_wait(base + Shared::Q_FULL, parity);
    const Work work = work_at(base + Shared::WORK);
    Rows rows;
    Step step = {0, -1, FINAL, 0};
    do {
      float s[KEYS], shrink[2] = {1, 1};
      if (work.kind == SOME) {
        step = scores<T>(s, base, lane, k);
      }
      if (step.flags & FINAL && work.kind != OVER) {
        release(base + Shared::Q_EMPTY, lane);
      }
      if (work.kind == SOME) {
        score(s, p);
        if (step.flags & MASKED) {
          mask(s, p, step, work.own + lane.row, lane.col);
        }
        soften(s, rows, shrink, p.unit);
      }
      const unsigned to = base + Shared::PASSED + turn.stage * Passed::BYTES;
      barrier_wait(base + Shared::P_EMPTY + 8 * turn.stage, turn.parity ^ 1);
      if (work.kind == SOME) {
        const int l = threadIdx.x % 32, row = lane.row - l / 4 + l % 16, col = l / 16 * 8;
#pragma unroll
        for (int i = 0; i < KEYS; i += 8) {
          stmatrix(base + Shared::P + turn.stage * PTile::BYTES + PTile::offset(row, 2 * i + col),
              pack<T>(s[i], s[i + 1]), pack<T>(s[i + 2], s[i + 3]), pack<T>(s[i + 4], s[i + 5]),
              pack<T>(s[i + 6], s[i + 7]));
        }
        shared_for_engine();
      }
      if (step.flags & FINAL) {
        settle(p, rows, work.own + lane.row, step.tile);
      }
      if (lane.col == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const unsigned row = to + 4 * (lane.row + 8 * r);
          store_shared(row + Passed::SHRINK, __float_as_uint(shrink[r]));
          store_shared(row + Passed::BASE, __float_as_uint(rows.base[r]));
          store_shared(row + Passed::SUM, __float_as_uint(rows.sum[r]));
        }
      }
      if (threadIdx.x == 128) {
        tell(to + Passed::WORK, work.own, work.head, work.batch, work.kind);
        tell(to + Passed::STEP, step.other, step.tile, step.flags, 0);
      }
      release(base + Shared::P_FULL + 8 * turn.stage, lane);
      turn.next();
    } while (!(step.flags & FINAL));
    if (work.kind == OVER) {
      return;
    }
  }
}

// blank zeroes the rows of a piece of V that are in no tile: 0 times NaN is NaN. A warpgroup calls it.
__device__ __forceinline__ void blank(unsigned v, int first, int half) {
  for (int row = max(first, 0) + threadIdx.x % 128 / 32; row < ROWS; row += 4) {
    const int i = threadIdx.x % 32;
    store_shared(v + i / 8 * VPiece::PANEL + row * 128 + i % 8 * 16, 0, 0, 0, 0);
  }
  shared_for_engine();
  some_sync(2 + half, 128);
}

// products_pv starts o += P V for 16 keys. ptxas refuses a product of 256 columns in a block of 512 threads, which
// start with 128 registers each.
template <class T>
__device__ __forceinline__ void products_pv(float (&o)[VALUES], unsigned long long y, unsigned v, int key, bool keep) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float(&part)[VALUES / 2] = *(float(*)[VALUES / 2])(o + i * (VALUES / 2));
    wg_multiply<T, false, true>(part, y, VPiece::across(v, key, i * (HALF / 2)), keep);
  }
}

// sum multiplies probabilities with half of V's columns. A warpgroup runs it.
template <class T> __device__ __forceinline__ void sum(const HopperForward& x, unsigned base) {
  const FlashParams& p = x.p;
  Lane lane;
  const int half = lane.group - 1;
  lane.row -= 64 * lane.group;
  Turn<2> turn;
  Turn<STAGES / 2> v; // of the stages of this half
  State state;
  for (;;) {
    barrier_wait(base + Shared::P_FULL + 8 * turn.stage, turn.parity);
    const unsigned passed = base + Shared::PASSED + turn.stage * Passed::BYTES;
    const Work work = work_at(passed + Passed::WORK);
    const Step step = step_at(passed + Passed::STEP);
    if (work.kind == OVER) {
      return;
    }
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const unsigned row = passed + 4 * (lane.row + 8 * r);
      shrink[r] = load_shared(row + Passed::SHRINK);
      state.base[r] = load_shared(row + Passed::BASE);
      state.sum[r] = load_shared(row + Passed::SUM);
    }
    if (work.kind == SOME) {
      shrink_values(state.o, shrink);
      const unsigned y = base + Shared::P + turn.stage * PTile::BYTES;
      const int end = step.flags & RAGGED ? p.tile(step.tile).other_hi - step.other : BN;
#pragma unroll
      for (int i = 0; i < BN; i += ROWS) {
        const int stage = 2 * v.stage + half;
        const unsigned at = base + Shared::V + stage * VPiece::BYTES;
        barrier_wait(base + Shared::V_FULL + 8 * stage, v.parity);
        if (end < i + ROWS) {
          blank(at, end - i, half);
        }
        wg_begin();
#pragma unroll
        for (int j = 0; j < ROWS; j += 16) {
          products_pv<T>(state.o, PTile::along(y, 0, i + j), at, j, i + j > 0 || !(step.flags & BEGIN));
        }
        wg_commit();
        if (i > 0) {
          wg_wait<1>();
          release(base + Shared::V_EMPTY + 8 * (stage ^ 2), lane);
        }
        v.next();
      }
      wg_wait<0>();
      hold(state.o);
      release(base + Shared::V_EMPTY + 8 * (2 * (v.stage ^ 1) + half), lane);
    }
    release(base + Shared::P_EMPTY + 8 * turn.stage, lane);
    turn.next();
    if (step.flags & FINAL) {
      fold<T>(x, state, work, lane, half * HALF);
    }
  }
}

template <class T> __device__ __forceinline__ void forward(const HopperForward& x) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = smem_address(shared);
  if (threadIdx.x == 0) {
    constexpr int WARPGROUP = 4 * LANES;
    barrier_init(base + Shared::Q_FULL, 1);
    barrier_init(base + Shared::Q_EMPTY, WARPGROUP);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + Shared::K_FULL + 8 * i, 1);
      barrier_init(base + Shared::K_EMPTY + 8 * i, WARPGROUP);
      barrier_init(base + Shared::V_FULL + 8 * i, 1);
      barrier_init(base + Shared::V_EMPTY + 8 * i, WARPGROUP);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(base + Shared::P_FULL + 8 * i, WARPGROUP);
      barrier_init(base + Shared::P_EMPTY + 8 * i, 2 * WARPGROUP);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    wg_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      produce(x, base);
    }
  } else if (threadIdx.x < 256) {
    wg_registers_fewer<WEIGHING_REGISTERS>();
    weigh<T>(x, base);
  } else {
    wg_registers_more<CONSUMER_REGISTERS>();
    sum<T>(x, base);
  }
}

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) \
      hopper_forward_##name(const __grid_constant__ HopperForward x) { \
    forward<T>(x); \
  }
FOR_TYPES(ENTRY)
