// dQ of attention in a fixed order: a block of threads owns BM queries of a head and visits blocks of BN keys, as the
// forward pass does. It computes S and dP again, which is the cost of determinism. Every warp owns complete rows,
// so that no warp waits for another's dS.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, BN, WARPS, and SPLIT, the number of warps that share
// rows: each computes their dS, and its part of dQ's columns.
#include "flash_products.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int DOWN = WARPS / SPLIT;     // warps along the rows
constexpr int HEIGHT = BM / DOWN;       // rows of a warp
constexpr int WIDTH = HEAD_QK / SPLIT;  // its columns of dQ
using QTile = Operand<BM, HEAD_QK>;
using OTile = Operand<BM, HEAD_V>;
using KTile = Operand<BN, HEAD_QK>;
using VTile = Operand<BN, HEAD_V>;
using QueryWalk = Walk<BM, BN>;

using Scores = Fragment<HEIGHT, BN, false, false>;
using Sum = Fragment<HEIGHT, WIDTH, false, true>;
constexpr int ROWS = Scores::ROWS;
static_assert(ROWS == Sum::ROWS, "a lane has the same rows of both");

__device__ __forceinline__ int first_row() {
  return threadIdx.x / 32 % DOWN * HEIGHT + Scores::first_row(threadIdx.x % 32);
}

// first_col returns the first column of dQ of this warp.
__device__ __forceinline__ int first_col() { return SPLIT > 1 ? threadIdx.x / 32 / DOWN * WIDTH : 0; }

// hide sets the scores of pairs that the current tile hides to -inf. Their dP does not matter.
__device__ __forceinline__ void hide(Scores& s, Scores& dp, const QueryWalk& walk) {
  const Tile& tile = walk.tile();
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = walk.own + first_row() + Scores::row(r), column = walk.other + Scores::first_col(threadIdx.x % 32);
    bool in = i >= tile.own_lo && i < tile.own_hi;
    int lo = i + tile.lo - column, hi = (in ? min(walk.end, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int c = 0; c < Scores::COLS; c++) {
      int j = Scores::col(c);
      bool seen = j >= lo && j < hi;
      float &x = s.at(r, c), &y = dp.at(r, c);
      x = seen ? x : -INF;
      y = seen ? y : 0;
    }
  }
}

// differentiate turns dP into dS, except for its factor scale.
template <bool CAP>
__device__ __forceinline__ void differentiate(
    const Scores& s, Scores& dp, const float (&base)[ROWS], const float (&delta)[ROWS], const FlashParams& p) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < Scores::COLS; c++) {
      float x = s.at(r, c), &y = dp.at(r, c);
      float t = x * p.inverse, slope = CAP ? fmaxf(1 - t * t, 0) : 1; // tanh' = 1 - tanh^2; x may be -inf
      y = exp2_fast(x * p.unit - base[r]) * (y - delta[r]) * slope;
    }
  }
}

// add adds scale times x to the rows of dQ that are in a tile.
__device__ __forceinline__ void add(const FlashParams& p, const Sum& x, const QueryWalk& walk, int batch, int head) {
  float* dq = head_of<float>(p.dq, batch, head);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = walk.own + first_row() + Scores::row(r);
    if (!walk.covers(i)) {
      continue;
    }
#pragma unroll
    for (int c = 0; c < Sum::COLS; c += 2) {
      int col = first_col() + Sum::col(c) + Sum::first_col(threadIdx.x % 32);
      float* y = dq + i * p.dq.seq + col;
      if (col < p.dim) {
        y[0] += p.scale * x.at(r, c);
      }
      if (col + 1 < p.dim) {
        y[1] += p.scale * x.at(r, c + 1);
      }
    }
  }
}

template <class T> __device__ __forceinline__ void queries(const FlashParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned q = smem_address(shared), dout = q + QTile::BYTES, k = dout + OTile::BYTES, v = k + KTile::BYTES,
                 passed = v + VTile::BYTES;
  const int head = blockIdx.x, batch = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
  const int own = (gridDim.z - 1 - blockIdx.z) * BM, warp = threadIdx.x / 32 % DOWN * HEIGHT;
  const Stored *ks = head_of<Stored>(p.k, batch, kv_head), *vs = head_of<Stored>(p.v, batch, kv_head);
  const bool aligned = p.flags & ALIGNED;

  QueryWalk walk(p, own);
  if (!walk.next()) {
    return;
  }
  load<BM, HEAD_QK, THREADS>(q, head_of<Stored>(p.q, batch, head), p.q.seq, own, 0, p.seq_q, p.dim, aligned);
  load<BM, HEAD_V, THREADS>(dout, head_of<Stored>(p.dout, batch, head), p.dout.seq, own, 0, p.seq_q, p.dim_v, aligned);
  load<BN, HEAD_QK, THREADS>(k, ks, p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
  load<BN, HEAD_V, THREADS>(v, vs, p.v.seq, walk.other, 0, walk.end, p.dim_v, aligned);
  copies_commit();

  float base[ROWS], delta[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = own + first_row() + Scores::row(r);
    float lse = i < p.seq_q ? head_of<float>(p.lse, batch, head)[i * p.lse.seq] : -INF;
    base[r] = lse == -INF ? INF : lse * LOG2E; // a row that saw nothing has probabilities 0
    delta[r] = i < p.seq_q ? head_of<float>(p.delta, batch, head)[i * p.delta.seq] : 0;
  }
  Sum dq;
  clear(dq);
  for (bool more = true; more;) {
    copies_wait<0>();
    __syncthreads(); // K and V are loaded
    Scores s, dp;
    clear(s);
    multiply<T, HEAD_QK>(s, InShared<BM, HEAD_QK, false>(q, warp), InShared<BN, HEAD_QK, false>(k, 0));
    clear(dp);
    multiply<T, HEAD_V>(dp, InShared<BM, HEAD_V, false>(dout, warp), InShared<BN, HEAD_V, false>(v, 0));
    transform(s, p);
    if (!walk.whole()) {
      hide(s, dp, walk);
    }
    if (p.flags & CAPPED) {
      differentiate<true>(s, dp, base, delta, p);
    } else {
      differentiate<false>(s, dp, base, delta, p);
    }
    multiply<T, BN>(dq, Left<T, HEIGHT, BN>(dp, passed), InShared<BN, HEAD_QK, true>(k, first_col()));
    __syncthreads(); // K and V have been read
    more = walk.next();
    if (more) {
      load<BN, HEAD_QK, THREADS>(k, ks, p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
      load<BN, HEAD_V, THREADS>(v, vs, p.v.seq, walk.other, 0, walk.end, p.dim_v, aligned);
      copies_commit();
    }
  }
  add(p, dq, walk, batch, head);
}

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_dq_##name(const __grid_constant__ FlashParams p) { \
    queries<T>(p); \
  }
FOR_TYPES(ENTRY)
