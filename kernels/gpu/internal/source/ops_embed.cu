// The embedding and its gradient.
#include "ops.cuh"

// embed copies rows: y[r] = table[ids[r]], with n words of type W per row and one warp per row. A row with an
// id outside the vocabulary becomes NaN: the bits 0x7fff are NaN in all float types.
template <class W> __device__ __forceinline__ void embed(W* y, const W* table, const int* ids, int rows,
    int n, int vocab, W nan) {
  constexpr int U = 4;
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  int id = ids[row];
  const W* from = table + (long long)id * n;
  W* to = y + (long long)row * n;
  bool known = id >= 0 && id < vocab;
  for (int c = threadIdx.x; c < n; c += 32 * U) {
    W x[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      x[u] = nan;
      if (known && c + 32 * u < n) x[u] = from[c + 32 * u];
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (c + 32 * u < n) to[c + 32 * u] = x[u];
    }
  }
}

constexpr unsigned NANS = 0x7fff7fff;

extern "C" __global__ void __launch_bounds__(256) embed_16(uint4* y, const uint4* table, const int* ids,
    int rows, int n, int vocab) {
  embed(y, table, ids, rows, n, vocab, make_uint4(NANS, NANS, NANS, NANS));
}
extern "C" __global__ void __launch_bounds__(256) embed_4(unsigned* y, const unsigned* table, const int* ids,
    int rows, int n, int vocab) {
  embed(y, table, ids, rows, n, vocab, NANS);
}
extern "C" __global__ void __launch_bounds__(256) embed_2(unsigned short* y, const unsigned short* table,
    const int* ids, int rows, int n, int vocab) {
  embed(y, table, ids, rows, n, vocab, (unsigned short)NANS);
}

// The gradient is the sum over all rows of one id, in the order of the rows, independent of the order of blocks:
// the same bits in every run. Tokens form chunks of a fixed size, with three kernels each.
//
//  1. embed_sort sorts the tokens by id. A key is the id and, in the lower bits, the position, so that all
//     differ, and a key's place is the number of smaller ones. For chunks of some thousands, comparing
//     every pair is faster than several passes.
//  2. embed_sum has a block for SEGMENT sorted keys and some columns. It adds a run of one id that begins
//     in the segment to dtable; no other block does. A run that began before the segment goes to carry.
//  3. embed_carry adds up the carried sums of a run, in order, in the block of the segment in which
//     the run began.
constexpr int SEGMENT = 64;

// Keys describes the split of 32 bits into id and position. Ids outside the vocabulary become vocab, the
// largest, and are skipped.
struct Keys {
  int count, bits, vocab; // bits of the position

  __device__ __forceinline__ unsigned key(const int* ids, int i) const {
    unsigned id = ids[i];
    return min(id, (unsigned)vocab) << bits | i;
  }
  __device__ __forceinline__ int id(unsigned key) const { return key >> bits; }
  __device__ __forceinline__ int position(unsigned key) const { return key & ((1u << bits) - 1); }
};

constexpr int SORT_THREADS = 256, SORT_LANES = 8, SORT_TILE = 4096;

// embed_sort: SORT_LANES threads count for one token.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embed_sort(unsigned* sorted, const int* ids,
    Keys k) {
  __shared__ uint4 tile[SORT_TILE / 4];
  int token = (blockIdx.x * SORT_THREADS + threadIdx.x) / SORT_LANES, lane = threadIdx.x % SORT_LANES;
  unsigned mine = token < k.count ? k.key(ids, token) : 0;
  int less = 0;
  for (int base = 0; base < k.count; base += SORT_TILE) {
    __syncthreads();
    for (int i = threadIdx.x; i < SORT_TILE; i += SORT_THREADS) {
      ((unsigned*)tile)[i] = base + i < k.count ? k.key(ids, base + i) : 0xffffffffu;
    }
    __syncthreads();
#pragma unroll 8
    for (int i = lane; i < SORT_TILE / 4; i += SORT_LANES) {
      uint4 other = tile[i];
      less += other.x < mine, less += other.y < mine, less += other.z < mine, less += other.w < mine;
    }
  }
  less = group_sum(less, SORT_LANES);
  if (lane == 0 && token < k.count) sorted[less] = mine;
}

// set_row sets p to sum, or adds it. p is aligned to 16 bytes unless L is 1.
template <int L> __device__ __forceinline__ void set_row(float* p, const float (&sum)[L], bool add) {
  if constexpr (L == 1) {
    *p = add ? *p + sum[0] : sum[0];
  } else {
#pragma unroll
    for (int i = 0; i < L; i += 4) {
      float4* to = (float4*)(p + i);
      float4 x = add ? *to : make_float4(0, 0, 0, 0);
      *to = make_float4(x.x + sum[i], x.y + sum[i + 1], x.z + sum[i + 2], x.w + sum[i + 3]);
    }
  }
}

template <class T, int L> __device__ __forceinline__ void embed_sum(float* dtable, float* carry, const T* dy,
    const unsigned* sorted, Keys k, int n) {
  constexpr int U = 8;
  __shared__ unsigned keys[SEGMENT + 1]; // with the key before
  int lo = blockIdx.x * SEGMENT, count = min(SEGMENT, k.count - lo);
  for (int i = threadIdx.x; i <= count; i += blockDim.x) keys[i] = sorted[max(lo + i - 1, 0)];
  __syncthreads();
  int c = (blockIdx.y * blockDim.x + threadIdx.x) * L;
  if (c >= n) return;
  float sum[L] = {};
  bool first = lo > 0 && k.id(keys[0]) == k.id(keys[1]); // the run began before
  for (int base = 0; base < count; base += U) {
    float x[U][L];
#pragma unroll
    for (int u = 0; u < U; u++) {
      unsigned key = keys[min(base + u, count - 1) + 1];
      load(x[u], dy + (long long)k.position(key) * n + c);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      int i = base + u;
      if (i >= count) break;
      int id = k.id(keys[i + 1]);
      if (id >= k.vocab) return; // as are all later ones
#pragma unroll
      for (int j = 0; j < L; j++) sum[j] += x[u][j];
      if (i + 1 < count && k.id(keys[i + 2]) == id) continue;
      set_row(first ? carry + (long long)blockIdx.x * n + c : dtable + (long long)id * n + c, sum, !first);
      first = false;
#pragma unroll
      for (int j = 0; j < L; j++) sum[j] = 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) embed_carry(float* dtable, const float* carry,
    const unsigned* sorted, Keys k, int n) {
  int lo = blockIdx.x * SEGMENT, next = lo + SEGMENT, c = blockIdx.y * blockDim.x + threadIdx.x;
  if (next >= k.count || c >= n) return;
  int id = k.id(sorted[next - 1]);
  if (id >= k.vocab || k.id(sorted[next]) != id || lo > 0 && k.id(sorted[lo - 1]) == id) return;
  float sum = 0;
  for (; next < k.count && k.id(sorted[next]) == id; next += SEGMENT) sum += carry[(long long)(next / SEGMENT) * n + c];
  dtable[(long long)id * n + c] += sum;
}

#define EMBED_SUM(NAME, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(128)                                                           \
      embed_sum_##NAME(float* dtable, float* carry, const T* dy, const unsigned* sorted, Keys k, int n) {     \
    embed_sum<T, LANES<T>>(dtable, carry, dy, sorted, k, n);                                                  \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128)                                                           \
      embed_sum_any_##NAME(float* dtable, float* carry, const T* dy, const unsigned* sorted, Keys k, int n) { \
    embed_sum<T, 1>(dtable, carry, dy, sorted, k, n);                                                         \
  }

EMBED_SUM(bf16, bf16_t)
EMBED_SUM(fp16, fp16_t)
EMBED_SUM(fp32, float)
