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
constexpr int LOADED = HEAD_V / 8 < 16 ? HEAD_V / 8 : 16;
__device__ __forceinline__ void rows_sync() { __syncwarp(); }
#include "hopper_forward.cuh"

struct Shared {
  static constexpr int Q = 0, K = Q + QTile::BYTES, V = K + STAGES * KTile::BYTES, P = V + STAGES * VTile::BYTES,
                       STEPS = P + SHARED_P * PTile::BYTES;
  static constexpr int WORK = STEPS + STAGES * 16, BARRIERS = WORK + 16;
  static constexpr int Q_FULL = BARRIERS, Q_EMPTY = Q_FULL + 8, K_FULL = Q_EMPTY + 8, K_EMPTY = K_FULL + 8 * STAGES;
  static constexpr int V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES, BYTES = V_EMPTY + 8 * STAGES;
};

// produce assigns work and starts its loads. One thread runs it.
__device__ __forceinline__ void produce(const HopperForward& x, unsigned base) {
  const FlashParams& p = x.p;
  Turn<STAGES> turn;
  unsigned free = 1; // the parity of the phase in which the consumers read Q
  unsigned passed = 0;
  const int total = x.all_heads * x.blocks;
  for (;;) {
    const int item = atomicInc(x.next, total + gridDim.x - 1); // the last call sets it to 0 again
    if (item >= total) {
      break;
    }
    Work work;
    const int block = take(x, item, work), own = work.own, head = work.head, batch = work.batch;
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

// consume computes one block of queries, and returns its last tile.
template <class T>
__device__ __forceinline__ int consume(
    const HopperForward& x, unsigned base, const Work& work, const Lane& lane, State& state, Turn<STAGES>& turn) {
  const FlashParams& p = x.p;
  const unsigned q = base + Shared::Q;
  float s[KEYS], shrink[2];
  unsigned y[KEYS / 2];

  barrier_wait(base + Shared::K_FULL + 8 * turn.stage, turn.parity);
  Step step = step_at(base + Shared::STEPS + 16 * turn.stage);
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
    const Turn<STAGES> before = turn;
    const unsigned v = base + Shared::V + before.stage * VTile::BYTES;
    turn.next();
    barrier_wait(base + Shared::V_FULL + 8 * before.stage, before.parity);
    if (step.flags & RAGGED) {
      blank(p, v, step);
    }
    barrier_wait(base + Shared::K_FULL + 8 * turn.stage, turn.parity);
    step = step_at(base + Shared::STEPS + 16 * turn.stage);
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
  Turn<STAGES> turn;
  for (unsigned parity = 0;; parity ^= 1) {
    barrier_wait(base + Shared::Q_FULL, parity);
    const Work work = work_at(base + Shared::WORK);
    if (work.kind == OVER) {
      return;
    }
    State state;
    int tile = -1;
    if (work.kind == SOME) {
      tile = consume<T>(x, base, work, lane, state, turn);
    } else {
      release(base + Shared::Q_EMPTY, lane);
    }
    settle(x.p, state, work.own + lane.row, tile);
    fold<T>(x, state, work, lane);
  }
}

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) \
      hopper_forward_##name(const __grid_constant__ HopperForward x) { \
    forward<T>(x); \
  }
FOR_TYPES(ENTRY)
