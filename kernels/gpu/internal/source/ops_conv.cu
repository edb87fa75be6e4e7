// The causal depthwise convolution of gated delta nets, followed by silu, and the gates of their recurrence.
//
// The convolution runs over segments of rows. A warp has a tile: up to ROWS rows of a segment and 32 * L columns. Each
// thread walks down the rows of L columns, and keeps the last ones in registers. The warps of a block take tiles that
// are neighbours, so that they share the rows before and after a tile in L2.
#include "glu.cuh"

extern __shared__ __align__(16) char shared[]; // 2048 bytes, with sums

constexpr int ROWS = 32, WARPS = 8, SEGMENTS = 64;
constexpr int U = 4, U_BACKWARD = 2; // rows whose loads are in flight at once

// ConvRows is a tensor [batch, seq, n]. Strides count elements.
struct ConvRows {
  void* at;
  long long sample;
  int row, unused;

  template <class T> __device__ __forceinline__ T* of(int b, int t, int c) const {
    return (T*)at + b * sample + c + (long long)t * row;
  }
};

// ConvSegment is a range of rows. first counts the tiles of a sample before it.
struct ConvSegment {
  int lo, hi, first;
};

struct Conv {
  ConvRows x, before, y, dx, dbefore; // y: the result, or its gradient
  const float* w; // [n, width]
  float* partial; // [blocks, n, width], or NULL
  int n, width, batch, count, tiles, unused; // tiles: of a sample
  ConvSegment segments[SEGMENTS];
};

// Tile is rows [lo, hi) of the segment [begin, end) of a sample. head is the sample's index in before.
struct Tile {
  int sample, head, begin, end, lo, hi;

  __device__ __forceinline__ Tile(const Conv& p, int i) {
    sample = i / p.tiles, i %= p.tiles;
    int s = 0;
    for (int step = SEGMENTS / 2; step > 0; step /= 2) {
      if (s + step < p.count && p.segments[s + step].first <= i) s += step;
    }
    head = s * p.batch + sample, begin = p.segments[s].lo, end = p.segments[s].hi;
    lo = begin + (i - p.segments[s].first) * ROWS, hi = min(lo + ROWS, end);
  }
};

// Window holds the last W rows of L columns, the last first.
template <int W, int L> struct Window {
  float at[W][L];

  __device__ __forceinline__ void push(const float (&row)[L]) {
#pragma unroll
    for (int i = W - 1; i > 0; i--) {
#pragma unroll
      for (int k = 0; k < L; k++) at[i][k] = at[i - 1][k];
    }
#pragma unroll
    for (int k = 0; k < L; k++) at[0][k] = row[k];
  }
};

// Columns is the convolution of L columns since c. W is its width, or 8 for any width.
template <class T, int L, int W> struct Columns {
  const Conv& p;
  int c, width;
  float forth[W][L], back[W][L]; // the weights of the rows of a Window, and the same in the order of memory
  Window<W, L> r;

  // has reports whether the window has row i.
  __device__ __forceinline__ bool has(int i) const { return i < width; }

  __device__ __forceinline__ Columns(const Conv& p, int c) : p(p), c(c), width(W < 8 ? W : p.width) {
#pragma unroll
    for (int k = 0; k < L; k++) {
      const float* from = p.w + (long long)(c + k) * width;
      float taps[W];
      if constexpr (W < 8) cached(taps, from);
#pragma unroll
      for (int i = 0; i < W; i++) {
        back[i][k] = W < 8 ? taps[i] : has(i) ? from[i] : 0;
        forth[i][k] = W < 8 ? taps[W - 1 - i] : has(i) ? from[width - 1 - i] : 0;
      }
    }
  }

  // begin loads the rows before a tile.
  __device__ __forceinline__ void begin(const Tile& t) {
    float row[L] = {};
#pragma unroll
    for (int i = W - 1; i > 0; i--) {
      if (has(i)) {
        int from = t.lo - i;
        load(row, from >= t.begin ? (const T*)p.x.of<T>(t.sample, from, c)
                                  : (const T*)p.before.of<T>(t.head, from - t.begin + width - 1, c));
      }
      r.push(row);
    }
  }

  // sum returns the sum before silu of the last row.
  __device__ __forceinline__ float sum(int k) const {
    float s = 0;
#pragma unroll
    for (int i = W - 1; i >= 0; i--) {
      if (has(i)) s += forth[i][k] * r.at[i][k];
    }
    return s;
  }
};

template <class T, int L, int W> __device__ __forceinline__ void conv(const Conv& p) {
  int c = (blockIdx.y * 32 + threadIdx.x) * L, i = blockIdx.x * WARPS + threadIdx.y;
  if (c >= p.n || i >= p.tiles * p.batch) return;
  Tile tile(p, i);
  Columns<T, L, W> k(p, c);
  k.begin(tile);
  for (int t = tile.lo; t < tile.hi; t += U) {
    float in[U][L], out[L];
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (t + u < tile.hi) load(in[u], (const T*)p.x.of<T>(tile.sample, t + u, c));
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (t + u >= tile.hi) continue;
      k.r.push(in[u]);
#pragma unroll
      for (int j = 0; j < L; j++) out[j] = SiLU<T>::at(k.sum(j)).value;
      store(p.y.of<T>(tile.sample, t + u, c), out);
    }
  }
}

// conv_backward sets dx and dbefore, and writes sums of the gradient of w to the block's row of partial. It walks to the width-1 rows after a tile. At row t the gradient of row t-width+1 is complete:
// the sum over j of w_j * ds_(t-j), where ds is the gradient of the sums before silu, 0 beyond the segment.
template <class T, int L, int W> __device__ __forceinline__ void conv_backward(const Conv& p) {
  int c = (blockIdx.y * 32 + threadIdx.x) * L, all = p.tiles * p.batch, width = W < 8 ? W : p.width;
  float sums[W][L] = {};
  if (c < p.n) {
    Columns<T, L, W> k(p, c);
    for (int i = blockIdx.x * WARPS + threadIdx.y; i < all; i += gridDim.x * WARPS) {
      Tile tile(p, i);
      Window<W, L> ds = {};
      k.begin(tile);
      for (int t = tile.lo; t < tile.hi + width - 1; t += U_BACKWARD) {
        float x[U_BACKWARD][L], dy[U_BACKWARD][L], d[L];
#pragma unroll
        for (int u = 0; u < U_BACKWARD; u++) {
          if (t + u >= min(tile.end, tile.hi + width - 1)) continue;
          load(x[u], (const T*)p.x.of<T>(tile.sample, t + u, c));
          load(dy[u], (const T*)p.y.of<T>(tile.sample, t + u, c));
        }
#pragma unroll
        for (int u = 0; u < U_BACKWARD; u++) {
          int row = t + u, to = row - width + 1;
          if (row >= tile.hi + width - 1) continue;
          if (row < tile.end) k.r.push(x[u]);
#pragma unroll
          for (int j = 0; j < L; j++) d[j] = row < tile.end ? dy[u][j] * SiLU<T>::at(k.sum(j)).slope : 0;
          ds.push(d);
          if (p.partial && row < tile.hi) {
#pragma unroll
            for (int e = 0; e < W; e++) {
#pragma unroll
              for (int j = 0; j < L; j++) sums[e][j] += d[j] * k.r.at[e][j];
            }
          }
          if (to < tile.lo && tile.lo > tile.begin) continue; // another tile has it
#pragma unroll
          for (int j = 0; j < L; j++) {
            d[j] = 0;
#pragma unroll
            for (int e = 0; e < W; e++) {
              if (k.has(e)) d[j] += k.back[e][j] * ds.at[e][j];
            }
          }
          store(to >= tile.begin ? p.dx.of<T>(tile.sample, to, c)
                                 : p.dbefore.of<T>(tile.head, to - tile.begin + width - 1, c), d);
        }
      }
    }
  }
  if (!p.partial) return;
  // The warps add to the sums one after another.
#pragma unroll 1
  for (int warp = 0; warp < WARPS; warp++, __syncthreads()) {
    if (threadIdx.y != warp || c >= p.n) continue;
#pragma unroll
    for (int e = 0; e < W; e++) {
#pragma unroll
      for (int j = 0; j < L; j++) {
        float* s = (float*)shared + (e * L + j) * 32 + threadIdx.x;
        if (warp > 0) sums[e][j] += *s;
        *s = sums[e][j];
        if (warp == WARPS - 1 && e < width) {
          p.partial[((long long)blockIdx.x * p.n + c + j) * width + width - 1 - e] = sums[e][j];
        }
      }
    }
  }
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// gates sets g = -exp(a_log) * softplus(a + dt) and beta = sigmoid(b), with one element per thread.
template <class T> __device__ __forceinline__ void gates(float* g, float* beta, const T* a, const T* b,
    const float* a_log, const float* dt, long long n, int heads) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int h = i % heads;
  g[i] = -expf(a_log[h]) * softplus(to_float(a[i]) + dt[h]);
  beta[i] = sigmoid<float>(to_float(b[i])).up;
}

// gates_backward sets da and db, and writes the sums of the block's rows to its row of partial [2, blocks, heads]: of
// the gradients of dt and of a_log. A thread has rows of one head.
template <class T> __device__ __forceinline__ void gates_backward(T* da, T* db, float* partial, const float* dg,
    const float* dbeta, const float* g, const float* beta, const T* a, const float* a_log, const float* dt, int rows,
    int heads) {
  float* all = (float*)shared; // [2, WARPS, 32]
  int h = blockIdx.y * 32 + threadIdx.x;
  float of_dt = 0, of_log = 0;
  if (h < heads) {
    float decay = -expf(a_log[h]), shift = dt[h];
#pragma unroll 2
    for (int row = blockIdx.x * WARPS + threadIdx.y; row < rows; row += gridDim.x * WARPS) {
      long long i = (long long)row * heads + h;
      float d = dg[i], x = beta[i], to_a = d * decay * sigmoid<float>(to_float(a[i]) + shift).up;
      of_dt += to_a, of_log += d * g[i];
      da[i] = from_float<T>(to_a);
      db[i] = from_float<T>(dbeta[i] * x * (1.0f - x));
    }
  }
  all[threadIdx.y * 32 + threadIdx.x] = of_dt, all[(WARPS + threadIdx.y) * 32 + threadIdx.x] = of_log;
  __syncthreads();
  if (threadIdx.y > 1 || h >= heads) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += all[(threadIdx.y * WARPS + i) * 32 + threadIdx.x];
  partial[((long long)threadIdx.y * gridDim.x + blockIdx.x) * heads + h] = sum;
}

// The kernels process vectors of columns for the width 4, and the kernels _any single columns for every width.
#define CONV(NAME, T, L, W)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) conv_##NAME(const __grid_constant__ Conv p) {              \
    conv<T, L, W>(p);                                                                                          \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(256, 2) conv_backward_##NAME(const __grid_constant__ Conv p) {  \
    conv_backward<T, L, W>(p);                                                                                 \
  }

#define RECURRENT(NAME, T)                                                                                     \
  CONV(NAME, T, 4, 4)                                                                                          \
  CONV(any_##NAME, T, 1, 8)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) gates_##NAME(float* g, float* beta, const T* a, const T* b,\
      const float* a_log, const float* dt, long long n, int heads) {                                           \
    gates<T>(g, beta, a, b, a_log, dt, n, heads);                                                              \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(256) gates_backward_##NAME(T* da, T* db, float* partial,        \
      const float* dg, const float* dbeta, const float* g, const float* beta, const T* a, const float* a_log,  \
      const float* dt, int rows, int heads) {                                                                  \
    gates_backward<T>(da, db, partial, dg, dbeta, g, beta, a, a_log, dt, rows, heads);                         \
  }

RECURRENT(bf16, bf16_t)
RECURRENT(fp16, fp16_t)
RECURRENT(fp32, float)
