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
  float dots[2][ROWS], diagonal[ROWS], whole[8]; // of warpgroups and rows; X E of rows; of warps
};
static_assert(sizeof(GradSums) <= Grads::STAGE - Grads::MORE, "room for the sums");

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

  // states_of returns the place of a product's rows of states since row, a multiple of TILE.
  __device__ __forceinline__ long long states_of(long long product, int row) const {
    return (product * ((p.dim + TILE - 1) / TILE) * TILE + row) * p.wide_v;
  }

  // fetch starts copies of the i-th slice of a head's columns of v.
  __device__ __forceinline__ void fetch(int head, int i, unsigned to) const {
    if (head < end) {
      const long long from = c.of_head(p, head), values = (from * slices + i) * (ROWS * SLICE),
                      states = states_of(from, d) + (long long)i * (TILE * SLICE);
      c.load_dout<T, SLICE>(to, p, head, i * SLICE);
      copy_in<Grads::VALUES, THREADS>(to + Grads::VALUES, p.e + values);
      copy_in<Grads::VALUES, THREADS>(to + 2 * Grads::VALUES, p.x + values);
      to += 3 * Grads::VALUES;
      copy_in<Grads::STATES, THREADS>(to, p.s + states);
      copy_in<Grads::STATES, THREADS>(to + Grads::STATES, p.ds + states);
      if (i == 0) copy_in<sizeof(Factors), THREADS>(smem_address(&m.f[head % 2]), p.factors + from);
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
    block_sync();
    unsigned now = base + Grads::STAGE + stage * Grads::STAGE_BYTES;
    if (p.stages > 1) {
      stage ^= 1;
      bool last = i == slices - 1;
      fetch(last ? head + 1 : head, last ? 0 : i + 1, base + Grads::STAGE + stage * Grads::STAGE_BYTES);
    }
    return now;
  }

  // put_dv stores a slice of the gradient of v, beta X.
  __device__ __forceinline__ void put_dv(const Factors& f, int head, int slice, unsigned x) const {
    constexpr int PIECE = Operand<ROWS, SLICE>::PIECE;
#pragma unroll
    for (int j = threadIdx.x * PIECE; j < ROWS * SLICE; j += THREADS * PIECE) {
      const int r = j / SLICE, v = j % SLICE, col = slice * SLICE + v;
      const unsigned at = x + Operand<ROWS, SLICE>::offset(r, v);
      const float by = f.beta[r];
      if (p.flags & PIECES_DV) {
        if (r >= c.n || col >= p.dim_v) continue;
        float y[4];
        load_shared(at, y);
#pragma unroll
        for (int l = 0; l < 4; l++) {
          if constexpr (SIZE == 4) {
            y[l] *= by;
          } else {
            float lo, hi;
            unpack<T>(__float_as_uint(y[l]), lo, hi);
            y[l] = __uint_as_float(pack<T>(by * lo, by * hi));
          }
        }
        *(float4*)c.at<Stored>(p.dv, head, r, col) = make_float4(y[0], y[1], y[2], y[3]);
      } else {
#pragma unroll 1
        for (int l = 0; l < PIECE; l += 2) {
          float2 y = get_shared<T>(at + l * SIZE);
          c.put<T>(p.dv, p.flags & WIDE_DV, head, r, col + l, p.dim_v, by * y.x, by * y.y);
        }
      }
    }
  }

  // stored returns two neighbours of a row of operands of H rows in memory, since column v.
  template <int H> __device__ __forceinline__ float2 stored(const Stored* at, int row, int v) const {
    const char* x = (const char*)(at + v / SLICE * (H * SLICE)) + Operand<H, SLICE>::offset(row, v % SLICE);
    float2 y = *(const float2*)x;
    if constexpr (SIZE == 2) unpack<T>(*(const unsigned*)x, y.x, y.y);
    return y;
  }

  // dot returns the product of row i of X and a row of E or states, to all lanes.
  template <int H> __device__ __forceinline__ float dot(const Stored* x, int i, const Stored* y, int row) const {
    float sum = 0;
    for (int v = threadIdx.x % 32 * 2; v < p.wide_v; v += 64) {
      float2 a = stored<ROWS>(x, i, v), b = stored<H>(y, row, v);
      sum += a.x * b.x + a.y * b.y;
    }
    return warp_sum(sum);
  }

  // small_beta returns the gradient of the beta of row i by its definition: X (v - D(i, before) S' k - A E / beta).
  __device__ __forceinline__ float small_beta(const Factors& f, int head, int i) const {
    const long long from = c.of_head(p, head);
    const Stored *x = p.x + from * ROWS * p.wide_v, *e = p.e + from * ROWS * p.wide_v;
    const T *k = c.at<T>(p.k, blockIdx.y, i, 0), *v = c.at<T>(p.v, head, i, 0);
    float sum = 0;
    for (int j = threadIdx.x % 32 * 2; j < p.dim_v; j += 64) {
      float2 y = stored<ROWS>(x, i, j);
      sum += y.x * to_float(v[j]) + (j + 1 < p.dim_v ? y.y * to_float(v[j + 1]) : 0);
    }
    sum = warp_sum(sum);
    for (int r = 0; r < p.dim; r++) {
      sum -= f.into[i] * to_float(k[r]) * dot<TILE>(x, i, p.s + states_of(from, r / TILE * TILE), r % TILE);
    }
    for (int j = 0; j < i; j++) {
      const T* other = c.at<T>(p.k, blockIdx.y, j, 0);
      float product = 0;
      for (int l = threadIdx.x % 32; l < p.dim; l += 32) product += to_float(k[l]) * to_float(other[l]);
      sum -= decay(f, i, j) * warp_sum(product) * dot<ROWS>(x, i, e, j);
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
      dg[l] = i < c.n ? m.dots[0][i] + m.dots[1][i] : 0;
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
    const int row = warp % 4 * 16, col = warp / 4 * 64, pair_col = warp / 4 * 32;
    c.load<TILE>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    c.load<TILE>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    Sum<16, 64> dq, dk;
    zero(dq), zero(dk);
    int stage = 0, head = end - p.heads / p.key_heads;
    if (p.stages > 1) fetch(head, 0, base + Grads::STAGE);
    for (; head < end; head++) {
      const Factors& f = m.f[head % 2];
      Sum<16, 64> by_q, by_k, by_beta; // dO S', E dS'' and X S'
      Sum<16, 32> dp, da;              // E dO' and E X': the gradients of P and A, transposed
      Sum<16, 16> diagonal;            // S dS''
      zero(by_q), zero(by_k), zero(by_beta), zero(dp), zero(da), zero(diagonal);
#pragma unroll 1
      for (int i = 0; i < slices; i++) {
        const unsigned dout = await(head, i, stage), e = dout + Grads::VALUES, x = e + Grads::VALUES,
                       s = x + Grads::VALUES, ds = s + Grads::STATES;
        using Rows = Matrix<ROWS, SLICE, false>;
        using States = Matrix<TILE, SLICE, false>;
        product<T, SLICE>(dp, Rows{e, row}, Rows{dout, pair_col});
        product<T, SLICE>(da, Rows{e, row}, Rows{x, pair_col});
        product<T, SLICE>(by_q, Rows{dout, row}, States{s, col});
        product<T, SLICE>(by_k, Rows{e, row}, States{ds, col});
        product<T, SLICE>(by_beta, Rows{x, row}, States{s, col});
        warp_product<T, SLICE>(diagonal, States{s, warp * 16}, States{ds, warp * 16});
        if (d == 0) put_dv(f, head, i, x);
        complete(dp, da, by_q, by_k, by_beta);
      }
      if (p.stages == 1) __syncthreads();
      // The gradients of the products of rows in P and A.
      float on_diagonal[2] = {};
#pragma unroll
      for (int n = 0; n < 16; n++) {
        float &x = dp.x[0][n / 4][n % 4], &y = da.x[0][n / 4][n % 4];
        const int j = row + lane_row() + n / 2 % 2 * 8, i = pair_col + lane_col() + n / 4 * 8 + n % 2;
        const bool inside = j <= i && i < c.n;
        const float by = decay(f, i, j);
        on_diagonal[n / 2 % 2] += i == j ? y : 0;
        x = inside ? p.scale * x * by : 0;
        y = inside && j < i ? -f.beta[i] * y * by : 0;
      }
      hold<T, ROWS, ROWS>(dp_at, dp, row, pair_col);
      hold<T, ROWS, ROWS>(da_at, da, row, pair_col);
      if (row / 32 == warp / 4 && lane_row() / 2 == lane % 4) {
        m.diagonal[row + lane_row()] = on_diagonal[0], m.diagonal[row + lane_row() + 8] = on_diagonal[1];
      }
      // Those by way of scale D(i, before) q S, (D(last, i) k_i)' E and beta_i D(i, before) k_i S.
      scale_rows(by_q, row, [&](int i) { return p.scale * f.into[i]; });
      scale_rows(by_beta, row, [&](int i) { return -f.beta[i] * f.into[i]; });
      scale_rows(by_k, row, [&](int i) { return f.out[i]; });
      const Spot<ROWS, TILE> key(k, row, col), query(q, row, col);
      float whole = 0; // of S and dS'
      pairs(diagonal, [&](int i, int j, float x, float y) {
        if (i == j) whole += lane_row() == lane_col() ? x : lane_row() == lane_col() + 1 ? y : 0;
      });
      whole *= f.into[c.n - 1];
      pairs(by_k, [&](int i, int j, float x, float y) {
        float2 z = get_shared<T>(key(i, j));
        whole += key.row + i < c.n ? x * z.x + y * z.y : 0;
      });
      whole = warp_sum(whole);
      if (lane == 0) m.whole[warp] = whole;
      block_sync();
      const Matrix<ROWS, TILE, true> keys{k, col}, queries{q, col};
      using Pairs = Matrix<ROWS, ROWS, false>;
      using Turned = Matrix<ROWS, ROWS, true>;
      product<T, ROWS>(by_q, Turned{dp_at, row}, keys);
      product<T, ROWS>(by_beta, Turned{da_at, row}, keys);
      product<T, ROWS>(by_k, Pairs{dp_at, row}, queries);
      product<T, ROWS>(by_k, Pairs{da_at, row}, keys);
      complete(by_q, by_beta, by_k);
      float dots[2] = {};
      pairs(by_q, [&](int i, int j, float x, float y) {
        float2 z = get_shared<T>(query(i, j));
        dots[i / 8] += x * z.x + y * z.y;
      });
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float &x = by_k.x[0][i / 4][i % 4], y = by_beta.x[0][i / 4][i % 4];
        dq.x[0][i / 4][i % 4] += by_q.x[0][i / 4][i % 4], dk.x[0][i / 4][i % 4] += x + y, x = y - x;
      }
      pairs(by_k, [&](int i, int j, float x, float y) {
        float2 z = get_shared<T>(key(i, j));
        dots[i / 8] += x * z.x + y * z.y;
      });
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float x = group_sum(dots[i], 4);
        if (lane % 4 == 0) m.dots[warp / 4][key.row + i * 8] = x;
      }
      __syncthreads();
      if (warp == 0) finish(f, head);
      for (int i = warp; d == 0 && i < c.n; i += 8) {
        if (f.beta[i] > SMALL) continue;
        float x = small_beta(f, head, i);
        if (lane == 0) *c.at<float>(p.dbeta, head, i, 0) = x;
      }
    }
    put(p.dq, p.flags & PIECES_DQ, p.flags & WIDE_DQ, dq, q, row, col);
    put(p.dk, p.flags & PIECES_DK, p.flags & WIDE_DK, dk, k, row, col);
  }

  // put stores a gradient of q or k, in pieces by way of its tile, which no thread uses any more.
  __device__ __forceinline__ void put(
      const Strided& to, bool pieces, bool wide, Sum<16, 64>& y, unsigned tile, int row, int col) const {
    if (pieces) {
      hold<T, ROWS, TILE>(tile, y, row, col);
      __syncthreads();
      copy_out<ROWS, TILE, THREADS>(c.at<Stored>(to, blockIdx.y, 0, d), to.seq, tile, c.n, p.dim - d);
      return;
    }
    pairs(y, [&](int i, int j, float x, float z) {
      c.put<T>(to, wide, blockIdx.y, row + lane_row() + i, d + col + lane_col() + j, p.dim, x, z);
    });
  }
};

template <class T> __device__ __forceinline__ void grads(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const int slices = p.wide_v / SLICE, end = (blockIdx.y + 1) * (p.heads / p.key_heads);
#pragma unroll 1
  for (int d = 0; d < p.dim; d += TILE) {
    __syncthreads();
    GradsOf<T>{p, Chunk(p, blockIdx.x, blockIdx.z), d, slices, end, smem_address(shared),
        *(GradSums*)(shared + Grads::MORE)}.run();
  }
}
