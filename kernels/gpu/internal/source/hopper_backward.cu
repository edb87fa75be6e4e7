// Attention backward on Hopper, after FlashAttention-3 (arXiv:2407.08608): a block of threads owns BN keys
// of a KV head, 64 for each of its GROUPS consumer warpgroups, walks over blocks of BM queries of all heads
// that read it, and keeps dK and dV in registers until the end. Scores are transposed,
//   S' = K Q', dP' = V dO', dV += P' dO, dK += dS' Q, dQ' = K' dS',
// so that the registers of P' and dS' are the operands of the products for dV and dK. dS goes through shared
// memory for dQ, since all warpgroups' keys add to it. Each warpgroup computes a part of dQ' and writes it to
// shared memory. From there, a separate warp adds it to global memory with TMA, in no fixed order
// unless ORDERED is 1.
//
// The first warpgroup computes no products. A thread of its warp 0 walks, starts the loads of Q and dO STAGES
// steps ahead, and describes each step to the consumers in shared memory. Warp 3 loads LSE and delta, and warp 1 + w
// adds the dQ of consumer w.
//
// Concurrent blocks of the grid have the same KV head, and so the same queries. Their queries and dQ stay in the L2.
// Only the shortest blocks come last.
//
// With SPLIT, dK and dV of 64 keys are too wide for the registers of a warpgroup, so all warpgroups share 64 keys. Each
// computes the scores of its part of the queries, and owns its part of the columns of dK and dV. For these, it reads P
// and dS of all warpgroups from shared memory. Stages are then large, so there is one buffer of dO, reloaded after
// dV has used it, and dQ' is written in panels.
//
// With CLUSTER, two blocks share 64 keys, and each has half of the head dim of all tensors. Its S and dP are sums over
// that half, which the blocks send to each other. Everything else is as without.
//
// Compiled with HEAD_QK and HEAD_V, a block's head dims rounded up, BM, STAGES, GROUPS, SPLIT, CLUSTER, ORDERED, and
// CAP. CAP is 1 if scores take more than a factor above 0 (CAPPED or SCALED), which needs more registers and a smaller
// BM. SHARED_P and EVERY_LANE are as in hopper_forward.cu, for P and dS.
#include "hopper_backward_scores.cuh"

// cover finds the keys that are in some tile, and zeroes the others in shared memory. They may be NaN,
// and 0 times NaN is NaN.
__device__ __forceinline__ void cover(const HopperBackward& b, unsigned base) {
  const KeyWalk walk(b.p, own_keys(base));
  for (int j = threadIdx.x - 128; j < BN; j += CONSUMERS) {
    const bool covered = walk.covers(walk.own + j);
    store_shared(base + Shared::COVERED + 4 * j, __float_as_uint(covered ? 1 : 0));
    if (covered) {
      continue;
    }
    for (int col = 0; col < HEAD_QK; col += 8) {
      store_shared(base + Shared::K + Keys::offset(j, col), 0, 0, 0, 0);
    }
    for (int col = 0; col < HEAD_V; col += 8) {
      store_shared(base + Shared::V + Values::offset(j, col), 0, 0, 0, 0);
    }
  }
  shared_for_engine();
  some_sync(ALL_CONSUMERS, CONSUMERS);
}

// blank clears rows of Q and dO; from is the first.
__device__ __forceinline__ void blank(unsigned queries, unsigned douts, int from) {
  for (int i = from + threadIdx.x % 32; i < BM; i += 32) {
    for (int col = threadIdx.x / 32 * 8 - 32; col < max(HEAD_QK, HEAD_V); col += CONSUMERS / 32 * 8) {
      if (col < HEAD_QK) {
        store_shared(queries + Queries::offset(i, col), 0, 0, 0, 0);
      }
      if (col < HEAD_V) {
        store_shared(douts + Douts::offset(i, col), 0, 0, 0, 0);
      }
    }
  }
  shared_for_engine();
  some_sync(ALL_CONSUMERS, CONSUMERS);
}

// Consumer is the state of a thread of a consumer warpgroup.
struct Consumer {
  const FlashParams& p;
  unsigned base;
  int group; // the number of its group
  float dk[DK_COLS / 2], dv[DV_COLS / 2], s[SCORES / 2];

  __device__ __forceinline__ Consumer(const FlashParams& p, unsigned base, int group)
      : p(p), base(base), group(group) {}

  // Its first key, the first of its columns of dK or dV, and the first query of its scores.
  __device__ __forceinline__ int key() const { return SPLIT ? 0 : 64 * group; }
  __device__ __forceinline__ int column(int columns) const { return SPLIT ? columns * group : 0; }
  __device__ __forceinline__ int query() const { return SPLIT ? SCORES * group : 0; }

  // These start products; wg_wait waits for them.
  __device__ __forceinline__ void begin_scores(unsigned stats) {
    if (FROM_LSE) {
      for_queries(s, stats + Shared::LSE + 4 * query());
      hold(s);
    }
  }
  template <class T> __device__ __forceinline__ void start_scores(unsigned stage) {
#pragma unroll
    for (int k = 0; k < HEAD_QK; k += 16) {
      wg_multiply<T, false, false>(
          s, Keys::along(base + Shared::K, key(), k), Queries::along(stage, query(), k), FROM_LSE || k > 0);
    }
    wg_commit();
  }
  template <class T> __device__ __forceinline__ void start_dp(float (&dp)[SCORES / 2], unsigned stage) const {
#pragma unroll
    for (int k = 0; k < HEAD_V; k += 16) {
      wg_multiply<T, false, false>(
          dp, Values::along(base + Shared::V, key(), k), Douts::along(douts(base, stage), query(), k), true);
    }
    wg_commit();
  }
  template <class T> __device__ __forceinline__ void start_dv(const unsigned (&ps)[SCORES / 16][4], unsigned stage) {
    start_keys<T, Douts, 0, BM / 16>(dv, ps, base + Shared::P, douts(base, stage));
  }
  // start_keys starts c += A B over some groups of 16 queries, with A from registers or, with SHARED_P and SPLIT, from
  // shared memory, where it is transposed.
  template <class T, class P, int FROM, int TO, int N>
  __device__ __forceinline__ void start_keys(
      float (&c)[N], const unsigned (&a)[SCORES / 16][4], unsigned scores, unsigned b) {
#pragma unroll
    for (int i = FROM; i < TO; i++) {
      if (SPLIT || SHARED_P) {
        wg_multiply<T, true, true>(c, Scores::across(scores, 16 * i, key()), P::across(b, 16 * i, column(2 * N)), true);
      } else {
        wg_multiply<T, true>(c, a[i], P::across(b, 16 * i), true);
      }
    }
    wg_commit();
  }
  template <class T>
  __device__ __forceinline__ void start_dq(float (&dq)[DQ_PARTS][DQ_ROWS / 2], unsigned scores) const {
    const int dim = BY_DIM ? group * DQ_PARTS * 64 : 0, row = BY_DIM ? 0 : group * DQ_ROWS;
    if (MIXED) {
      start_part<T>(*(float(*)[DQ_ROWS])dq[0], scores, mixed_dim(group, 0), 0); // two parts at once
    }
#pragma unroll
    for (int i = MIXED ? 2 : 0; i < DQ_PARTS; i++) {
      start_part<T>(dq[i], scores, MIXED ? mixed_dim(group, i) : dim + 64 * i, row);
    }
    wg_commit();
  }
  template <class T, int N>
  __device__ __forceinline__ void start_part(float (&dq)[N], unsigned scores, int dim, int row) const {
#pragma unroll
    for (int k = 0; k < BN; k += 16) {
      wg_multiply<T, true, false>(dq, Keys::across(base + Shared::K, k, dim), Scores::along(scores, row, k), k > 0);
    }
  }

  // meet waits for all warpgroups.
  __device__ __forceinline__ void meet() const { some_sync(ALL_CONSUMERS, CONSUMERS); }

  // share_p stores P to shared memory if products read it from there.
  __device__ __forceinline__ void share_p(const unsigned (&ps)[SCORES / 16][4]) const {
    if (!SPLIT && !SHARED_P) {
      return;
    }
    keep_scores(base + Shared::P, ps, key(), query());
    shared_for_engine();
    if (SPLIT) {
      meet();
    } else {
      some_sync(P_FULL + group, 128);
    }
  }

  // In a cluster, a block has the sums of scores over its part of the head dim. give sends them to a place in the other
  // block, and take adds those of the other block. The barriers, as offsets, tell that sums have come, and that the
  // place is free. Each thread sends to the thread of its number.
  __device__ __forceinline__ void give(
      const float (&x)[SCORES / 2], unsigned to, int full, int empty, unsigned parity) const {
    barrier_wait(base + empty + 8 * group, parity ^ 1);
    const unsigned there = other(base);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4) {
      send(there + to + i * 512 + threadIdx.x % 128 * 16, there + full + 8 * group, x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
  __device__ __forceinline__ void take(float (&x)[SCORES / 2], unsigned from, int full, unsigned parity) const {
    if (arrives_for_warp()) {
      barrier_expect(base + full + 8 * group, SCORES * 64 / LANES);
    }
    barrier_wait(base + full + 8 * group, parity);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4) {
      float y[4];
      load_shared(base + from + i * 512 + threadIdx.x % 128 * 16, y);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[i + j] += y[j];
      }
    }
  }
  __device__ __forceinline__ void give_scores(unsigned parity) const {
    if (CLUSTER > 1) {
      give(s, Shared::SUMS + group * SUMS_BYTES, Shared::S_FULL, Shared::S_EMPTY, parity);
    }
  }
  __device__ __forceinline__ void take_scores(unsigned parity) {
    if (CLUSTER > 1) {
      take(s, Shared::SUMS + group * SUMS_BYTES, Shared::S_FULL, parity);
      __syncwarp();
      if (arrives_for_warp()) {
        send_arrive(other(base) + Shared::S_EMPTY + 8 * group);
      }
    }
  }
  // exchange_dp completes the sums of dP. They come to the place of dQ, which is free after the adds of the last step.
  __device__ __forceinline__ void exchange_dp(float (&dp)[SCORES / 2], unsigned parity) const {
    if (CLUSTER > 1) {
      give(dp, Shared::DQ + group * DQ_BYTES, Shared::DP_FULL, Shared::DP_EMPTY, parity);
      take(dp, Shared::DQ + group * DQ_BYTES, Shared::DP_FULL, parity);
    }
  }

  // start_ahead starts S of a stage that may not be full, given the parity of its barrier. After the last step, S is of
  // no use.
  template <class T> __device__ __forceinline__ void start_ahead(unsigned stage, unsigned parity) {
    barrier_wait(base + Shared::FULL + 8 * stage, parity);
    begin_scores(base + Shared::STATS + stage * Shared::STATS_BYTES);
    wg_begin();
    start_scores<T>(base + Shared::STAGE + stage * Shared::STAGE_BYTES);
  }

  // step adds a block of queries; scores is the buffer of dS, parity that of dO, and next that of the next stage.
  // Between its products, only waits branch, since the compiler would insert a wait at any other branch.
  template <class T, bool MASK>
  __device__ __forceinline__ void step(
      unsigned stage, unsigned stats, unsigned scores, unsigned parity, unsigned next) {
    const unsigned lse_at = stats + Shared::LSE + 4 * query(), delta_at = stats + Shared::DELTA + 4 * query();
    float dp[SCORES / 2];
    unsigned ps[SCORES / 16][4], ds[SCORES / 16][4];
    if (!AHEAD) {
      begin_scores(stats);
    }
    if (!CAP) {
      for_queries(dp, delta_at); // dP starts at -delta
      hold(dp);
    }
    wg_begin();
    if (!AHEAD) {
      start_scores<T>(stage);
    }
    if (CAP) {
      wg_wait<0>();
      hold(s);
      give_scores(parity);
      take_scores(parity);
      transform(s, p);
      hide(s, stats, own_keys(base) + key(), query());
      for_queries(dp, delta_at); // -delta
      hold(dp);
      wait_douts(parity);
      wg_begin();
      start_dp<T>(dp, stage); // no earlier, since registers are scarce
      wg_wait<0>();
      hold(dp);
      exchange_dp(dp, parity);
      differentiate_capped(s, dp, lse_at, p);
      packed<T>(ps, s);
      share_p(ps);
      wg_begin();
      start_dv<T>(ps, stage);
    } else {
      wait_douts(parity);
      start_dp<T>(dp, stage);
      float lse[SCORES / 8][2]; // loaded here, since shared memory is slow during products that read it
#pragma unroll
      for (int n = 0; n < SCORES / 8 && !FROM_LSE; n++) {
        load_shared_pair(lse_at + 4 * (8 * n + first_col()), lse[n][0], lse[n][1]);
      }
      if (!AHEAD) {
        wg_wait<1>();
        hold(s);
      }
      take_scores(parity);
      if (MASK) {
        hide(s, stats, own_keys(base) + key(), query());
      }
      exponentiate(s, lse, p.unit);
      packed<T>(ps, s);
      share_p(ps);
      wg_begin();
      start_dv<T>(ps, stage); // before the wait for dP, so that a product is always running
      wg_wait<1>();
      hold(dp);
      exchange_dp(dp, parity);
      differentiate(s, dp);
    }
    packed<T>(ds, dp);
    if (EARLY_DK) {
      wg_begin();
      start_keys<T, Queries, 0, EARLY_DK>(dk, ds, scores, stage); // a product runs until dQ begins
    }
    keep_scores(scores, ds, key(), query());
    shared_for_engine();
    meet(); // dS of all warpgroups is stored
    if (EARLY_DV) {
      wg_wait<EARLY_DK>();
      hold(dv);
      hold(ps);
    }
    finish<T>(ps, ds, stage, scores, parity, next);
  }

  // wait_douts waits for dO if it does not come with Q. The products after it begin a new group, as the compiler
  // requires after a branch.
  __device__ __forceinline__ void wait_douts(unsigned parity) const {
    if (ONE_DO) {
      barrier_wait(base + Shared::DO_FULL, parity);
      wg_begin();
    }
  }

  // finish does the rest of a step, after dS is stored.
  template <class T>
  __device__ __forceinline__ void finish(
      unsigned (&ps)[SCORES / 16][4], unsigned (&ds)[SCORES / 16][4], unsigned stage, unsigned scores, unsigned parity,
      unsigned next) {
    wg_begin();
    float dq[DQ_PARTS][DQ_ROWS / 2];
    start_dq<T>(dq, scores);
    start_keys<T, Queries, EARLY_DK, BM / 16>(dk, ds, scores, stage);
    if (ONE_DO) {
      wg_wait<2>();
      arrive_by_warps(base + Shared::DO_EMPTY);
    }
    wg_wait<1>();
    hold(dq);
    if (!EARLY_DV) {
      hold(ps); // a product reads its operands until its end
    }
#pragma unroll
    for (int part = 0; part < DQ_PARTS; part += DQ_AT_ONCE) {
      some_sync(DQ_EMPTY + group, DQ_THREADS);
#pragma unroll
      for (int i = 0; i < DQ_AT_ONCE; i++) {
        keep_queries(base + Shared::DQ + group * DQ_BYTES + i * 2 * DQ_BOX, dq[part + i], p.scale);
      }
      shared_for_engine();
      some_arrive(DQ_FULL + group, DQ_THREADS);
      if (AHEAD && part == 0) {
        start_ahead<T>(parity ^ 1, next); // now, since there are no registers for it beside all of dQ
      }
    }
    wg_wait<0>();
    if (AHEAD) {
      hold(s);
      give_scores(parity ^ 1);
    }
    hold(dv);
    hold(dk);
    hold(ds);
  }
};

// consume does the work of a consumer warpgroup, if there is a step.
template <class T> __device__ __forceinline__ void consume(const HopperBackward& b, unsigned base, int group) {
  const FlashParams& p = b.p;
  Consumer c(p, base, group);
  if (AHEAD) {
    // Another value for the compiler, which would hold the addresses of operands during the steps.
    Consumer first(p, __shfl_sync(~0u, base, 0), group);
    first.template start_ahead<T>(0, 0);
    wg_wait<0>();
    hold(first.s);
    first.give_scores(0);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      c.s[i] = first.s[i];
    }
  }
#pragma unroll
  for (int i = 0; i < DK_COLS / 2; i++) {
    c.dk[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < DV_COLS / 2; i++) {
    c.dv[i] = 0;
  }
  unsigned scores = base + Shared::DS;
  for (unsigned stage = 0, parity = 0;;) {
    const unsigned stats = base + Shared::STATS + stage * Shared::STATS_BYTES,
                   data = base + Shared::STAGE + stage * Shared::STAGE_BYTES;
    barrier_wait(base + Shared::FULL + 8 * stage, parity);
    int row, head, end, kind;
    load_shared_words(stats, row, head, end, kind);
    if (kind & LAST) {
      if (AHEAD) {
        c.take_scores(stage);
      }
      break;
    }
    if (kind & DIRTY) {
      c.wait_douts(stage);
      blank(data, douts(base, data), end - row);
    }
    if (CAP || kind & MASKED) {
      c.template step<T, true>(data, stats, scores, stage, parity ^ stage);
    } else {
      c.template step<T, false>(data, stats, scores, stage, parity ^ stage);
    }
    arrive_by_warps(base + Shared::EMPTY + 8 * stage);
    if (DS_BUFFERS > 1) {
      scores =
          2 * (base + Shared::DS) + Scores::BYTES - scores; // meeting over this buffer, all have read the previous one
    }
    if (++stage == STAGES) {
      stage = 0, parity ^= 1;
    }
  }
  add_keys<DK_COLS>(b, p.dk, c.dk, p.scale, p.dim, c.key(), rank() * HEAD_QK + c.column(DK_COLS), base);
  add_keys<DV_COLS>(b, p.dv, c.dv, 1, p.dim_v, c.key(), rank() * HEAD_V + c.column(DV_COLS), base);
}

// begin initialises the barriers for an item, before any thread uses them.
__device__ __forceinline__ void begin(const HopperBackward& b, unsigned base, unsigned item) {
  barrier_init(base + Shared::KEYS_FULL, 1);
  for (int i = 0; i < STAGES; i++) {
    barrier_init(base + Shared::FULL + 8 * i, 1 + LANES); // the loading thread, and the warp of LSE and delta
    barrier_init(
        base + Shared::EMPTY + 8 * i, (CONSUMERS / 32 + GROUPS) * LANES); // the consumers, and the warps that add dQ
  }
  if (ONE_DO) {
    barrier_init(base + Shared::DO_FULL, 1);
    barrier_init(base + Shared::DO_EMPTY, CONSUMERS / 32 * LANES);
  }
  for (int i = 0; CLUSTER > 1 && i < GROUPS; i++) {
    barrier_init(base + Shared::S_FULL + 8 * i, 4 * LANES);
    barrier_init(base + Shared::DP_FULL + 8 * i, 4 * LANES);
    barrier_init(base + Shared::S_EMPTY + 8 * i, 4 * LANES);
    barrier_init(base + Shared::DP_EMPTY + 8 * i, LANES); // the warp that adds dQ
  }
  barriers_ready();
  keep_turn(b, base, item);
  unsigned passed = 0;
  pass_gates(b.needs, b.gates, own_keys(base) / BN, passed); // here, since the loading thread has few registers later
}

// items returns the number of items for each batch element.
__device__ __forceinline__ unsigned items(const HopperBackward& b) { return b.blocks * b.p.kv_heads; }

// over reports whether there is no item.
__device__ __forceinline__ bool over(unsigned base) { return __float_as_int(load_shared(base + Shared::TURN)) < 0; }

// sync waits for all threads of the block or, in a cluster, of both.
__device__ __forceinline__ void sync() {
  if (CLUSTER > 1) {
    cluster_sync();
  } else {
    all_sync(THREADS);
  }
}

// take_item begins the next item, if there is one. All threads call it, when no thread of the cluster uses the last.
__device__ __forceinline__ bool take_item(const HopperBackward& b, unsigned base) {
  const bool one = threadIdx.x == 0;
  unsigned item = blockIdx.x / CLUSTER;
  if (b.next) {
    if (one && rank() == 0) {
      item = atomicAdd(b.next + blockIdx.z, 1);
    }
    if (CLUSTER > 1) { // the first block takes it for both
      if (one && rank() == 0) {
        send_word(other(base) + Shared::TURN, item);
      }
      cluster_sync();
      if (one && rank() > 0) {
        item = __float_as_uint(load_shared(base + Shared::TURN));
      }
    }
  }
  if (one) {
    if (item < items(b)) {
      begin(b, base, item);
    } else {
      store_shared(base + Shared::TURN, ~0u, 0, 0, 0);
    }
  }
  sync();
  return !over(base);
}

// next_item takes another item. All threads call it when they are done with theirs.
__device__ __forceinline__ bool next_item(const HopperBackward& b, unsigned base) {
  const bool last = !b.next || ORDERED && gridDim.x == CLUSTER * items(b);
  if (last && CLUSTER == 1) {
    return false;
  }
  sync(); // the other block may still send arrivals
  if (last) {
    return false;
  }
  if (threadIdx.x == 0) {
    for (unsigned at = Shared::KEYS_FULL; at < Shared::BYTES; at += 8) {
      barrier_forget(base + at);
    }
  }
  return take_item(b, base);
}

// help does the work of a thread of the first warpgroup. Each job has its own loop, so that the compiler allocates
// registers for that job only.
__device__ __forceinline__ void help(const HopperBackward& b, unsigned base) {
  const int warp = threadIdx.x / 32;
  unsigned at = base;
  if (threadIdx.x == 0) {
    do {
      hide_value(at); // keeps the compiler from computing addresses before the items, for which there are no registers
      produce(b, at);
    } while (next_item(b, at));
  } else if (warp == 0) {
    while (next_item(b, at)) {
    }
  } else if (warp == 3) {
    do {
      hide_value(at);
      fetch_stats(b, at);
    } while (next_item(b, at));
  } else {
    do {
      hide_value(at);
      add_queries(b, at, warp - 1);
    } while (next_item(b, at));
  }
}

// multiply does the work of a consumer for an item.
template <class T> __device__ __forceinline__ void multiply(const HopperBackward& b, unsigned base, int group) {
  barrier_wait(base + Shared::FULL, 0);
  Step first;
  first.load(base + Shared::STATS);
  if (!(first.kind & LAST)) {
    barrier_wait(base + Shared::KEYS_FULL, 0);
    cover(b, base);
    consume<T>(b, base, group);
  }
  some_sync(DQ_EMPTY + group, DQ_THREADS); // the last dQ has been read
}

template <class T> __device__ __forceinline__ void backward(const HopperBackward& b) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = smem_address(shared);
  if (CLUSTER > 1) {
    cluster_sync(); // both have started
  }
  if (!take_item(b, base)) {
    return;
  }
  if (threadIdx.x < 128) {
    wg_registers_fewer<FEW>();
    help(b, base);
    return;
  }
  wg_registers_more<MANY>();
  const int group =
      __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the same in all lanes
  do {
    multiply<T>(b, base, group);
  } while (next_item(b, base));
}

#if CLUSTER > 1
#define SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
#define SIZE
#endif
#define ENTRY(name, T) \
  extern "C" __global__ void SIZE __launch_bounds__(THREADS, 1) \
      hopper_backward_##name(const __grid_constant__ HopperBackward b) { \
    backward<T>(b); \
  }
ENTRY(bf16, bf16_t)
ENTRY(fp16, fp16_t)
