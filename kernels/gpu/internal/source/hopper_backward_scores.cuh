// The scores of a consumer thread of hopper_backward.cu, from products to operands in shared memory.
#pragma once
#include "hopper_backward.cuh"

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
