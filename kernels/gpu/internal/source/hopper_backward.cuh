// The shared memory of hopper_backward.cu, the work of the threads that do not multiply (they walk, load, and add dQ to
// global memory), and the sums of dK and dV there.
#pragma once
#include "flash.cuh"
#include "hopper_cluster.cuh"
#include "hopper_gates.cuh"
#include "hopper_lanes.cuh"

constexpr int BN = SPLIT ? 64 : 64 * GROUPS, CONSUMERS = 128 * GROUPS, THREADS = 128 + CONSUMERS;
// Registers of a thread. A block has 65536 registers.
constexpr int FEW = SPLIT || HEAD_QK <= 96 || CAP && HEAD_QK <= 128 ? 40 : 24, MANY = FEW == 40 ? 232 : 240;
// The number of queries whose scores a warpgroup computes at once, and its columns of dK and dV.
constexpr int SCORES = BM / (SPLIT ? GROUPS : 1), DK_COLS = HEAD_QK / (SPLIT ? GROUPS : 1),
              DV_COLS = HEAD_V / (SPLIT ? GROUPS : 1);
static_assert(SCORES % 16 == 0 && GROUPS == 2, "shape"); // a warp for each group, and two more
static_assert(!SPLIT || DK_COLS % 64 == 0 && DV_COLS % 64 == 0, "shape");
static_assert(CLUSTER == 1 || CLUSTER == 2 && SPLIT, "shape");

// rank returns the number of the block in its cluster, and other the address of the other block's shared memory.
__device__ __forceinline__ unsigned rank() { return CLUSTER > 1 ? cluster_rank() : 0; }
__device__ __forceinline__ unsigned other(unsigned base) { return in_block(base, rank() ^ 1); }

struct HopperBackward {
  TensorMap q, k, v, dout, dq; // boxes of 64 by BM, BN, BN, BM elements; dq: of 32 by DQ_ROWS floats
  unsigned* progress; // ORDERED: of each block of keys, consumer and head of q, by batch; initially 0. See Progress
  const int* order;            // not ORDERED: the blocks of keys, most queries first; NULL: ascending
  // The first block of keys, and their number. ORDERED: each sees some query; banded if the rows to which a block and
  // any earlier one add are rows of the block before it. fold and beside set the order, if fold is not 0; otherwise, not
  // ORDERED, the last `together` blocks run after the others of all heads. See turn, and for beside also Heads.
  int start, blocks, banded, fold, beside, together;
  int fresh_lo, fresh_hi; // keys whose dK and dV are not initialised
  const unsigned* needs;  // see pass_gates of hopper_gates.cuh
  Gate* gates;
  // For each batch element, the number of the next item, initially 0; NULL: each block of the grid has one item.
  // ORDERED: never NULL. A block then waits only for items that running blocks have taken, whatever the order in which
  // blocks start.
  unsigned* next;
  int*
      fault; // ORDERED, in host memory: the report of a block that timed out, see HopperFault of params.go
  unsigned polls; // most polls for a turn, see wait_raised; 0: no limit
  int unused[11];
  FlashParams p;
};
static_assert(
    sizeof(HopperBackward) == 5 * 128 + 128 + sizeof(FlashParams), "HopperBackward of params.go is laid out so");

using Keys = Panels<BN, HEAD_QK>;
using Values = Panels<BN, HEAD_V>;
using Queries = Panels<BM, HEAD_QK>;
using Douts = Panels<BM, HEAD_V>;
using Scores = Panels<BM, BN>; // P or dS, as [query][key]
using KeyWalk = Walk<BN, BM>; // own rows are keys, others queries

// A warpgroup's part of dQ' consists of DQ_PARTS times 64 of the head dim by DQ_ROWS queries. If the
// head dim is not divisible, the queries are divided. MIXED: of three panels, a warpgroup has all queries of an outer
// one, as two parts, and half of the queries of the middle one, as wide products read less for each score.
constexpr int DQ_PANELS = (HEAD_QK + 63) / 64;
constexpr bool BY_DIM = DQ_PANELS % GROUPS == 0, MIXED = DQ_PANELS == 3;
constexpr int DQ_PARTS = BY_DIM ? DQ_PANELS / GROUPS : DQ_PANELS, DQ_ROWS = BY_DIM ? BM : BM / GROUPS;
constexpr int DQ_AT_ONCE = SPLIT ? 1 : DQ_PARTS; // of the parts, in shared memory
constexpr int DQ_BOX = DQ_ROWS * 128, DQ_BYTES = DQ_AT_ONCE * 2 * DQ_BOX; // a box is 32 floats wide
static_assert(DQ_ROWS % 8 == 0, "shape");
static_assert(CLUSTER == 1 || BY_DIM && SCORES * 256 <= DQ_BYTES, "the other block's dP comes to the place of dQ");

// mixed_dim returns the first dim of a warpgroup's part i, and mixed_row its first query.
__device__ __forceinline__ int mixed_dim(int group, int i) { return i < 2 ? 128 * group : 64; }
__device__ __forceinline__ int mixed_row(int group, int i) { return (i < 2 ? i : group) * DQ_ROWS; }

// With SPLIT, there is one buffer of dO, with its own barriers, and one each of P and of dS. P is stored after the next
// dO is loaded, which happens after all have used P; dS is stored after all have met over P. Otherwise dS has two
// buffers, and all have used one when they meet over the other.
constexpr bool ONE_DO = SPLIT;
constexpr int SUMS_BYTES = CLUSTER > 1 ? SCORES * 256 : 0; // of a warpgroup's scores from the other block
constexpr int P_BUFFERS = SPLIT || SHARED_P ? 1 : 0, DS_BUFFERS = SPLIT ? 1 : 2;
static_assert(!ONE_DO || STAGES == 2, "the parity of its phase is the stage");

// Shared is the layout of shared memory.
struct Shared {
  static constexpr int K = 0, V = K + Keys::BYTES, DS = V + Values::BYTES, DQ = DS + DS_BUFFERS * Scores::BYTES,
                       STAGE = DQ + GROUPS * DQ_BYTES;
  static constexpr int STAGE_BYTES = Queries::BYTES + !ONE_DO * Douts::BYTES; // of a stage
  static constexpr int ONLY_DO = STAGE + STAGES * STAGE_BYTES, P = ONLY_DO + ONE_DO * Douts::BYTES,
                       SUMS = P + P_BUFFERS * Scores::BYTES, STATS = SUMS + GROUPS * SUMS_BYTES;
  // For each stage: a Step, and for each query LSE * log2 e, or the start value of S, and -delta.
  static constexpr int LSE = 32, DELTA = LSE + BM * 4, STATS_BYTES = DELTA + BM * 4;
  static constexpr int TURN = STATS + STAGES * STATS_BYTES; // the Turn
  static constexpr int COVERED = TURN + 32;                 // for each key, whether it is in a tile
  static constexpr int KEYS_FULL = COVERED + BN * 4, FULL = KEYS_FULL + 8, EMPTY = FULL + 8 * STAGES;
  static constexpr int DO_FULL = EMPTY + 8 * STAGES, DO_EMPTY = DO_FULL + 8, S_FULL = DO_FULL + ONE_DO * 16;
  // Of each warpgroup in a cluster: S and dP have come from the other block; it can take the next ones.
  static constexpr int DP_FULL = S_FULL + 8 * GROUPS, S_EMPTY = DP_FULL + 8 * GROUPS, DP_EMPTY = S_EMPTY + 8 * GROUPS,
                       BYTES = S_FULL + (CLUSTER > 1) * 32 * GROUPS;
};
static_assert(Shared::BYTES <= 232448, "a block has no more shared memory");

// douts returns the address of dO for a stage.
__device__ __forceinline__ unsigned douts(unsigned base, unsigned stage) {
  return ONE_DO ? base + Shared::ONLY_DO : stage + Queries::BYTES;
}

// Numbers of the block's barriers between threads that share a job; see some_sync.
constexpr int ALL_CONSUMERS = 1, DQ_FULL = 2, DQ_EMPTY = DQ_FULL + GROUPS, DQ_THREADS = 128 + 32,
              P_FULL = DQ_EMPTY + GROUPS;

// With EARLY_DV, dV ends before dQ begins, since there are no registers for P beside dQ.
// Meanwhile, the first EARLY_DK groups of 16 queries add to dK. CAP leaves no registers for their addresses.
constexpr bool EARLY_DV = HEAD_QK > 128 && !SPLIT;
constexpr int EARLY_DK = EARLY_DV && !CAP ? 1 : 0;

// AHEAD, a block computes its sums for S of the next step before the end of a step, so that they reach the other block
// of the cluster in time. CAP leaves no registers for them.
constexpr bool AHEAD = CLUSTER > 1 && !CAP;

// FROM_LSE starts S at -LSE in units of products; otherwise LSE is subtracted later. As measured, the first is faster
// with ORDERED, and slower otherwise. With EARLY_DV, there are no registers to subtract it.
constexpr bool FROM_LSE = (ORDERED || EARLY_DV) && !CAP;

// A Turn is the current or next item of a block of the grid: a block of keys, counted from HopperBackward.start, of a
// KV head. ORDERED: also the previous block of keys that adds to dQ, -1 for none. behind means that the previous one
// may skip rows to which earlier ones add: the block waits for it in all rows. up: it visits the first queries first.
struct Turn { int keys, kv_head, before; bool behind, up; };

// free_turn returns the turn of an item, not ORDERED. Blocks of a head run concurrently, since they read the same
// queries, longest first. The shortest of all heads come last, so that the SMs finish at the same time.
__device__ __forceinline__ Turn free_turn(const HopperBackward& b, unsigned item) {
  const int heads = b.p.kv_heads, apart = b.blocks - b.together, rest = (int)item - apart * heads;
  const int at = rest < 0 ? item % apart : apart + rest / heads, head = rest < 0 ? item / apart : rest % heads;
  return {b.order ? b.order[at] : at, head, -1, false, false};
}

// ordered_turn returns the turn of an item, ORDERED or with fold. The previous turn is an earlier item. Blocks take
// items in order, so no block waits for an item that no block has taken.
//
// Blocks of keys run from the first to the last, head by head. If the first blocks see many more queries than the last,
// that is slow, since the last wait for the first in every head. Then fold blocks run from the shortest to the longest,
// and fold more from the longest to the shortest, which start as the first of those end, and so on. beside heads
// run concurrently, as many as fill the GPU. Not ORDERED, the longer half goes down the queries and the shorter one up,
// so that concurrent blocks are at two places of the queries, which stay in the L2.
__device__ __forceinline__ Turn ordered_turn(const HopperBackward& b, unsigned item) {
  int number = item;
  if (!b.fold) {
    const int keys = number % b.blocks;
    return {keys, number / b.blocks, keys - 1, !b.banded, false};
  }
  const int heads = b.p.kv_heads, first = number / (2 * b.fold * heads) * 2 * b.fold;
  number -= first * heads;
  const int count = min(2 * b.fold, b.blocks - first), half = (count + 1) / 2;
  const int head = number / (count * b.beside) * b.beside, beside = min(b.beside, heads - head);
  number -= head * count;
  const bool growing = number < half * beside;
  const int at = number / beside - (growing ? 0 : half), kv_head = head + number % beside;
  if (growing) {
    return {first + half - 1 - at, kv_head, at ? first + half - at : first - 1, first > 0, false};
  }
  return {first + half + at, kv_head, at ? first + half + at - 1 : first, false, !ORDERED};
}

__device__ __forceinline__ Turn turn(const HopperBackward& b, unsigned item) {
  return ORDERED || b.fold ? ordered_turn(b, item) : free_turn(b, item);
}

// keep_turn stores the block's Turn, its first key and, ORDERED, the rows at which it waits for the previous block: if
// tiles are banded, the rows to which that block adds; for a block that is behind, all rows.
__device__ __forceinline__ void keep_turn(const HopperBackward& b, unsigned base, unsigned item) {
  const Turn t = turn(b, item);
  if (!ORDERED) {
    store_shared(base + Shared::TURN, t.keys, t.kv_head, t.up, (b.start + t.keys) * BN);
    return;
  }
  int first = 0, end = b.p.seq_q;
  if (!t.behind && t.before >= 0) {
    KeyWalk walk(b.p, (b.start + t.before) * BN);
    first = walk.next() ? walk.other : 0;
    walk.restart_down();
    end = walk.previous() ? walk.end : 0;
  }
  store_shared(base + Shared::TURN, t.keys, t.kv_head, t.before, (b.start + t.keys) * BN);
  store_shared(base + Shared::TURN + 16, first, end, t.behind, 0);
}

// own_keys returns the block's first key, and own_kv_head its head. keep_turn and a barrier of
// the block must precede them.
__device__ __forceinline__ int own_keys(unsigned base) { return __float_as_int(load_shared(base + Shared::TURN + 12)); }
__device__ __forceinline__ int own_kv_head(unsigned base) {
  return __float_as_int(load_shared(base + Shared::TURN + 4));
}

// A Step is a block of queries, from the producer to the consumers: key j sees query i if
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
constexpr int LAST = 1;   // the end: no step
constexpr int MASKED = 2; // some key does not see some query
constexpr int DIRTY = 4;  // the tensor has rows after end, which may be NaN

// Heads is the walk of a block over all heads of the group, down the queries of each. Under a causal mask, concurrent
// blocks then reach the same queries at the same time. With b.beside, blocks of several KV heads or documents run at
// once, or each behind another, so the walk goes over the queries once, over all heads at each: fewer rows are in use at
// once, and stay in the L2.
struct Heads {
  KeyWalk walk;
  int head;

  static __device__ __forceinline__ bool beside(const HopperBackward& b) { return b.beside > 0; }

  __device__ __forceinline__ Heads(const HopperBackward& b, unsigned base)
      : walk(b.p, own_keys(base)), head((own_kv_head(base) + beside(b)) * (b.p.heads / b.p.kv_heads) - beside(b)) {
    walk.restart_down();
  }

  // over advances to the next head, and reports whether all heads of the group had a step.
  __device__ __forceinline__ bool over(unsigned base) {
    unsigned next_kv_head = own_kv_head(base) + 1;
    hide_value(next_kv_head); // keeps the compiler from holding the product in a register
    return ++head * walk.p.kv_heads == next_kv_head * walk.p.heads;
  }

  __device__ __forceinline__ bool next(const HopperBackward& b, unsigned base) {
    const bool up = !ORDERED && __float_as_int(load_shared(base + Shared::TURN + 8));
    if (beside(b)) {
      if (!over(base)) {
        return true;
      }
      head -= walk.p.heads / walk.p.kv_heads;
      if (up && walk.index < walk.end_tile) { // not the first step; there is one tile
        walk.other += BM;
        return walk.other < walk.end;
      }
    }
    while (!walk.previous()) {
      if (beside(b) || over(base)) {
        return false;
      }
      walk.restart_down();
    }
    if (up) {
      walk.other = walk.begin;
    }
    return true;
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

template <class P, int COLS>
__device__ __forceinline__ void copy_panels(unsigned dst, const TensorMap& map, unsigned barrier, int row, int head) {
#pragma unroll
  for (int i = 0; i < P::COUNT; i++) {
    copy_box(dst + i * P::PANEL, map, barrier, rank() * COLS + 64 * i, row, head, blockIdx.z);
  }
}

// produce does the work of the loading thread.
__device__ __forceinline__ void produce(const HopperBackward& b, unsigned base) {
  Heads at(b, base);
  for (unsigned step = 0;; step++) {
    const bool more = at.next(b, base); // the only call, for less code
    if (more && step == 0) {
      const int kv_head = own_kv_head(base), own = own_keys(base);
      const unsigned full = base + Shared::KEYS_FULL;
      barrier_expect(full, Keys::BYTES + Values::BYTES);
      copy_panels<Keys, HEAD_QK>(base + Shared::K, b.k, full, own, kv_head);
      copy_panels<Values, HEAD_V>(base + Shared::V, b.v, full, own, kv_head);
    }
    const unsigned stage = step % STAGES, full = base + Shared::FULL + 8 * stage;
    barrier_wait(base + Shared::EMPTY + 8 * stage, ~(step / STAGES) & 1);
    if (more) {
      const unsigned to = base + Shared::STAGE + stage * Shared::STAGE_BYTES;
      copy_panels<Queries, HEAD_QK>(to, b.q, full, at.walk.other, at.head);
      if (!ONE_DO) {
        copy_panels<Douts, HEAD_V>(douts(base, to), b.dout, full, at.walk.other, at.head);
      }
    }
    at.tell(base + Shared::STATS + stage * Shared::STATS_BYTES, more);
    if (!more) {
      barrier_arrive(full);
      return;
    }
    barrier_expect(full, Shared::STAGE_BYTES);
    if (ONE_DO) {
      barrier_wait(base + Shared::DO_EMPTY, ~step & 1);
      barrier_expect(base + Shared::DO_FULL, Douts::BYTES);
      copy_panels<Douts, HEAD_V>(douts(base, 0), b.dout, base + Shared::DO_FULL, at.walk.other, at.head);
    }
  }
}

// fetch_stats does the work of the warp that loads LSE and delta. It walks independently, and loads them into registers
// before a stage is free, since global memory is slow.
__device__ __forceinline__ void fetch_stats(const HopperBackward& b, unsigned base) {
  const FlashParams& p = b.p;
  Heads at(b, base);
  for (unsigned step = 0;; step++) {
    const int head = at.head;
    const bool more = at.next(b, base);
    at.head = more ? at.head : head; // a valid head
    unsigned lane = threadIdx.x % 32, batch = blockIdx.z;
    hide_value(batch); // keeps the compiler from computing addresses before the steps, for which there are no registers
    constexpr int COUNT = (BM + 31) / 32;
    float lse[COUNT], delta[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      // If there is no such query, load any other.
      const int row = max(min(at.walk.other + (int)lane + 32 * i, at.walk.end - 1), 0);
      lse[i] = head_of<float>(p.lse, batch, at.head)[row * p.lse.seq];
      delta[i] = head_of<float>(p.delta, batch, at.head)[row * p.delta.seq];
    }
    const unsigned stage = step % STAGES, stats = base + Shared::STATS + stage * Shared::STATS_BYTES;
    barrier_wait(base + Shared::EMPTY + 8 * stage, ~(step / STAGES) & 1);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (lane + 32 * i < BM) {
        const float x = lse[i] == -INF ? INF : lse[i] * LOG2E; // INF: a row that saw no key has probabilities 0
        store_shared(stats + Shared::LSE + 4 * (lane + 32 * i),
            __float_as_uint(FROM_LSE ? __fdividef(-x, p.unit * CLUSTER) : x));
        store_shared(stats + Shared::DELTA + 4 * (lane + 32 * i), __float_as_uint(-delta[i] / CLUSTER));
      }
    }
    __syncwarp();
    if (arrives_for_warp()) {
      barrier_arrive(base + Shared::FULL + 8 * stage);
    }
    if (!more) {
      return;
    }
  }
}

// Progress counts the last rows of a query head to which a block has added dQ, for one consumer. ORDERED, a block adds
// to a row after the previous block has passed it. The warp that adds dQ has little time beside a step, and a poll
// takes most of it, so each lane polls for another head at once, and keeps what it has seen.
struct Progress {
  const HopperBackward& b;
  unsigned base;
  int from = -1; // seen: in lane i, of the previous block in head from + i
  unsigned seen = 0;

  // at returns the address of the progress of a block of keys. Heads are neighbours.
  __device__ __forceinline__ unsigned* at(int keys, int head, int consumer) const {
    return b.progress + (((blockIdx.z * b.blocks + keys) * CLUSTER + rank()) * GROUPS + consumer) * b.p.heads + head;
  }
  // wait is for all lanes of the warp.
  __device__ __forceinline__ void wait(unsigned until, int head, int consumer) {
    int keys, kv_head, before, own;
    load_shared_words(base + Shared::TURN, keys, kv_head, before, own);
    if (before < 0 || from == head / 32 * 32 && __shfl_sync(~0u, seen, head % 32) >= until) {
      return;
    }
    from = head / 32 * 32;
    const unsigned* mine = at(before, min(from + (int)threadIdx.x % 32, b.p.heads - 1), consumer);
    // Unless BY_DIM, the other consumer of that block may add to these rows: steps of blocks begin anywhere.
    const int other = BY_DIM ? 0 : (1 - 2 * consumer) * b.p.heads;
    seen = raised(mine);
    if (!BY_DIM) {
      seen = min(seen, raised(mine + other));
    }
    if (threadIdx.x % 32 == head % 32 && seen < until) {
      seen = wait_raised(mine, until, b.polls);
      if (!BY_DIM && seen >= until) {
        seen = min(seen, wait_raised(mine + other, until, b.polls));
      }
      if (seen < until) {
        load_shared_words(base + Shared::TURN, keys, kv_head, before, own); // reloaded, since registers are scarce
        report(b.fault, 1 + keys, kv_head, blockIdx.z, before);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void tell(unsigned until, int head, int consumer) const {
    raise(at(__float_as_int(load_shared(base + Shared::TURN)), head, consumer), until);
  }
  __device__ __forceinline__ bool behind() const { return __float_as_int(load_shared(base + Shared::TURN + 24)); }
  // shared reports whether the previous block adds to a row in [row, end).
  __device__ __forceinline__ bool shared(int row, int end) const {
    float first, last;
    load_shared_pair(base + Shared::TURN + 16, first, last);
    return row < __float_as_int(last) && end > __float_as_int(first);
  }
};

// clear_queries zeroes rows of parts of dQ' in shared memory, since from. They are in no tile of this step, but a NaN
// in a key makes all rows NaN.
template <int PARTS> __device__ __forceinline__ void clear_queries(unsigned part, int from) {
  for (int i = from * 8 + threadIdx.x % 32; i < DQ_ROWS * 8; i += 32) {
#pragma unroll
    for (int box = 0; box < 2 * PARTS; box++) {
      store_shared(part + box * DQ_BOX + i * 16, 0, 0, 0, 0);
    }
  }
  shared_for_engine();
  __syncwarp();
}

// add_queries does the work of the warp that adds the dQ of a consumer to global memory.
__device__ __forceinline__ void add_queries(const HopperBackward& b, unsigned base, int consumer) {
  const FlashParams& p = b.p;
  const unsigned from = base + Shared::DQ + consumer * DQ_BYTES;
  const int dim = BY_DIM ? consumer * DQ_PARTS * 64 : 0, first = BY_DIM ? 0 : consumer * DQ_ROWS;
  const bool adds = threadIdx.x % 32 == 0;
  Progress progress{b, base};
  some_arrive(DQ_EMPTY + consumer, DQ_THREADS);
  for (unsigned step = 0;; step++) {
    const unsigned stage = step % STAGES;
    barrier_wait(base + Shared::FULL + 8 * stage, step / STAGES & 1);
    int row, head, end, kind;
    load_shared_words(base + Shared::STATS + stage * Shared::STATS_BYTES, row, head, end, kind);
    __syncwarp();
    if (kind & LAST) {
      if (ORDERED) {
        const int heads = p.heads / p.kv_heads;
        head = own_kv_head(base) * heads;
        for (int i = 0; i < heads; i++, head++) {
          if (progress.behind()) {
            progress.wait(p.seq_q, head, consumer);
          }
          if (adds) {
            progress.tell(p.seq_q, head, consumer);
          }
        }
      }
      return;
    }
    if (EVERY_LANE || adds) {
      barrier_arrive(base + Shared::EMPTY + 8 * stage);
    }
    const unsigned until = p.seq_q - row;
    if (ORDERED && progress.shared(row, min(row + BM, end))) {
      progress.wait(until, head, consumer); // here, while the products of the step run
    }
#pragma unroll
    for (int part = 0; part < DQ_PARTS; part += DQ_AT_ONCE) {
      some_sync(DQ_FULL + consumer, DQ_THREADS);
      if (kind & DIRTY) {
        if (MIXED) {
#pragma unroll
          for (int i = 0; i < DQ_PARTS; i++) {
            clear_queries<1>(from + i * 2 * DQ_BOX, max(end - row - mixed_row(consumer, i), 0));
          }
        } else {
          clear_queries<DQ_AT_ONCE>(from, max(end - row - first, 0));
        }
      }
      if (adds) {
#pragma unroll
        for (int i = 0; i < 2 * DQ_AT_ONCE; i++) {
          if (MIXED) {
            add_box(b.dq, from + i * DQ_BOX, mixed_dim(consumer, i / 2) + i % 2 * 32, row + mixed_row(consumer, i / 2),
                head, blockIdx.z);
          } else if (dim + 64 * part + 32 * i < HEAD_QK) {
            add_box(b.dq, from + i * DQ_BOX, rank() * HEAD_QK + dim + 64 * part + 32 * i, row + first, head,
                blockIdx.z);
          }
        }
        adds_commit();
        adds_wait<0>();
      }
      __syncwarp();
      if (CLUSTER > 1 && part + DQ_AT_ONCE == DQ_PARTS && arrives_for_warp()) {
        send_arrive(other(base) + Shared::DP_EMPTY + 8 * consumer);
      }
      some_arrive(DQ_EMPTY + consumer, DQ_THREADS);
      if (ORDERED && adds && part + DQ_AT_ONCE == DQ_PARTS) {
        adds_finish();
        progress.tell(until, head, consumer);
      }
    }
  }
}

// In a product with 64 rows, a consumer thread holds, in floats 4 n to 4 n + 3, columns 8 n + first_col()
// and the next of rows first_row() and first_row() + 8.
__device__ __forceinline__ int first_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int first_col() { return threadIdx.x % 4 * 2; }

// add_keys adds factor times a sum to dK or dV of the block's keys, from the first key and column. It sets the rows
// of fresh keys. A thread loads the old values of a row before it stores one, since each load after a store would wait
// for memory alone.
template <int COLS>
__device__ __forceinline__ void add_keys(const HopperBackward& b, const Strided& d, const float (&x)[COLS / 2],
    float factor, int dim, int key, int from, unsigned base) {
  float* to = head_of<float>(d, blockIdx.z, own_kv_head(base));
  const int own = own_keys(base);
  const bool aligned = b.p.flags & ALIGNED_O;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int j = key + first_row() + 8 * r;
    const bool fresh = b.fresh_lo <= own + j && own + j < b.fresh_hi,
               covered = load_shared(base + Shared::COVERED + 4 * j) != 0;
    if (!covered && !fresh) {
      continue;
    }
    float* row = to + (long long)(own + j) * d.seq + from + first_col();
    const int left = dim - from - first_col(); // columns
    float2 old[COLS / 8];
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
      old[n] = {0, 0};
      if (!fresh && aligned && 8 * n < left) {
        old[n] = *(const float2*)(row + 8 * n);
      } else if (!fresh) {
        old[n] = {8 * n < left ? row[8 * n] : 0, 8 * n + 1 < left ? row[8 * n + 1] : 0};
      }
    }
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
      const int at = 4 * n + 2 * r;
      const float u = covered ? factor * x[at] : 0, v = covered ? factor * x[at + 1] : 0; // x is NaN if a query has NaN
      float* y = row + 8 * n;
      if (aligned && 8 * n < left) {
        *(float2*)y = {old[n].x + u, old[n].y + v};
      } else {
        if (8 * n < left) {
          y[0] = old[n].x + u;
        }
        if (8 * n + 1 < left) {
          y[1] = old[n].y + v;
        }
      }
    }
  }
}
