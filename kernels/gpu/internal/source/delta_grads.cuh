// The gradients of the inputs of delta.cu, of all chunks at once.
#pragma once
#include "delta.cuh"

// Grads has the shared memory of delta_grads: tiles of k and q, sums, gradients of P and A, and stages of dO, E, X, S
// and dS'. With one stage, the gradients replace its first operands.
struct Grads {
  static constexpr int KEYS = ROWS * TILE * SIZE, VALUES = ROWS * SLICE * SIZE, STATES = TILE * SLICE * SIZE;
  static constexpr int PAIRS = ROWS * ROWS * SIZE;
  static constexpr int K = 0, Q = KEYS, MORE = 2 * KEYS, STAGE = MORE + 7168;
  static constexpr int STAGE_BYTES = 3 * VALUES + 2 * STATES;
};

struct GradSums {
  Factors f[2];                                       // of a head and the next
  float dots[3][4][ROWS], diagonal[ROWS], whole[8]; // of warps and rows; X E of rows; of warps
};
static_assert(sizeof(GradSums) <= Grads::STAGE - Grads::MORE, "room for the sums");

// dot returns the product of two rows of n elements, to all lanes.
template <class A, class B> __device__ __forceinline__ float dot(const A* x, const B* y, int n) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32) sum += to_float(x[i]) * to_float(y[i]);
  return warp_sum(sum);
}

// dot_shared adds the product of two operands in shared memory, of so many elements.
template <class T, int N> __device__ __forceinline__ void dot_shared(float& sum, unsigned x, unsigned y) {
  for (int i = threadIdx.x * 16; i < N * SIZE; i += THREADS * 16) {
    float a[4], b[4];
    load_shared(x + i, a), load_shared(y + i, b);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (SIZE == 4) {
        sum += a[j] * b[j];
      } else {
        float a0, a1, b0, b1;
        unpack<T>(__float_as_uint(a[j]), a0, a1), unpack<T>(__float_as_uint(b[j]), b0, b1);
        sum += a0 * b0 + a1 * b1;
      }
    }
  }
}

// GradsOf is the work of a block of delta_grads: the gradients of the rows of a chunk, for columns of q and k since d.
// The gradient of the sum of g up to a row is q dq + k dk, except that k has the other sign where the decay begins at
// its row: in (D(last, i) k_i)' E, P, and the second k of A.
template <class T> struct GradsOf {
  const DeltaParams& p;
  const Chunk c;
  const int d, slices, end; // end: the heads of this key head end there
  const unsigned base;
  GradSums& m;

  // A beta above SMALL has the gradient X E / beta, unless E has too few bits.
  static constexpr float SMALL = 1.0f / (1 << 30);

  // fetch starts copies of the i-th slice of a head's columns of v.
  __device__ __forceinline__ void fetch(int head, int i, unsigned to) const {
    if (head < end) {
      const long long from = c.of_head(p, head), values = from * ROWS * p.wide_v, states = from * p.dim * p.wide_v;
      const int v = i * SLICE, left = p.wide_v - v;
      c.load_dout<T, SLICE>(to, p, head, v);
      load<ROWS, SLICE, THREADS>(to + Grads::VALUES, p.e + values + v, p.wide_v, 0, 0, ROWS, left, true);
      load<ROWS, SLICE, THREADS>(to + 2 * Grads::VALUES, p.x + values + v, p.wide_v, 0, 0, ROWS, left, true);
      to += 3 * Grads::VALUES;
      load<TILE, SLICE, THREADS>(to, p.s + states + v, p.wide_v, d, 0, p.dim, left, true);
      load<TILE, SLICE, THREADS>(to + Grads::STATES, p.ds + states + v, p.wide_v, d, 0, p.dim, left, true);
      if (i == 0 && threadIdx.x < sizeof(Factors) / 16) {
        const unsigned at = threadIdx.x * 16;
        copy16(smem_address(&m.f[head % 2]) + at, (const char*)(p.factors + from) + at, true);
      }
    }
    copies_commit();
  }

  // await waits for a slice and starts the copies of the next.
  __device__ __forceinline__ unsigned await(int head, int i, int& stage) const {
    if (p.stages == 1) {
      __syncthreads();
      fetch(head, i, base + Grads::STAGE);
    }
    copies_wait<0>();
    __syncthreads();
    unsigned now = base + Grads::STAGE + stage * Grads::STAGE_BYTES;
    if (p.stages > 1) {
      stage ^= 1;
      bool last = i == slices - 1;
      fetch(last ? head + 1 : head, last ? 0 : i + 1, base + Grads::STAGE + stage * Grads::STAGE_BYTES);
    }
    return now;
  }

  // fold multiplies the rows of y by factors.
  template <class F> __device__ __forceinline__ void fold(Sum<32, 32>& y, int row, F factor) const {
    pairs(y, row, 0, [&](int i, int, float& a, float& b) { a *= factor(i), b *= factor(i); });
  }

  // collect adds y to the gradient to, and sets dots to the products of its rows and those of q or k.
  __device__ __forceinline__ void collect(
      Sum<32, 32>& to, Sum<32, 32>& y, unsigned with, int row, int col, float* dots) const {
#pragma unroll
    for (int i = 0; i < 32; i++) to.x[i / 16][i / 4 % 4][i % 4] += y.x[i / 16][i / 4 % 4][i % 4];
    pairs(y, row, col, [&](int i, int j, float& a, float& b) {
      float2 z = get_shared<T>(with + Operand<ROWS, TILE>::offset(i, j));
      a *= z.x, b *= z.y;
    });
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = 0;
#pragma unroll
      for (int n = 0; n < 4; n++) x += y.x[i / 2][n][i % 2 * 2] + y.x[i / 2][n][i % 2 * 2 + 1];
      x = group_sum(x, 4);
      if (threadIdx.x % 4 == 0) dots[row + i * 8 + threadIdx.x % 32 / 4] = x;
    }
  }

  // small_beta returns the gradient of the beta of row i by its definition: X (v - D(i, before) S' k - A E / beta).
  __device__ __forceinline__ float small_beta(const Factors& f, int head, int i) const {
    const long long from = c.of_head(p, head);
    const T *x = (const T*)p.x + (from * ROWS + i) * p.wide_v, *e = (const T*)p.e + from * ROWS * p.wide_v;
    const T *s = (const T*)p.s + from * p.dim * p.wide_v, *k = c.at<T>(p.k, blockIdx.y, i, 0);
    float sum = dot(x, c.at<T>(p.v, head, i, 0), p.dim_v);
    for (int r = 0; r < p.dim; r++) sum -= f.into[i] * to_float(k[r]) * dot(x, s + (long long)r * p.wide_v, p.dim_v);
    for (int j = 0; j < i; j++) {
      sum -= decay(f, i, j) * dot(k, c.at<T>(p.k, blockIdx.y, j, 0), p.dim) * dot(x, e + j * p.wide_v, p.dim_v);
    }
    return sum;
  }

  // finish sets the gradients of g, from the sums: those of two rows a lane, from the last.
  __device__ __forceinline__ void finish(const Factors& f, int head) const {
    const int lane = threadIdx.x % 32;
    double dg[2];
#pragma unroll
    for (int l = 0; l < 2; l++) {
      const int i = ROWS - 1 - lane * 2 - l;
      auto of = [=](const float (&x)[4][ROWS]) { return x[0][i] + x[1][i] + x[2][i] + x[3][i]; };
      dg[l] = i < c.n ? (double)of(m.dots[0]) - of(m.dots[1]) + of(m.dots[2]) : 0;
    }
    scan(dg[0], dg[1]);
    const float all = warp_sum(lane < 8 ? m.whole[lane] : 0.0f);
#pragma unroll
    for (int l = 0; l < 2; l++) {
      const int i = ROWS - 1 - lane * 2 - l;
      if (i >= c.n) continue;
      float* to = c.at<float>(p.dg, head, i, 0);
      *to = (float)(dg[l] + all) + (d ? *to : 0);
      if (d == 0 && f.beta[i] > SMALL) *c.at<float>(p.dbeta, head, i, 0) = m.diagonal[i] / f.beta[i];
    }
  }

  __device__ __forceinline__ void run() {
    const unsigned k = base + Grads::K, q = base + Grads::Q;
    const unsigned dp_at = base + Grads::STAGE + (p.stages == 1 ? 0 : 2 * Grads::STAGE_BYTES);
    const unsigned da_at = dp_at + Grads::PAIRS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 4 * 32, col = warp % 4 * 32, pair_row = warp / 2 * 16, pair_col = warp % 2 * 32;
    c.load<TILE>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    c.load<TILE>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    Sum<32, 32> dq, dk;
    zero(dq), zero(dk);
    int stage = 0, head = end - p.heads / p.key_heads;
    if (p.stages > 1) fetch(head, 0, base + Grads::STAGE);
    for (; head < end; head++) {
      const Factors& f = m.f[head % 2];
      Sum<32, 32> by_q, by_k, by_beta; // dO S', E dS'' and X S'
      Sum<16, 32> dp, da;              // E dO' and E X': the gradients of P and A, transposed
      zero(by_q), zero(by_k), zero(by_beta), zero(dp), zero(da);
      float whole = 0; // of S and dS'
#pragma unroll 1
      for (int i = 0; i < slices; i++) {
        const unsigned dout = await(head, i, stage), e = dout + Grads::VALUES, x = e + Grads::VALUES,
                       s = x + Grads::VALUES, ds = s + Grads::STATES;
        using Rows = InShared<ROWS, SLICE, false>;
        using States = InShared<TILE, SLICE, false>;
        product<T, SLICE>(dp, Rows(e, pair_row), Rows(dout, pair_col));
        product<T, SLICE>(da, Rows(e, pair_row), Rows(x, pair_col));
        product<T, SLICE>(by_q, Rows(dout, row), States(s, col));
        product<T, SLICE>(by_k, Rows(e, row), States(ds, col));
        product<T, SLICE>(by_beta, Rows(x, row), States(s, col));
        dot_shared<T, TILE * SLICE>(whole, s, ds);
        for (int j = threadIdx.x; d == 0 && j < ROWS * SLICE / 2; j += THREADS) {
          const int r = j / (SLICE / 2), v = j % (SLICE / 2) * 2;
          float2 y = get_shared<T>(x + Operand<ROWS, SLICE>::offset(r, v));
          c.put<T>(p.dv, p.flags & WIDE_DV, head, r, i * SLICE + v, p.dim_v, f.beta[r] * y.x, f.beta[r] * y.y);
        }
      }
      if (p.stages == 1) __syncthreads();
      // The gradients of the products of rows in P and A.
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int j = pair_row + n % 2 * 8 + lane / 4, i = pair_col + n / 2 * 8 + lane % 4 * 2;
        float a[2], b[2];
#pragma unroll
        for (int l = 0; l < 2; l++) {
          const float x = dp.x[0][n / 2][n % 2 * 2 + l], y = da.x[0][n / 2][n % 2 * 2 + l];
          const bool inside = j <= i + l && i + l < c.n;
          const float by = inside ? decay(f, i + l, j) : 0;
          a[l] = inside ? p.scale * x * by : 0;
          b[l] = inside && j < i + l ? -f.beta[i + l] * y * by : 0;
          if (j == i + l) m.diagonal[j] = y;
        }
        const unsigned at = Operand<ROWS, ROWS>::offset(j, i);
        put_shared<T>(dp_at + at, a[0], a[1]);
        put_shared<T>(da_at + at, b[0], b[1]);
      }
      // Those by way of scale D(i, before) q S, (D(last, i) k_i)' E and beta_i D(i, before) k_i S.
      fold(by_q, row, [&](int i) { return p.scale * f.into[i]; });
      fold(by_beta, row, [&](int i) { return -f.beta[i] * f.into[i]; });
      fold(by_k, row, [&](int i) { return f.out[i]; });
      whole *= f.into[c.n - 1];
      pairs(by_k, row, col, [&](int i, int j, float x, float y) {
        float2 z = get_shared<T>(k + Operand<ROWS, TILE>::offset(i, j));
        whole += i < c.n ? x * z.x + y * z.y : 0;
      });
      whole = warp_sum(whole);
      if (lane == 0) m.whole[warp] = whole;
      __syncthreads();
      InShared<ROWS, TILE, true, 32> keys(k, col);
      product<T, ROWS>(by_q, InShared<ROWS, ROWS, true, 32>(dp_at, row), keys);
      product<T, ROWS>(by_beta, InShared<ROWS, ROWS, true, 32>(da_at, row), keys);
      product<T, ROWS>(by_k, InShared<ROWS, ROWS, false>(dp_at, row), InShared<ROWS, TILE, true, 32>(q, col));
      product<T, ROWS>(by_k, InShared<ROWS, ROWS, false>(da_at, row), keys);
      collect(dq, by_q, q, row, col, m.dots[0][warp % 4]);
      collect(dk, by_k, k, row, col, m.dots[1][warp % 4]);
      collect(dk, by_beta, k, row, col, m.dots[2][warp % 4]);
      __syncthreads();
      if (warp == 0) finish(f, head);
      for (int i = warp; d == 0 && i < c.n; i += 8) {
        if (f.beta[i] > SMALL) continue;
        float x = small_beta(f, head, i);
        if (lane == 0) *c.at<float>(p.dbeta, head, i, 0) = x;
      }
    }
    pairs(dq, row, d + col, [&](int i, int j, float x, float y) {
      c.put<T>(p.dq, p.flags & WIDE_DQ, blockIdx.y, i, j, p.dim, x, y);
    });
    pairs(dk, row, d + col, [&](int i, int j, float x, float y) {
      c.put<T>(p.dk, p.flags & WIDE_DK, blockIdx.y, i, j, p.dim, x, y);
    });
  }
};

template <class T> __device__ __forceinline__ void grads(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const int slices = (p.wide_v + SLICE - 1) / SLICE, end = (blockIdx.y + 1) * (p.heads / p.key_heads);
#pragma unroll 1
  for (int d = 0; d < p.dim; d += TILE) {
    __syncthreads();
    GradsOf<T>{p, Chunk(p, blockIdx.x, blockIdx.z), d, slices, end, smem_address(shared),
        *(GradSums*)(shared + Grads::MORE)}.run();
  }
}
