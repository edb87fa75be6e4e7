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
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, STAGES, GROUPS, SPLIT, ORDERED, and CAP. CAP is 1 if
// scores take more than a factor above 0 (CAPPED or SCALED), which needs more registers and a smaller BM.
// SHARED_P and EVERY_LANE are as in hopper_forward.cu, for P and dS.
#include "hopper_backward.cuh"

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

// hide sets scores of hidden pairs to -inf. key is the first key of the scores, counted in the block of keys, and from
// their first query, counted in the block of queries.
__device__ __forceinline__ void hide(float (&s)[SCORES / 2], unsigned stats, int key, int from) {
  Step now;
  now.load(stats);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int j = key + first_row() + 8 * r, i = now.row + from + first_col();
    const bool any = now.own_lo <= j && j < now.own_hi;
    const int lo = j + now.lo - i, hi = any ? min(now.end, j + now.hi + 1) - i : -1; // the visible columns
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float& x = s[4 * n + 2 * r + c];
        x = 8 * n + c >= lo && 8 * n + c < hi ? x : -INF;
      }
    }
  }
}

// for_queries sets each query's column to its number in shared memory.
__device__ __forceinline__ void for_queries(float (&x)[SCORES / 2], unsigned at) {
#pragma unroll
  for (int n = 0; n < SCORES / 8; n++) {
    load_shared_pair(at + 4 * (8 * n + first_col()), x[4 * n], x[4 * n + 1]);
    x[4 * n + 2] = x[4 * n], x[4 * n + 3] = x[4 * n + 1];
  }
}

// exponentiate turns products S into probabilities.
__device__ __forceinline__ void exponentiate(float (&s)[SCORES / 2], const float (&lse)[SCORES / 8][2], float unit) {
#pragma unroll
  for (int n = 0; n < SCORES / 8; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float& x = s[4 * n + c];
      x = exp2_fast(FROM_LSE ? x * unit : x * unit - lse[n][c % 2]);
    }
  }
}

// differentiate turns dP - delta into dS, given probabilities, except for its factor scale.
__device__ __forceinline__ void differentiate(const float (&s)[SCORES / 2], float (&dp)[SCORES / 2]) {
#pragma unroll
  for (int i = 0; i < SCORES / 2; i++) {
    dp[i] *= s[i];
  }
}

// transform computes scores from products if that takes more than a factor.
__device__ __forceinline__ void transform(float (&s)[SCORES / 2], const FlashParams& p) {
  if (p.flags & CAPPED) {
    const float unit = 2 * LOG2E * p.inner;
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      s[i] = p.outer - p.outer * __fdividef(2, 1 + exp2_fast(unit * s[i])); // tanh.approx has only 11 bits
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < SCORES / 2; i++) {
    s[i] *= p.inner;
  }
}

// differentiate_capped does the work of exponentiate and differentiate for scores from transform.
__device__ __forceinline__ void differentiate_capped(
    float (&s)[SCORES / 2], float (&dp)[SCORES / 2], unsigned lse_at, const FlashParams& p) {
  const float inverse = p.flags & CAPPED ? p.inverse : 0;
#pragma unroll
  for (int n = 0; n < SCORES / 8; n++) {
    float lse[2];
    load_shared_pair(lse_at + 4 * (8 * n + first_col()), lse[0], lse[1]);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float &x = s[4 * n + c], &y = dp[4 * n + c];
      const float t = fmaxf(x, -p.outer) * inverse, slope = fmaxf(1 - t * t, 0); // tanh' = 1 - tanh^2; x may be -inf
      x = exp2_fast(x * p.unit - lse[c % 2]);
      y *= x * slope;
    }
  }
}

// packed converts a product in registers to the operand of another.
template <class T> __device__ __forceinline__ void packed(unsigned (&a)[SCORES / 16][4], const float (&c)[SCORES / 2]) {
#pragma unroll
  for (int i = 0; i < SCORES / 4; i++) {
    a[i / 4][i % 4] = pack<T>(c[2 * i], c[2 * i + 1]);
  }
}

// keep_scores stores P' or dS' as P or dS, from its first key and query.
__device__ __forceinline__ void keep_scores(unsigned to, const unsigned (&a)[SCORES / 16][4], int key, int from) {
  const int lane = threadIdx.x % 32, row = from + lane % 8 + lane / 16 * 8,
            col = key + threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < SCORES / 16; i++) {
    stmatrix_trans(to + Scores::offset(row + 16 * i, col), a[i][0], a[i][1], a[i][2], a[i][3]);
  }
}

// keep_queries stores a part of dQ', times scale, as boxes of dQ.
__device__ __forceinline__ void keep_queries(unsigned to, const float (&c)[DQ_ROWS / 2], float scale) {
  const int d = first_row(), i = first_col();
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int piece = (d + 8 * r) % 32 / 4 ^ (i + e);
      const unsigned at = to + d / 32 * DQ_BOX + (i + e) * 128 + piece * 16 + d % 4 * 4;
#pragma unroll
      for (int n = 0; n < DQ_ROWS / 8; n++) {
        store_shared(at + n * 1024, __float_as_uint(c[4 * n + 2 * r + e] * scale));
      }
    }
  }
}

// arrive_by_warps arrives once for each warp.
__device__ __forceinline__ void arrive_by_warps(unsigned barrier) {
  __syncwarp();
  if (arrives_for_warp()) {
    barrier_arrive(barrier);
  }
}

// Consumer is the state of a thread of a consumer warpgroup.
struct Consumer {
  const FlashParams& p;
  unsigned base;
  int group; // the number of its group
  float dk[DK_COLS / 2], dv[DV_COLS / 2];

  // Its first key, the first of its columns of dK or dV, and the first query of its scores.
  __device__ __forceinline__ int key() const { return SPLIT ? 0 : 64 * group; }
  __device__ __forceinline__ int column(int columns) const { return SPLIT ? columns * group : 0; }
  __device__ __forceinline__ int query() const { return SPLIT ? SCORES * group : 0; }

  // These start products; wg_wait waits for them.
  template <class T> __device__ __forceinline__ void start_scores(float (&s)[SCORES / 2], unsigned stage) const {
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

  // step adds a block of queries; scores is the buffer of dS. Between its products, only waits branch, since the
  // compiler would insert a wait at any other branch.
  template <class T, bool MASK>
  __device__ __forceinline__ void step(unsigned stage, unsigned stats, unsigned scores, unsigned parity) {
    const unsigned lse_at = stats + Shared::LSE + 4 * query(), delta_at = stats + Shared::DELTA + 4 * query();
    float s[SCORES / 2], dp[SCORES / 2];
    unsigned ps[SCORES / 16][4], ds[SCORES / 16][4];
    if (FROM_LSE) {
      for_queries(s, lse_at);
      hold(s);
    }
    if (!CAP) {
      for_queries(dp, delta_at); // dP starts at -delta
      hold(dp);
    }
    wg_begin();
    start_scores<T>(s, stage);
    if (CAP) {
      wg_wait<0>();
      hold(s);
      transform(s, p);
      hide(s, stats, own_keys(base) + key(), query());
      for_queries(dp, delta_at); // -delta
      hold(dp);
      wait_douts(parity);
      wg_begin();
      start_dp<T>(dp, stage); // no earlier, since registers are scarce
      wg_wait<0>();
      hold(dp);
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
      wg_wait<1>();
      hold(s);
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
    finish<T>(ps, ds, stage, scores);
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
      unsigned (&ps)[SCORES / 16][4], unsigned (&ds)[SCORES / 16][4], unsigned stage, unsigned scores) {
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
    }
    wg_wait<0>();
    hold(dv);
    hold(dk);
    hold(ds);
  }
};

// consume does the work of a consumer warpgroup, if there is a step.
template <class T> __device__ __forceinline__ void consume(const HopperBackward& b, unsigned base, int group) {
  const FlashParams& p = b.p;
  Consumer c{p, base, group};
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
      break;
    }
    if (kind & DIRTY) {
      c.wait_douts(stage);
      blank(data, douts(base, data), end - row);
    }
    if (CAP || kind & MASKED) {
      c.template step<T, true>(data, stats, scores, stage);
    } else {
      c.template step<T, false>(data, stats, scores, stage);
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
  add_keys<DK_COLS>(b, p.dk, c.dk, p.scale, p.dim, c.key(), c.column(DK_COLS), base);
  add_keys<DV_COLS>(b, p.dv, c.dv, 1, p.dim_v, c.key(), c.column(DV_COLS), base);
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
  barriers_ready();
  keep_turn(b, base, item);
  unsigned passed = 0;
  pass_gates(b.needs, b.gates, own_keys(base) / BN, passed); // here, since the loading thread has few registers later
}

// items returns the number of items for each batch element.
__device__ __forceinline__ unsigned items(const HopperBackward& b) { return b.blocks * b.p.kv_heads; }

// take begins the next item.
__device__ __forceinline__ void take(const HopperBackward& b, unsigned base) {
  const unsigned item = atomicAdd(b.next + blockIdx.z, 1);
  if (item < items(b)) {
    begin(b, base, item);
  } else {
    store_shared(base + Shared::TURN, ~0u, 0, 0, 0);
  }
}

// over reports whether there is no item.
__device__ __forceinline__ bool over(unsigned base) { return __float_as_int(load_shared(base + Shared::TURN)) < 0; }

// next_item begins another item, if there is one. All threads call it when they are done with theirs.
__device__ __forceinline__ bool next_item(const HopperBackward& b, unsigned base) {
  if (!b.next || ORDERED && gridDim.x == items(b)) {
    return false;
  }
  all_sync(THREADS);
  if (threadIdx.x == 0) {
    for (unsigned at = Shared::KEYS_FULL; at < Shared::BYTES; at += 8) {
      barrier_forget(base + at);
    }
    take(b, base);
  }
  all_sync(THREADS);
  return !over(base);
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
  if (threadIdx.x == 0) {
    if (b.next) {
      take(b, base);
    } else {
      begin(b, base, blockIdx.x);
    }
  }
  __syncthreads();
  if (over(base)) {
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

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) \
      hopper_backward_##name(const __grid_constant__ HopperBackward b) { \
    backward<T>(b); \
  }
ENTRY(bf16, bf16_t)
ENTRY(fp16, fp16_t)
