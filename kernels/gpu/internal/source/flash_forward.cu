// Attention forward, FlashAttention-2 (arXiv:2307.08691): a block of threads owns BM queries
// of a head, keeps their Q in shared memory, and visits blocks of BN keys. S and O stay in
// registers; every warp owns complete rows. At the end, the kernel folds in earlier results, O and
// LSE in global memory.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, BN, WARPS, and SPLIT, the number of warps that share
// rows, because their registers do not hold O: each computes their scores, and its part of O's columns.
#include "flash_products.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int DOWN = WARPS / SPLIT;            // warps along the rows
constexpr int HEIGHT = BM / DOWN;              // rows of a warp
constexpr int WIDTH = HEAD_V / SPLIT;          // its columns of O

using QTile = Operand<BM, HEAD_QK>;
using KTile = Operand<BN, HEAD_QK>;
using VTile = Operand<BN, HEAD_V>;
using QueryWalk = Walk<BM, BN>;
using Scores = Fragment<HEIGHT, BN, false, false>;
using Output = Fragment<HEIGHT, WIDTH, false, true>;
constexpr int ROWS = Scores::ROWS;
static_assert(ROWS == Output::ROWS, "a lane has the same rows of both");

// State holds a lane's part of the rows of its warp.
struct State {
  Output o;         // sum of exp2(unit * s - base) v
  float base[ROWS]; // unit times the largest score, -inf before any
  float sum[ROWS];  // sum of exp2(unit * s - base), over this lane's columns
};

// first_row returns the first row of this thread.
__device__ __forceinline__ int first_row(int own) {
  unsigned thread = threadIdx.x;
  hide_value(thread); // saves a register in the main loop
  return own + thread / 32 % DOWN * HEIGHT + Scores::first_row(thread % 32);
}

// first_col returns the first column of O of this warp.
__device__ __forceinline__ int first_col() { return SPLIT > 1 ? threadIdx.x / 32 / DOWN * WIDTH : 0; }

// rows_sync is a barrier of the lanes that share rows.
__device__ __forceinline__ void rows_sync() { SPLIT > 1 ? __syncthreads() : __syncwarp(); }

// mask hides the pairs that the current tile hides. The first key of s is walk.other.
__device__ __forceinline__ void mask(Scores& s, const QueryWalk& walk) {
  int row = first_row(walk.own);
  const Tile& tile = walk.tile();
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = row + Scores::row(r), column = Scores::first_col(threadIdx.x % 32) + walk.other;
    bool in = i >= tile.own_lo && i < tile.own_hi;
    int lo = i + tile.lo - column, hi = (in ? min(tile.other_hi, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int c = 0; c < Scores::COLS; c++) {
      int j = Scores::col(c);
      float& x = s.at(r, c);
      x = j >= lo && j < hi ? x : -INF;
    }
  }
}

// softmax replaces scores by probabilities relative to base, and rescales o and sum. In later blocks, a row's base
// changes less and less often.
__device__ __forceinline__ void softmax(Scores& s, State& state, float unit) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float most = -INF;
#pragma unroll
    for (int c = 0; c < Scores::COLS; c += 2) {
      most = fmaxf(most, fmaxf(s.at(r, c), s.at(r, c + 1)));
    }
    most = same_row<Scores>(most, [](float x, float y) { return fmaxf(x, y); });
    float old = state.base[r], base = fmaxf(old, most * unit);
    const bool moves =
        HEAD_V <= 64 || __any_sync(0xffffffff, base != old); // a small O is rescaled faster than checked
    state.base[r] = base;
    base = base == -INF ? 0 : base; // a row that has seen no key gets zeros
    float shrink = exp2_fast(old - base), sum = 0;
#pragma unroll
    for (int c = 0; c < Scores::COLS; c++) {
      s.at(r, c) = exp2_fast(s.at(r, c) * unit - base);
      sum += s.at(r, c);
    }
    state.sum[r] = state.sum[r] * shrink + sum;
    if (moves) {
#pragma unroll
      for (int c = 0; c < Output::COLS; c++) {
        state.o.at(r, c) *= shrink;
      }
    }
  }
}

// fold merges the state into O and LSE. The old state counts as one more key, with its LSE as the
// score and its O as the value. It does not write rows that saw no key.
__device__ __forceinline__ void fold(const FlashParams& p, State& state, int own) {
  int row = first_row(own);
  float *o = head_of<float>(p.o, blockIdx.y, blockIdx.x), *lse = head_of<float>(p.lse, blockIdx.y, blockIdx.x);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = row + Scores::row(r);
    float sum = same_row<Scores>(state.sum[r], [](float x, float y) { return x + y; });
    float before = i < p.seq_q ? lse[i * p.lse.seq] * LOG2E : 0;
    rows_sync(); // all lanes of the row have read LSE
    if (i >= p.seq_q || sum == 0 && (before != -INF || !QueryWalk(p, own).sees(i))) {
      continue;
    }
    sum = sum == 0 ? NOT_A_NUMBER : sum;
    float now = state.base[r];
    float top = fmaxf(before, now), a = exp2_fast(before - top), b = exp2_fast(now - top);
    float total = a + b * sum;
    a = quotient(a, total);
    b = quotient(b, total);
    const int first = first_col() + Output::first_col(threadIdx.x % 32);
    float* x = o + i * p.o.seq + first;
#pragma unroll
    for (int c = 0; c < Output::COLS; c += 2) {
      int col = Output::col(c), left = p.dim_v - (col + first);
      float y0 = b * state.o.at(r, c), y1 = b * state.o.at(r, c + 1);
      if ((p.flags & ALIGNED_O) && left > 0) {
        float2 old = *(const float2*)(x + col);
        *(float2*)(x + col) = {y0 + a * old.x, y1 + a * old.y};
      } else {
        if (left > 0) {
          x[col] = y0 + a * x[col];
        }
        if (left > 1) {
          x[col + 1] = y1 + a * x[col + 1];
        }
      }
    }
    if (threadIdx.x % Output::LANES == 0 && first_col() == 0) {
      lse[i * p.lse.seq] = (top + log2_of(total)) * LN2;
    }
  }
}

// hidden_head recomputes the beginning of a head each time, to save registers.
__device__ __forceinline__ const Stored* hidden_head(const Strided& s, unsigned head) {
  hide_value(head);
  return head_of<Stored>(s, blockIdx.y, head);
}

template <class T> __device__ __forceinline__ void forward(const FlashParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned q = smem_address(shared), k = q + QTile::BYTES, v = k + KTile::BYTES, passed = v + VTile::BYTES;
  const int head = blockIdx.x, batch = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
  const int own = (gridDim.z - 1 - blockIdx.z) * BM; // under a causal mask, the last ones have the most work
  const int warp = threadIdx.x / 32 % DOWN * HEIGHT;
  const bool aligned = p.flags & ALIGNED;

  QueryWalk walk(p, own);
  if (!walk.next()) {
    return;
  }
  load<BM, HEAD_QK, THREADS>(q, head_of<Stored>(p.q, batch, head), p.q.seq, own, 0, p.seq_q, p.dim, aligned);
  load<BN, HEAD_QK, THREADS>(k, hidden_head(p.k, kv_head), p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
  copies_commit();

  State state;
  clear(state.o);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    state.base[r] = -INF;
    state.sum[r] = 0;
  }
  for (bool more = true; more;) {
    copies_wait<0>();
    __syncthreads(); // K is loaded; V has been read
    load<BN, HEAD_V, THREADS>(v, hidden_head(p.v, kv_head), p.v.seq, walk.other, 0, walk.end, p.dim_v, aligned);
    copies_commit();

    Scores s;
    clear(s);
    multiply<T, HEAD_QK>(s, InShared<BM, HEAD_QK, false>(q, warp), InShared<BN, HEAD_QK, false>(k, 0));
    transform(s, p);
    if (!walk.whole()) {
      mask(s, walk);
    }
    softmax(s, state, p.unit);
    const Left<T, HEIGHT, BN> probabilities(s, passed);

    copies_wait<0>();
    __syncthreads(); // V is loaded; K has been read
    more = walk.next();
    if (more) {
      load<BN, HEAD_QK, THREADS>(k, hidden_head(p.k, kv_head), p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
      copies_commit();
    }
    multiply<T, BN>(state.o, probabilities, InShared<BN, HEAD_V, true>(v, first_col()));
  }
  fold(p, state, own);
}

// An SM runs this number of blocks at once if each gives up registers; float32 has none to give up.
constexpr int BLOCKS = sizeof(Stored) == 2 && HEAD_V <= 64 ? 3 : 1;

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) \
      flash_forward_##name(const __grid_constant__ FlashParams p) { \
    forward<T>(p); \
  }
FOR_TYPES(ENTRY)
