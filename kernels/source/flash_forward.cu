// Attention forward, FlashAttention-2 (arXiv:2307.08691): a block of threads owns BM queries
// of a head, whose Q stays in shared memory, and walks over blocks of BN keys. S and O stay in
// registers; every warp owns whole rows. What was seen before, O and LSE in global memory, is
// folded in at the end.
//
// Compiled with HEAD_QK and HEAD_V, the head dims rounded up, BM, BN, and WARPS.
#include "flash.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int MT = BM / WARPS / 16, NT = BN / 8, DT = HEAD_V / 8;

using QTile = Operand<BM, HEAD_QK>;
using KTile = Operand<BN, HEAD_QK>;
using VTile = Operand<BN, HEAD_V>;
using QueryWalk = Walk<BM, BN>;

// State is the rows of a warp: row m*16 + h*8 + lane/4 has index [m][h].
struct State {
  float o[MT][DT][4]; // sum of exp2(unit * s - base) v
  float base[MT][2];  // unit times the largest score, -inf before any
  float sum[MT][2];   // sum of exp2(unit * s - base), over this lane's columns
};

// first_row is the first row of this thread.
__device__ __forceinline__ int first_row(int own) {
  unsigned thread = threadIdx.x;
  hide_value(thread); // a register less in the main loop
  return own + thread / 32 * (MT * 16) + thread % 32 / 4;
}

// mask hides what the present tile hides; s is that of keys from walk.other on.
__device__ __forceinline__ void mask(float (&s)[MT][NT][4], const QueryWalk& walk) {
  int row = first_row(walk.own);
  const Tile& tile = walk.tile();
#pragma unroll
  for (int r = 0; r < MT * 2; r++) {
    int i = row + r / 2 * 16 + r % 2 * 8, column = threadIdx.x % 4 * 2 + walk.other;
    bool in = i >= tile.own_lo && i < tile.own_hi;
    int lo = i + tile.lo - column, hi = (in ? min(tile.other_hi, i + tile.hi + 1) : 0) - column;
#pragma unroll
    for (int n = 0; n < NT * 2; n++) {
      int j = n / 2 * 8 + n % 2;
      float& x = s[r / 2][n / 2][r % 2 * 2 + n % 2];
      x = j >= lo && j < hi ? x : -INF;
    }
  }
}

// softmax turns scores into probabilities over base, and o and sum with them. The later the block,
// the seldomer a row of the warp gets a new base.
__device__ __forceinline__ void softmax(float (&s)[MT][NT][4], State& state, float unit) {
#pragma unroll
  for (int r = 0; r < MT * 2; r++) {
    int m = r / 2, h = r % 2 * 2;
    float most = -INF;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      most = fmaxf(most, fmaxf(s[m][n][h], s[m][n][h + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    float old = state.base[m][r % 2], base = fmaxf(old, most * unit);
    const bool moves = HEAD_V <= 64 || __any_sync(0xffffffff, base != old); // a small O is scaled sooner than asked about
    state.base[m][r % 2] = base;
    base = base == -INF ? 0 : base; // a row that sees nothing yet gets zeros
    float shrink = exp2_fast(old - base), sum = 0;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int c = h; c < h + 2; c++) {
        s[m][n][c] = exp2_fast(s[m][n][c] * unit - base);
        sum += s[m][n][c];
      }
    }
    state.sum[m][r % 2] = state.sum[m][r % 2] * shrink + sum;
    if (moves) {
#pragma unroll
      for (int d = 0; d < DT; d++) {
        state.o[m][d][h] *= shrink;
        state.o[m][d][h + 1] *= shrink;
      }
    }
  }
}

// fold merges the state into O and LSE. The old state counts as one more key, whose score is
// its LSE and whose value is its O. Rows that saw no key are left alone.
__device__ __forceinline__ void fold(const FlashParams& p, State& state, int own) {
  int row = first_row(own);
  float *o = head_of<float>(p.o, blockIdx.y, blockIdx.x), *lse = head_of<float>(p.lse, blockIdx.y, blockIdx.x);
#pragma unroll
  for (int r = 0; r < MT * 2; r++) {
    int m = r / 2, h = r % 2 * 2, i = row + m * 16 + r % 2 * 8;
    float sum = state.sum[m][r % 2];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    float before = i < p.seq_q ? lse[i * p.lse.seq] * LOG2E : 0;
    __syncwarp(); // all lanes of the row have read LSE
    if (i >= p.seq_q || sum == 0) {
      continue;
    }
    float now = state.base[m][r % 2];
    float top = fmaxf(before, now), a = exp2_fast(before - top), b = exp2_fast(now - top);
    float total = a + b * sum;
    a = __fdividef(a, total);
    b = __fdividef(b, total);
    float* x = o + i * p.o.seq + threadIdx.x % 4 * 2;
#pragma unroll
    for (int d = 0; d < DT; d++) {
      int left = p.dim_v - (d * 8 + threadIdx.x % 4 * 2);
      float y0 = b * state.o[m][d][h], y1 = b * state.o[m][d][h + 1];
      if ((p.flags & ALIGNED_O) && left > 0) {
        float2 old = *(const float2*)(x + d * 8);
        *(float2*)(x + d * 8) = {y0 + a * old.x, y1 + a * old.y};
      } else {
        if (left > 0) {
          x[d * 8] = y0 + a * x[d * 8];
        }
        if (left > 1) {
          x[d * 8 + 1] = y1 + a * x[d * 8 + 1];
        }
      }
    }
    if (threadIdx.x % 4 == 0) {
      lse[i * p.lse.seq] = (top + __log2f(total)) * LN2;
    }
  }
}

// hidden_head is where a head begins, made anew each time: it would take registers otherwise.
__device__ __forceinline__ const unsigned short* hidden_head(const Strided& s, unsigned head) {
  hide_value(head);
  return head_of<unsigned short>(s, blockIdx.y, head);
}

template <class T> __device__ __forceinline__ void forward(const FlashParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned q = smem_address(shared), k = q + QTile::BYTES, v = k + KTile::BYTES;
  const int head = blockIdx.x, batch = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
  const int own = (gridDim.z - 1 - blockIdx.z) * BM; // causal masks give the last ones the most work
  const int warp = threadIdx.x / 32 * (MT * 16);
  const bool aligned = p.flags & ALIGNED;

  QueryWalk walk(p, own);
  if (!walk.next()) {
    return;
  }
  load<BM, HEAD_QK, THREADS>(q, head_of<unsigned short>(p.q, batch, head), p.q.seq, own, 0, p.seq_q, p.dim, aligned);
  load<BN, HEAD_QK, THREADS>(k, hidden_head(p.k, kv_head), p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
  copies_commit();

  State state;
  clear(state.o);
#pragma unroll
  for (int r = 0; r < MT * 2; r++) {
    state.base[r / 2][r % 2] = -INF;
    state.sum[r / 2][r % 2] = 0;
  }
  for (bool more = true; more;) {
    copies_wait<0>();
    __syncthreads(); // K is there; V has been read
    load<BN, HEAD_V, THREADS>(v, hidden_head(p.v, kv_head), p.v.seq, walk.other, 0, walk.end, p.dim_v, aligned);
    copies_commit();

    float s[MT][NT][4];
    clear(s);
    multiply<T, HEAD_QK>(s, InShared<BM, HEAD_QK, false>(q, warp), InShared<BN, HEAD_QK, false>(k, 0));
    transform(s, p);
    if (!walk.whole()) {
      mask(s, walk);
    }
    softmax(s, state, p.unit);
    const InRegisters<T, MT, NT> probabilities(s);

    copies_wait<0>();
    __syncthreads(); // V is there; K has been read
    more = walk.next();
    if (more) {
      load<BN, HEAD_QK, THREADS>(k, hidden_head(p.k, kv_head), p.k.seq, walk.other, 0, walk.end, p.dim, aligned);
      copies_commit();
    }
    multiply<T, BN>(state.o, probabilities, InShared<BN, HEAD_V, true>(v, 0));
  }
  fold(p, state, own);
}

constexpr int BLOCKS = HEAD_V <= 64 ? 3 : 1; // an SM holds so many if registers are spared for it

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_forward_bf16(const __grid_constant__ FlashParams p) { forward<bf16_t>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_forward_fp16(const __grid_constant__ FlashParams p) { forward<fp16_t>(p); }
