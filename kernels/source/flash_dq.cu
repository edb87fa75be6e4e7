// dQ of attention in a certain order: a block of threads owns BM queries of a head and walks
// over blocks of BN keys, as the forward pass does; S and dP are computed once more, which is
// what determinism costs. Every warp owns 16 rows, so that dS stays in registers.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, BN, and WARPS.
#include "flash.cuh"

constexpr int THREADS = WARPS * 32;
static_assert(BM == WARPS * 16, "every warp owns 16 rows");
constexpr int NT = BN / 8, DT = HEAD_QK / 8;

using QTile = Operand<BM, HEAD_QK>;
using OTile = Operand<BM, HEAD_V>;
using KTile = Operand<BN, HEAD_QK>;
using QueryWalk = Walk<BM, BN>;

__device__ __forceinline__ int first_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

// hide gives what the present tile hides a score of -inf, and a dP that does not matter.
__device__ __forceinline__ void hide(float (&s)[1][NT][4], float (&dp)[1][NT][4], const QueryWalk& walk) {
  const Tile& tile = walk.tile();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int i = walk.own + first_row() + h * 8, column = walk.other + threadIdx.x % 4 * 2;
    bool in = i >= tile.own_lo && i < tile.own_hi;
    int lo = i + tile.lo - column, hi = (in ? min(walk.end, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int n = 0; n < NT * 2; n++) {
      int j = n / 2 * 8 + n % 2;
      bool seen = j >= lo && j < hi;
      float &x = s[0][n / 2][h * 2 + n % 2], &y = dp[0][n / 2][h * 2 + n % 2];
      x = seen ? x : -INF;
      y = seen ? y : 0;
    }
  }
}

// differentiate turns dP into dS, except for its factor scale.
template <bool CAP> __device__ __forceinline__ void differentiate(const float (&s)[1][NT][4], float (&dp)[1][NT][4], const float (&base)[2], const float (&delta)[2], const FlashParams& p) {
#pragma unroll
  for (int n = 0; n < NT * 4; n++) {
    float x = s[0][n / 4][n % 4], &y = dp[0][n / 4][n % 4];
    float t = x * p.inverse, slope = CAP ? fmaxf(1 - t * t, 0) : 1; // tanh' = 1 - tanh^2; x may be -inf
    y = exp2_fast(x * p.unit - base[n % 4 / 2]) * (y - delta[n % 4 / 2]) * slope;
  }
}

// add adds scale times x to the rows of dQ that are in a tile.
__device__ __forceinline__ void add(const FlashParams& p, const float (&x)[1][DT][4], const QueryWalk& walk, int batch, int head) {
  float* dq = head_of<float>(p.dq, batch, head);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int i = walk.own + first_row() + h * 8;
    if (!walk.covers(i)) {
      continue;
    }
#pragma unroll
    for (int d = 0; d < DT; d++) {
      int col = d * 8 + threadIdx.x % 4 * 2;
      float* y = dq + i * p.dq.seq + col;
      if (col < p.dim) {
        y[0] += p.scale * x[0][d][h * 2];
      }
      if (col + 1 < p.dim) {
        y[1] += p.scale * x[0][d][h * 2 + 1];
      }
    }
  }
}

template <class T> __device__ __forceinline__ void queries(const FlashParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned q = smem_address(shared), dout = q + QTile::BYTES, k = dout + OTile::BYTES, v = k + KTile::BYTES;
  const int head = blockIdx.x, batch = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
  const int own = (gridDim.z - 1 - blockIdx.z) * BM, warp = threadIdx.x / 32 * 16;
  const unsigned short *ks = head_of<unsigned short>(p.k, batch, kv_head), *vs = head_of<unsigned short>(p.v, batch, kv_head);
  const bool aligned = p.flags & ALIGNED;

  QueryWalk walk(p, own);
  if (!walk.next()) {
    return;
  }
  load<BM, HEAD_QK, THREADS>(q, head_of<unsigned short>(p.q, batch, head), p.q.seq, own, 0, p.seq_q, p.dim, aligned);
  load<BM, HEAD_V, THREADS>(dout, head_of<unsigned short>(p.dout, batch, head), p.dout.seq, own, 0, p.seq_q, p.dim_v, aligned);
  load<BN, HEAD_QK, THREADS>(k, ks, p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
  load<BN, HEAD_V, THREADS>(v, vs, p.v.seq, walk.other, 0, walk.end, p.dim_v, aligned);
  copies_commit();

  float base[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int i = own + first_row() + h * 8;
    float lse = i < p.seq_q ? head_of<float>(p.lse, batch, head)[i * p.lse.seq] : -INF;
    base[h] = lse == -INF ? INF : lse * LOG2E; // a row that saw nothing has probabilities 0
    delta[h] = i < p.seq_q ? head_of<float>(p.delta, batch, head)[i * p.delta.seq] : 0;
  }
  float dq[1][DT][4];
  clear(dq);
  for (bool more = true; more;) {
    copies_wait<0>();
    __syncthreads(); // K and V are there
    float s[1][NT][4], dp[1][NT][4];
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
    multiply<T, BN>(dq, InRegisters<T, 1, NT>(dp), InShared<BN, HEAD_QK, true>(k, 0));
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_dq_bf16(const __grid_constant__ FlashParams p) { queries<bf16_t>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_dq_fp16(const __grid_constant__ FlashParams p) { queries<fp16_t>(p); }
