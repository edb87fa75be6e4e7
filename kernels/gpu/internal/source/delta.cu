// The gated delta rule; see attention/delta and, for the algebra of a chunk of 64 rows, kernels/cpu/delta.go:
//
//	A = beta_i k_i.k_j D(i, j) for j < i;   T = inverse of 1 + A;   P = scale q_i.k_j D(i, j) for j <= i
//	E = T (beta_i (v_i - D(i, before) S' k_i));   o = scale D(i, before) q S + P E
//	S' = D(last, before) S + (D(last, i) k_i)' E
//
// delta_prepare computes P and T of all chunks at once, delta_forward and delta_reverse follow the states and their
// gradients through the chunks of a segment, with a block for 32 or 64 columns of a state, and delta_grads computes the
// gradients of all chunks at once. The gradient of T's right factor is X = T' dE, and that of A is -X E'.
//
// 16-bit floats are multiplied on tensor cores. Sums, states and decays are float32, sums of g float64.
//
// Compiled with SLICE, the columns of v that delta_grads takes at once, and FLOAT32, for float32, or HOPPER, for wgmma.
#include "delta_chain.cuh"
#include "delta_grads.cuh"

// Prepared has the shared memory of delta_prepare: tiles of q and k, replaced by A and T; P; factors of a head and the
// next.
struct Prepared {
  static constexpr int KEYS = ROWS * TILE * SIZE, SQUARES = 2 * sizeof(Square), PAIRS = ROWS * ROWS * SIZE;
  static constexpr int A = 0, T = sizeof(Square), P = 2 * KEYS > SQUARES ? 2 * KEYS : SQUARES, F = P + PAIRS;
  static_assert(P % 1024 == 0, "P is aligned");
};

// set_factors sets the factors of a head. A warp calls it.
__device__ __forceinline__ void set_factors(Factors& f, const DeltaParams& p, const Chunk& c, int head) {
  const int lane = threadIdx.x % 32;
  double g[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool inside = lane * 2 + i < c.n;
    g[i] = inside ? *c.at<float>(p.g, head, lane * 2 + i, 0) : 0;
    f.beta[lane * 2 + i] = inside ? *c.at<float>(p.beta, head, lane * 2 + i, 0) : 0;
  }
  scan(g[0], g[1]);
  const double last = __shfl_sync(0xffffffffu, g[1], 31);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane * 2 + i;
    const double sum = g[i] * 1.4426950408889634;
    f.sum[row] = (float)sum;
    f.rest[row] = fabsf(f.sum[row]) < INF ? (float)(sum - f.sum[row]) : 0;
    f.into[row] = row < c.n ? expf((float)g[i]) : 0;
    f.out[row] = row < c.n ? expf((float)(last - g[i])) : 0;
  }
}

template <class T> __device__ __forceinline__ void prepare(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned q = smem_address(shared), k = q + Prepared::KEYS, pairs_at = q + Prepared::P;
  Square &a = *(Square*)(shared + Prepared::A), &t = *(Square*)(shared + Prepared::T);
  Factors* const factors = (Factors*)(shared + Prepared::F);
  const Chunk c(p, blockIdx.x, blockIdx.z);
  const int warp = threadIdx.x / 32, row = warp % 4 * 16, col = warp / 4 * 32;
  const int group = p.heads / p.key_heads, end = (blockIdx.y + 1) * group;
  Sum<16, 32> qk, kk;
  zero(qk), zero(kk);
  for (int d = 0; d < p.dim; d += TILE) {
    c.load<TILE>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    c.load<TILE>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    copies_commit();
    if (d == 0 && warp == 7) set_factors(factors[(end - group) % 2], p, c, end - group);
    copies_wait<0>();
    block_sync();
    using Rows = Matrix<ROWS, TILE, false>;
    product<T, TILE>(qk, Rows{q, row}, Rows{k, col});
    product<T, TILE>(kk, Rows{k, row}, Rows{k, col});
    complete(qk, kk);
    __syncthreads();
  }
  for (int head = end - group; head < end; head++) {
    const Factors& f = factors[head % 2];
    const long long to = c.of_head(p, head);
    const Spot<ROWS, ROWS> at(pairs_at, row, col);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int i = at.row + n % 2 * 8, j = at.col + n / 2 * 8;
      float x[2];
#pragma unroll
      for (int l = 0; l < 2; l++) {
        const bool inside = j + l <= i && i < c.n;
        const float by = decay(f, i, j + l);
        x[l] = inside ? p.scale * qk.x[0][n / 2][n % 2 * 2 + l] * by : 0;
        a[j + l][i] = inside && j + l < i ? f.beta[i] * kk.x[0][n / 2][n % 2 * 2 + l] * by : 0;
      }
      put_shared<T>(at(n % 2 * 8, n / 2 * 8), x[0], x[1]);
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
      invert(t, a);
    } else if (threadIdx.x >= HALF) {
      for (int i = threadIdx.x % HALF; i < Prepared::PAIRS / 16; i += HALF) {
        float y[4];
        load_shared(pairs_at + i * 16, y);
        ((float4*)(p.p + to * ROWS * ROWS))[i] = make_float4(y[0], y[1], y[2], y[3]);
      }
      const float* from = (const float*)&f;
      for (int i = threadIdx.x % HALF; i < int(sizeof f / 4); i += HALF) ((float*)(p.factors + to))[i] = from[i];
      if (warp == 7 && head + 1 < end) set_factors(factors[(head + 1) % 2], p, c, head + 1);
    }
    __syncthreads();
    multiply_below(t, a);
#pragma unroll
    for (unsigned i = threadIdx.x * 2; i < ROWS * ROWS; i += THREADS * 2) {
      const unsigned row = i / ROWS, col = i % ROWS;
      char* const at = (char*)(p.t + to * ROWS * ROWS) + Operand<ROWS, ROWS>::offset(row, col);
      const float2 x = *(const float2*)&t[row][col];
      if constexpr (SIZE == 4) {
        *(float2*)at = x;
      } else {
        *(unsigned*)at = pack<T>(x.x, x.y);
      }
    }
  }
}

// DeltaMaps are the arguments of delta_compose: batch for maps, head for heads, seq for rows. columns are those of
// earlier, a map or a state.
struct DeltaMaps {
  Strided to, later, earlier;
  int dim, columns, begin, unused; // begin: the first column of later's summand
};

// compose sets to to M2 M1 | M2 R1 + R2, or M2 S + R2. A block has 16 rows, of all columns; if to is earlier, 16
// columns, of all rows. It reads its part of the operand that it overwrites before.
constexpr int PANEL = 16;
template <class T> __device__ __forceinline__ void compose(const DeltaMaps& p) {
  extern __shared__ __align__(1024) char shared[];
  float* panel = (float*)shared; // [dim][PANEL]
  const float *later = head_of<float>(p.later, blockIdx.z, blockIdx.y);
  const float *earlier = head_of<float>(p.earlier, blockIdx.z, blockIdx.y);
  float* to = head_of<float>(p.to, blockIdx.z, blockIdx.y);
  const bool down = to == earlier;
  const int from = blockIdx.x * PANEL, most = down ? p.columns : p.dim, length = down ? p.dim : p.columns;
  for (int i = threadIdx.x; i < PANEL * p.dim; i += THREADS) {
    int j = down ? from + i % PANEL : from + i / p.dim, k = down ? i / PANEL : i % p.dim;
    panel[k * PANEL + j - from] = j >= most ? 0 : down ? earlier[k * p.earlier.seq + j] : later[j * p.later.seq + k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < length; i += THREADS) {
    float sum[PANEL];
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
      int row = down ? i : from + j, col = down ? from + j : i;
      bool more = from + j < most && col >= p.begin;
      sum[j] = more ? later[row * p.later.seq + p.dim + col - p.begin] : 0;
    }
    for (int k = 0; k < p.dim; k++) {
      float x = down ? later[i * p.later.seq + k] : earlier[k * p.earlier.seq + i];
#pragma unroll
      for (int j = 0; j < PANEL; j++) sum[j] += x * panel[k * PANEL + j];
    }
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
      if (from + j < most) to[(down ? i : from + j) * p.to.seq + (down ? from + j : i)] = sum[j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_compose(const __grid_constant__ DeltaMaps p) {
  compose<float>(p);
}

// Blocks of delta_prepare that share an SM, without spills.
#ifdef HOPPER
constexpr int PREPARING = 3;
#else
constexpr int PREPARING = SIZE == 2 ? 2 : 1;
#endif

#define KERNEL(NAME, T, BLOCKS, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME##_##T(const __grid_constant__ DeltaParams p) { \
    __VA_ARGS__(p);                                                                                                \
  }
#define CHAINS(T, DIM, COLS)                                           \
  KERNEL(delta_forward_##DIM##_##COLS, T, 1, forward<T##_t, DIM, COLS>) \
  KERNEL(delta_reverse_##DIM##_##COLS, T, 1, reverse<T##_t, DIM, COLS>)
#define ALL(T)                                               \
  KERNEL(delta_prepare, T, PREPARING, prepare<T##_t>)          \
  CHAINS(T, 128, 32)                                         \
  CHAINS(T, 256, 32)                                         \
  KERNEL(delta_grads, T, 1, grads<T##_t>)

#ifdef FLOAT32
ALL(fp32)
#else
ALL(bf16)
ALL(fp16)
CHAINS(bf16, 128, 64)
CHAINS(fp16, 128, 64)
#endif
