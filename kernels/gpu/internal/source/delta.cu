// The gated delta rule; see attention/delta and, for the algebra of a chunk of 64 rows, kernels/cpu/delta.go:
//
//	A = beta_i k_i.k_j D(i, j) for j < i;   T = inverse of 1 + A;   P = scale q_i.k_j D(i, j) for j <= i
//	E = T (beta_i (v_i - D(i, before) S' k_i));   o = scale D(i, before) q S + P E
//	S' = D(last, before) S + (D(last, i) k_i)' E
//
// delta_prepare computes P and T of all chunks at once, delta_forward and delta_reverse follow the states and their
// gradients through the chunks of a segment, with a block for 32 columns of a state, and delta_grads computes the
// gradients of all chunks at once. The gradient of T's right factor is X = T' dE, and that of A is -X E'.
//
// 16-bit floats are multiplied on tensor cores. Sums, states and decays are float32, sums of g float64.
//
// Compiled with SLICE, the columns of v that delta_grads takes at once, and, for float32, FLOAT32.
#include "delta_chain.cuh"
#include "delta_grads.cuh"

struct PrepareShared {
  Square a, t;
  Factors f;
};

template <class T> __device__ __forceinline__ void prepare(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int BYTES = ROWS * ROWS * SIZE;
  const unsigned q = smem_address(shared), k = q + BYTES;
  PrepareShared& m = *(PrepareShared*)(shared + 2 * BYTES);
  const Chunk c(p, blockIdx.x, blockIdx.z);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 16, col = warp % 2 * 32;
  Sum<16, 32> qk, kk;
  zero(qk), zero(kk);
  for (int d = 0; d < p.dim; d += ROWS) {
    c.load<ROWS>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    c.load<ROWS>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    InShared<ROWS, ROWS, false> keys(k, col);
    product<T, ROWS>(qk, InShared<ROWS, ROWS, false>(q, row), keys);
    product<T, ROWS>(kk, InShared<ROWS, ROWS, false>(k, row), keys);
    __syncthreads();
  }
  const int group = p.heads / p.key_heads;
  for (int head = blockIdx.y * group; head < int(blockIdx.y + 1) * group; head++) {
    const long long to = c.of_head(p, head);
    if (warp == 0) {
      double g[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        bool inside = lane * 2 + i < c.n;
        g[i] = inside ? *c.at<float>(p.g, head, lane * 2 + i, 0) : 0;
        m.f.beta[lane * 2 + i] = inside ? *c.at<float>(p.beta, head, lane * 2 + i, 0) : 0;
      }
      scan(g[0], g[1]);
      m.f.sum[lane * 2] = g[0], m.f.sum[lane * 2 + 1] = g[1];
      __syncwarp();
#pragma unroll
      for (int i = lane; i < ROWS; i += 32) {
        bool inside = i < c.n;
        m.f.into[i] = inside ? expf((float)m.f.sum[i]) : 0;
        m.f.out[i] = inside ? decay(m.f, c.n - 1, i) : 0;
      }
    }
    __syncthreads();
    const bool turned = p.flags & BACKWARD;
#pragma unroll
    for (int n = 0; n < Sum<16, 32>::NT * 4; n++) {
      int i = row + lane / 4 + n % 4 / 2 * 8, j = col + n / 4 * 8 + lane % 4 * 2 + n % 2;
      float d = j <= i && i < c.n ? decay(m.f, i, j) : 0;
      float x = j <= i && i < c.n ? p.scale * qk.x[0][n / 4][n % 4] * d : 0;
      float y = j < i && i < c.n ? kk.x[0][n / 4][n % 4] * d : 0;
      ((T*)p.p)[to * ROWS * ROWS + (turned ? j * ROWS + i : i * ROWS + j)] = from_float<T>(x);
      m.a[i][j] = m.f.beta[i] * y;
    }
    const float *from = (const float*)&m.f;
    for (int i = threadIdx.x; i < int(sizeof(Factors) / 4); i += THREADS) ((float*)(p.factors + to))[i] = from[i];
    __syncthreads();
    invert(m.t, m.a);
    for (int i = threadIdx.x * 2; i < ROWS * ROWS; i += THREADS * 2) {
      put_pair((T*)p.t + to * ROWS * ROWS + i, 2, m.t[i / ROWS][i % ROWS], m.t[i / ROWS][i % ROWS + 1]);
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

#define KERNEL(NAME, T, BLOCKS, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME##_##T(const __grid_constant__ DeltaParams p) { \
    __VA_ARGS__(p);                                                                                                \
  }
#define ALL(T)                                            \
  KERNEL(delta_prepare, T, 3, prepare<T##_t>)             \
  KERNEL(delta_forward_128, T, 1, forward<T##_t, 128>)    \
  KERNEL(delta_forward_256, T, 1, forward<T##_t, 256>)    \
  KERNEL(delta_reverse_128, T, 1, reverse<T##_t, 128>)    \
  KERNEL(delta_reverse_256, T, 1, reverse<T##_t, 256>)    \
  KERNEL(delta_grads, T, 1, grads<T##_t>)

#ifdef FLOAT32
ALL(fp32)
#else
ALL(bf16)
ALL(fp16)
#endif
