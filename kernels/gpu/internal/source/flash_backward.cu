// Attention backward, algorithm 2 of FlashAttention-2 (arXiv:2307.08691): a block of threads
// owns BN keys of a KV head, walks over blocks of BM queries of all heads that read it, and
// keeps dK and dV in registers until the end. Each block of queries takes five products,
//   S = Q K', dP = dO V', dV += P' dO, dK += dS' Q, dQ = dS K,
// with P and dS passed through shared memory, in the type of Q. dQ is added to global memory
// with atomics, in no fixed order; with ORDERED, flash_dq.cu computes it instead.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, BN, STAGES of Q and dO, and
// the number of the WARPS along the queries of S (S_WARPS), the keys of dK and dV (K_WARPS) and
// the queries of dQ (Q_WARPS). If S has fewer parts than there are WARPS, the others wait for it.
#include "flash_products.cuh"

constexpr int THREADS = WARPS * 32;

// A Part is a warp's share of a product of ROWS by COLS, with DOWN of the warps along the rows and ACROSS along the
// columns. TRANS_A and TRANS_B mean that an operand is transposed in shared memory.
template <int ROWS, int COLS, int DOWN, bool TRANS_A, bool TRANS_B, int ACROSS = WARPS / DOWN> struct Part {
  static constexpr int HEIGHT = ROWS / DOWN, WIDTH = COLS / ACROSS, USED = DOWN * ACROSS;
  using Sum = Fragment<HEIGHT, WIDTH, TRANS_A, TRANS_B>;
  static __device__ __forceinline__ int row() { return threadIdx.x / 32 % DOWN * HEIGHT; }
  static __device__ __forceinline__ int col() { return threadIdx.x / 32 / DOWN * WIDTH; }
};

constexpr int S_ACROSS = WARPS / S_WARPS < BN / 16 ? WARPS / S_WARPS : BN / 16;
using PartS = Part<BM, BN, S_WARPS, false, false, S_ACROSS>;
using PartK = Part<BN, HEAD_QK, K_WARPS, true, true>;
using PartV = Part<BN, HEAD_V, K_WARPS, true, true>;
using PartQ = Part<BM, HEAD_QK, Q_WARPS, false, true>;
using KeyWalk = Walk<BN, BM>; // own rows are keys, others queries

// Shared is the layout of shared memory.
struct Shared {
  static constexpr int K = 0, V = K + Operand<BN, HEAD_QK>::BYTES, P = V + Operand<BN, HEAD_V>::BYTES;
  static constexpr int DS = P + Operand<BM, BN>::BYTES, STAGE = DS + Operand<BM, BN>::BYTES;
  // Of a stage.
  static constexpr int DO = Operand<BM, HEAD_QK>::BYTES, LSE = DO + Operand<BM, HEAD_V>::BYTES, DELTA = LSE + BM * 4,
                       STAGE_BYTES = DELTA + BM * 4;
  static constexpr int BYTES = STAGE + STAGES * STAGE_BYTES;
};

// Queries is the walk of a block over all heads of the group, with its loads.
struct Queries {
  const FlashParams& p;
  KeyWalk walk;
  int head, end_head;

  __device__ __forceinline__ bool next() {
    if (walk.next()) {
      return true;
    }
    if (++head == end_head) {
      return false;
    }
    walk.restart();
    return walk.next();
  }

  __device__ __forceinline__ void fetch(unsigned stage) const {
    const bool aligned = p.flags & ALIGNED;
    load<BM, HEAD_QK, THREADS>(
        stage, head_of<Stored>(p.q, blockIdx.y, head), p.q.seq, walk.other, 0, walk.end, p.dim, aligned);
    load<BM, HEAD_V, THREADS>(stage + Shared::DO, head_of<Stored>(p.dout, blockIdx.y, head), p.dout.seq, walk.other, 0,
        walk.end, p.dim_v, aligned);
    for (int i = threadIdx.x; i < BM; i += THREADS) {
      bool valid = walk.other + i < walk.end;
      copy4(stage + Shared::LSE + 4 * i, head_of<float>(p.lse, blockIdx.y, head) + (walk.other + i) * p.lse.seq, valid);
      copy4(stage + Shared::DELTA + 4 * i, head_of<float>(p.delta, blockIdx.y, head) + (walk.other + i) * p.delta.seq,
          valid);
    }
    copies_commit();
  }
};

// blank zeroes the keys in no tile: they may be NaN, and 0 times NaN is NaN.
template <int COLS> __device__ __forceinline__ void blank(unsigned smem, const KeyWalk& walk) {
  for (int j = threadIdx.x; j < BN; j += THREADS) {
    if (walk.covers(walk.own + j)) {
      continue;
    }
    for (int col = 0; col < COLS; col += Operand<BN, COLS>::PIECE) {
      store_shared(smem + Operand<BN, COLS>::offset(j, col), 0, 0, 0, 0);
    }
  }
}

// hide sets the scores of pairs that the current tile hides to -inf. Their dP does not matter.
__device__ __forceinline__ void hide(PartS::Sum& s, PartS::Sum& dp, const KeyWalk& walk) {
  const Tile& tile = walk.tile();
#pragma unroll
  for (int r = 0; r < PartS::Sum::ROWS; r++) {
    const unsigned lane = threadIdx.x % 32;
    int i = walk.other + PartS::row() + PartS::Sum::row(r) + PartS::Sum::first_row(lane),
        column = walk.own + PartS::col() + PartS::Sum::first_col(lane);
    int lo = max(tile.own_lo, i - tile.hi) - column,
        hi = (i < walk.end ? min(tile.own_hi, i - tile.lo + 1) : 0) - column;
#pragma unroll
    for (int c = 0; c < PartS::Sum::COLS; c++) {
      int j = PartS::Sum::col(c);
      bool seen = j >= lo && j < hi;
      float &x = s.at(r, c), &y = dp.at(r, c);
      x = seen ? x : -INF;
      y = seen ? y : 0;
    }
  }
}

// differentiate turns scores S into probabilities P, and dP into dS, except for its factor scale.
template <bool CAP>
__device__ __forceinline__ void differentiate(PartS::Sum& s, PartS::Sum& dp, const FlashParams& p, unsigned stage) {
#pragma unroll
  for (int r = 0; r < PartS::Sum::ROWS; r++) {
    int at = PartS::row() + PartS::Sum::row(r) + PartS::Sum::first_row(threadIdx.x % 32);
    float lse = load_shared(stage + Shared::LSE + 4 * at), delta = load_shared(stage + Shared::DELTA + 4 * at);
    float base = lse == -INF ? INF : lse * LOG2E; // a row that saw nothing has probabilities 0
#pragma unroll
    for (int c = 0; c < PartS::Sum::COLS; c++) {
      float &x = s.at(r, c), &y = dp.at(r, c);
      float t = x * p.inverse, slope = CAP ? fmaxf(1 - t * t, 0) : 1; // tanh' = 1 - tanh^2; x may be -inf
      x = exp2_fast(x * p.unit - base);
      y = x * (y - delta) * slope;
    }
  }
}

// add_queries adds scale times x to dQ.
__device__ __forceinline__ void add_queries(const FlashParams& p, PartQ::Sum& x, const KeyWalk& walk, int head) {
  float* dq = head_of<float>(p.dq, blockIdx.y, head);
  x.each_four(p.scale, walk.other + PartQ::row(), PartQ::col(), walk.end, [&](int row, int col, const float (&z)[4]) {
    float* y = dq + row * p.dq.seq + col;
    if ((p.flags & ALIGNED_O) && col < p.dim) {
      add_global4(y, z[0], z[1], z[2], z[3]);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (col + j < p.dim) {
        add_global(y + j, z[j]);
      }
    }
  });
}

// add_keys adds factor times x to dK or dV. The block owns their rows.
template <class P>
__device__ __forceinline__ void add_keys(
    const FlashParams& p, const Strided& d, typename P::Sum& x, float factor, int dim, const KeyWalk& walk) {
  float* to = head_of<float>(d, blockIdx.y, blockIdx.x);
  using Sum = typename P::Sum;
  const unsigned lane = threadIdx.x % 32;
  const bool aligned = p.flags & ALIGNED_O;
#pragma unroll
  for (int r = 0; r < Sum::ROWS; r++) {
    int j = walk.own + P::row() + Sum::row(r) + Sum::first_row(lane);
    if (!walk.covers(j)) {
      continue;
    }
    float* row = to + j * d.seq;
#pragma unroll
    for (int c = 0; c < Sum::COLS; c += 2) {
      const float a = factor * x.at(r, c), b = factor * x.at(r, c + 1);
      int col = P::col() + Sum::col(c) + Sum::first_col(lane);
      float* y = row + col;
      if (aligned && col < dim) {
        float2 old = *(const float2*)y;
        *(float2*)y = {old.x + a, old.y + b};
      } else {
        if (col < dim) {
          y[0] += a;
        }
        if (col + 1 < dim) {
          y[1] += b;
        }
      }
    }
  }
}

template <class T, bool ORDERED> __device__ __forceinline__ void backward(const FlashParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = smem_address(shared), k = base + Shared::K, v = base + Shared::V, ps = base + Shared::P,
                 ds = base + Shared::DS;
  const int kv_head = blockIdx.x, group = p.heads / p.kv_heads;
  const int own = blockIdx.z * BN; // under a causal mask, the first ones have the most work
  const bool aligned = p.flags & ALIGNED;

  Queries at{p, KeyWalk(p, own), kv_head * group, (kv_head + 1) * group};
  if (!at.next()) {
    return;
  }
  load<BN, HEAD_QK, THREADS>(k, head_of<Stored>(p.k, blockIdx.y, kv_head), p.k.seq, own, 0, p.seq_k, p.dim, aligned);
  load<BN, HEAD_V, THREADS>(v, head_of<Stored>(p.v, blockIdx.y, kv_head), p.v.seq, own, 0, p.seq_k, p.dim_v, aligned);
  unsigned stage = base + Shared::STAGE;
  at.fetch(stage);
  copies_wait<0>();
  __syncthreads();
  blank<HEAD_QK>(k, at.walk);
  blank<HEAD_V>(v, at.walk);

  PartK::Sum dk;
  PartV::Sum dv;
  clear(dk);
  clear(dv);
  for (bool more = true; more;) {
    copies_wait<0>();
    __syncthreads(); // this stage is loaded; the other, P and dS have been read
    const Queries now = at;
    const unsigned present = stage;
    if (STAGES == 2) {
      stage = 2 * base + 2 * Shared::STAGE + Shared::STAGE_BYTES - stage;
      more = at.next();
      if (more) {
        at.fetch(stage);
      }
    }
    if (PartS::USED == WARPS || threadIdx.x < 32 * PartS::USED) {
      PartS::Sum s, dp;
      clear(s);
      multiply<T, HEAD_QK>(
          s, InShared<BM, HEAD_QK, false>(present, PartS::row()), InShared<BN, HEAD_QK, false>(k, PartS::col()));
      clear(dp);
      multiply<T, HEAD_V>(dp, InShared<BM, HEAD_V, false>(present + Shared::DO, PartS::row()),
          InShared<BN, HEAD_V, false>(v, PartS::col()));
      transform(s, p);
      if (!now.walk.whole()) {
        hide(s, dp, now.walk);
      }
      if (p.flags & CAPPED) {
        differentiate<true>(s, dp, p, present);
      } else {
        differentiate<false>(s, dp, p, present);
      }
      keep<T, BM, BN>(ps, s, PartS::row(), PartS::col());
      keep<T, BM, BN>(ds, dp, PartS::row(), PartS::col());
    }
    __syncthreads(); // P and dS are stored
    multiply<T, BM>(dv, InShared<BM, BN, true, PartV::HEIGHT>(ps, PartV::row()),
        InShared<BM, HEAD_V, true, PartV::WIDTH>(present + Shared::DO, PartV::col()));
    multiply<T, BM>(dk, InShared<BM, BN, true, PartK::HEIGHT>(ds, PartK::row()),
        InShared<BM, HEAD_QK, true, PartK::WIDTH>(present, PartK::col()));
    if (STAGES == 1) {
      __syncthreads(); // Q and dO have been read
      more = at.next();
      if (more) {
        at.fetch(stage);
      }
    }
    if (!ORDERED) {
      PartQ::Sum dq;
      clear(dq);
      multiply<T, BN>(
          dq, InShared<BM, BN, false>(ds, PartQ::row()), InShared<BN, HEAD_QK, true, PartQ::WIDTH>(k, PartQ::col()));
      add_queries(p, dq, now.walk, now.head);
    }
  }
  add_keys<PartK>(p, p.dk, dk, p.scale, p.dim, at.walk);
  add_keys<PartV>(p, p.dv, dv, 1, p.dim_v, at.walk);
}

#define KERNEL(name, T, ORDERED) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ FlashParams p) { \
    backward<T, ORDERED>(p); \
  }
#define ENTRY(name, T) KERNEL(flash_backward_##name, T, false) KERNEL(flash_backward_ordered_##name, T, true)
FOR_TYPES(ENTRY)
