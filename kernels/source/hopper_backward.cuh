// How hopper_backward.cu lies in shared memory, and what the threads do that do not multiply: walk, load, and
// add dQ to global memory.
#pragma once
#include "flash.cuh"
#include "hopper.cuh"

constexpr int BN = 64 * GROUPS, CONSUMERS = 128 * GROUPS, THREADS = 128 + CONSUMERS;
// Registers of a thread. Those of a block are 65536 together.
constexpr int FEW = CAP || HEAD_QK <= 96 ? 40 : 24, MANY = FEW == 40 ? 232 : 240;
static_assert(BM % 16 == 0 && GROUPS == 2, "shape"); // a warp for each group, and two more

struct HopperBackward {
  TensorMap q, k, v, dout, dq; // boxes of 64 by BM, BN, BN, BM elements; dq: of 32 by DQ_ROWS floats
  FlashParams p;
};
static_assert(sizeof(HopperBackward) == 5 * 128 + sizeof(FlashParams), "HopperBackward of params.go is laid out so");

using Keys = Panels<BN, HEAD_QK>;
using Values = Panels<BN, HEAD_V>;
using Queries = Panels<BM, HEAD_QK>;
using Douts = Panels<BM, HEAD_V>;
using Scores = Panels<BM, BN>; // dS, as [query][key]
using KeyWalk = Walk<BN, BM>; // own rows are keys, others queries

// A warpgroup's part of dQ' is made of DQ_PARTS times 64 of the head dim by DQ_ROWS queries. Where the
// head dim does not divide, the queries do.
constexpr int DQ_PANELS = (HEAD_QK + 63) / 64;
constexpr bool BY_DIM = DQ_PANELS % GROUPS == 0;
constexpr int DQ_PARTS = BY_DIM ? DQ_PANELS / GROUPS : DQ_PANELS, DQ_ROWS = BY_DIM ? BM : BM / GROUPS;
constexpr int DQ_BOX = DQ_ROWS * 128, DQ_BYTES = DQ_PARTS * 2 * DQ_BOX; // a box is 32 floats wide
static_assert(DQ_ROWS % 8 == 0, "shape");

// Shared is the layout of shared memory.
struct Shared {
  static constexpr int K = 0, V = K + Keys::BYTES, DS = V + Values::BYTES, DQ = DS + 2 * Scores::BYTES, STAGE = DQ + GROUPS * DQ_BYTES;
  static constexpr int DO = Queries::BYTES, STAGE_BYTES = DO + Douts::BYTES; // of a stage
  static constexpr int STATS = STAGE + STAGES * STAGE_BYTES;
  // Of the stats of a stage: a Step, and for each query LSE * log2 e, and -delta.
  static constexpr int LSE = 32, DELTA = LSE + BM * 4, STATS_BYTES = DELTA + BM * 4;
  static constexpr int PLACES = STATS + STAGES * STATS_BYTES; // where the dQ of a warpgroup goes: row, head
  static constexpr int COVERED = PLACES + 16 * GROUPS;        // for each key, whether it is in a tile
  static constexpr int KEYS_FULL = COVERED + BN * 4, FULL = KEYS_FULL + 8, EMPTY = FULL + 8 * STAGES, BYTES = EMPTY + 8 * STAGES;
};
static_assert(Shared::BYTES <= 232448, "a block has no more shared memory");

// Numbers of barriers of the block between threads that share a job; see some_sync.
constexpr int ALL_CONSUMERS = 1, DQ_FULL = 2, DQ_EMPTY = DQ_FULL + GROUPS, DQ_THREADS = 128 + 32;

// Step is a block of queries, as the producer hands it to the consumers: key j sees query i where
// own_lo <= j < own_hi, lo <= i - j <= hi and i < end.
struct Step {
  int row, head, end, kind;
  int own_lo, own_hi, lo, hi;

  __device__ __forceinline__ void store(unsigned at) const {
    store_shared(at, row, head, end, kind);
    store_shared(at + 16, own_lo, own_hi, lo, hi);
  }
  __device__ __forceinline__ void load(unsigned at) {
    load_shared_words(at, row, head, end, kind);
    load_shared_words(at + 16, own_lo, own_hi, lo, hi);
  }
};
// Bits of Step.kind.
constexpr int LAST = 1;   // no step, but the end of them
constexpr int MASKED = 2; // some key does not see some query
constexpr int DIRTY = 4;  // rows from end on are in the tensor, and may be anything

// Heads is the walk of a block over all heads of the group.
struct Heads {
  KeyWalk walk;
  int head;

  __device__ __forceinline__ bool next() {
    if (walk.next()) {
      return true;
    }
    unsigned next_kv_head = blockIdx.y + 1;
    hide_value(next_kv_head); // or the compiler keeps the product in a register, which are scarce here
    if (++head * walk.p.kv_heads == next_kv_head * walk.p.heads) {
      return false;
    }
    walk.restart();
    return walk.next();
  }

  // tell stores the Step.
  __device__ __forceinline__ void tell(unsigned to, bool more) const {
    if (!more) {
      Step{0, 0, 0, LAST, 0, 0, 0, 0}.store(to);
      return;
    }
    const Tile& t = walk.tile();
    const int kind = (walk.whole() ? 0 : MASKED) | (walk.end < min(walk.other + BM, walk.p.seq_q) ? DIRTY : 0);
    Step{walk.other, head, walk.end, kind, t.own_lo, t.own_hi, t.lo, t.hi}.store(to);
  }
};

template <class P> __device__ __forceinline__ void copy_panels(unsigned dst, const TensorMap& map, unsigned barrier, int row, int head) {
#pragma unroll
  for (int i = 0; i < P::COUNT; i++) {
    copy_box(dst + i * P::PANEL, map, barrier, 64 * i, row, head, blockIdx.z);
  }
}

// produce is what the thread does that loads.
__device__ __forceinline__ void produce(const HopperBackward& b, unsigned base) {
  const FlashParams& p = b.p;
  const int kv_head = blockIdx.y, own = blockIdx.x * BN;
  Heads at{KeyWalk(p, own), kv_head * (p.heads / p.kv_heads)};
  bool more = at.next();
  if (more) {
    const unsigned full = base + Shared::KEYS_FULL;
    barrier_expect(full, Keys::BYTES + Values::BYTES);
    copy_panels<Keys>(base + Shared::K, b.k, full, own, kv_head);
    copy_panels<Values>(base + Shared::V, b.v, full, own, kv_head);
  }
  for (unsigned step = 0;; step++) {
    const unsigned stage = step % STAGES, full = base + Shared::FULL + 8 * stage;
    barrier_wait(base + Shared::EMPTY + 8 * stage, ~(step / STAGES) & 1);
    if (more) {
      const unsigned to = base + Shared::STAGE + stage * Shared::STAGE_BYTES;
      copy_panels<Queries>(to, b.q, full, at.walk.other, at.head);
      copy_panels<Douts>(to + Shared::DO, b.dout, full, at.walk.other, at.head);
    }
    at.tell(base + Shared::STATS + stage * Shared::STATS_BYTES, more);
    if (!more) {
      barrier_arrive(full);
      return;
    }
    barrier_expect(full, Shared::STAGE_BYTES);
    more = at.next();
  }
}

// fetch_stats is what the warp does that brings LSE and delta. It walks by itself, and has those of a step
// before there is room for them: they come from far.
__device__ __forceinline__ void fetch_stats(const FlashParams& p, unsigned base) {
  Heads at{KeyWalk(p, blockIdx.x * BN), (int)blockIdx.y * (p.heads / p.kv_heads)};
  bool more = at.next();
  for (unsigned step = 0;; step++) {
    unsigned lane = threadIdx.x % 32, batch = blockIdx.z;
    hide_value(batch); // or the compiler makes addresses of them ahead of the steps, for which there are no registers
    constexpr int COUNT = (BM + 31) / 32;
    float lse[COUNT], delta[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      // Where there is no such query, that of another does.
      const int row = max(min(at.walk.other + (int)lane + 32 * i, at.walk.end - 1), 0);
      lse[i] = head_of<float>(p.lse, batch, at.head)[row * p.lse.seq];
      delta[i] = head_of<float>(p.delta, batch, at.head)[row * p.delta.seq];
    }
    const unsigned stage = step % STAGES, stats = base + Shared::STATS + stage * Shared::STATS_BYTES;
    barrier_wait(base + Shared::EMPTY + 8 * stage, ~(step / STAGES) & 1);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (lane + 32 * i < BM) {
        store_shared(stats + Shared::LSE + 4 * (lane + 32 * i), __float_as_uint(lse[i] == -INF ? INF : lse[i] * LOG2E)); // INF: a row that saw nothing has probabilities 0
        store_shared(stats + Shared::DELTA + 4 * (lane + 32 * i), __float_as_uint(-delta[i]));
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(base + Shared::FULL + 8 * stage);
    }
    if (!more) {
      return;
    }
    const int head = at.head;
    more = at.next();
    at.head = more ? at.head : head; // a head that there is
  }
}

// add_queries is what the warp does that adds the dQ of a consumer to global memory.
__device__ __forceinline__ void add_queries(const HopperBackward& b, unsigned base, int consumer) {
  const unsigned from = base + Shared::DQ + consumer * DQ_BYTES;
  const int dim = BY_DIM ? consumer * DQ_PARTS * 64 : 0, first = BY_DIM ? 0 : consumer * DQ_ROWS;
  while (true) {
    some_arrive(DQ_EMPTY + consumer, DQ_THREADS);
    some_sync(DQ_FULL + consumer, DQ_THREADS);
    int row, head, kind, unused;
    load_shared_words(base + Shared::PLACES + 16 * consumer, row, head, kind, unused);
    if (kind & LAST) {
      return;
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < 2 * DQ_PARTS; i++) {
        if (dim + 32 * i < HEAD_QK) {
          add_box(b.dq, from + i * DQ_BOX, dim + 32 * i, row + first, head, blockIdx.z);
        }
      }
      adds_commit();
      adds_wait<0>();
    }
    __syncwarp();
  }
}
