// The operations of a mixture of experts, except its products (ops_group.cu). Grids cover the largest possible work, so
// that the host need not know a route. No sum depends on the order of blocks.
#include "glu.cuh"
#include "ops.cuh"
#include "pairs.cuh"

constexpr unsigned FULL = 0xffffffffu;

// block_memory returns the dynamic shared memory of the block.
template <class X> __device__ __forceinline__ X* block_memory() {
  extern __shared__ __align__(1024) char shared[];
  return (X*)shared;
}

// Router describes kernels.Router.
struct Router {
  double scale;
  int sigmoid, normalize, groups, kept;
};

// set_scores sets the scores of a row of n logits, by one warp. Lane l owns the elements l, l + 32 and so on. float64
// gives the choices of a CPU, except among almost equal scores.
__device__ __forceinline__ void set_scores(double* scores, const float* logits, int n, bool sigmoid) {
  int lane = threadIdx.x;
  float top = __uint_as_float(0xff800000u);
  for (int e = lane; e < n; e += 32) top = fmaxf(top, logits[e]);
#pragma unroll
  for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, i));
  double sum = 0;
  for (int e = lane; e < n; e += 32) {
    double x = logits[e];
    scores[e] = sigmoid ? 1 / (1 + exp(-x)) : exp(x - top);
    sum += scores[e];
  }
  sum = warp_sum(sum);
  for (int e = lane; e < n && !sigmoid; e += 32) scores[e] /= sum;
  __syncwarp();
}

// A key is an integer in the order of doubles, with NaN the largest. LOWEST is below all.
constexpr long long LOWEST = -0x7fffffffffffffffll - 1, POSITIVE = 0x7fffffffffffffffll;

__device__ __forceinline__ long long key_of(double x) {
  if (x != x) return POSITIVE;
  long long bits = __double_as_longlong(x + 0.0); // -0 becomes 0
  return bits ^ (bits >> 63 & POSITIVE);
}
__device__ __forceinline__ double value_of(long long key) { return __longlong_as_double(key ^ (key >> 63 & POSITIVE)); }

// take returns the index of the largest of n keys, of equal ones the first, and sets that key to LOWEST.
__device__ __forceinline__ int take(long long* keys, int n) {
  int lane = threadIdx.x;
  unsigned at = n - 1;
  long long best = LOWEST;
  for (int e = lane; e < n; e += 32) {
    if (keys[e] > best) best = keys[e], at = e;
  }
  int high = __reduce_max_sync(FULL, int(best >> 32));
  unsigned low = __reduce_max_sync(FULL, int(best >> 32) == high ? unsigned(best) : 0u);
  at = __reduce_min_sync(FULL, int(best >> 32) == high && unsigned(best) == low ? at : unsigned(n - 1));
  if (lane == at % 32) keys[at] = LOWEST;
  return at;
}

// keep_groups sets the keys outside the kept groups to LOWEST.
__device__ __forceinline__ void keep_groups(long long* keys, long long* groups, int n, const Router& r) {
  int lane = threadIdx.x, size = n / r.groups;
  for (int g = lane; g < r.groups; g += 32) {
    long long a = LOWEST, b = LOWEST;
    for (int e = g * size; e < (g + 1) * size; e++) {
      if (keys[e] > a) {
        b = a, a = keys[e];
      } else if (keys[e] > b) {
        b = keys[e];
      }
    }
    groups[g] = size > 1 ? key_of(value_of(a) + value_of(b)) : a;
  }
  for (int i = 0; i < r.kept; i++) take(groups, r.groups);
  __syncwarp();
  for (int e = lane; e < n; e += 32) {
    if (groups[e / size] != LOWEST) keys[e] = LOWEST;
  }
}

__device__ __forceinline__ double divisor(double sum, const Router& r) {
  return r.normalize ? sum + (r.sigmoid ? 1e-20 : 0) : 1;
}

// route has a warp for each row, with scores, keys and groups in shared memory.
extern "C" __global__ void __launch_bounds__(128) route(float* weight, int* choice, const float* logits,
    const float* correction, int rows, int n, int k, Router r) {
  int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (row >= rows) return;
  double* scores = block_memory<double>() + threadIdx.y * (2 * n + r.groups);
  long long* keys = (long long*)(scores + n);
  set_scores(scores, logits + (long long)row * n, n, r.sigmoid);
  for (int e = lane; e < n; e += 32) keys[e] = key_of(scores[e] + (correction ? correction[e] : 0));
  __syncwarp();
  if (r.groups > 1) keep_groups(keys, keys + n, n, r);
  weight += (long long)row * k, choice += (long long)row * k;
  double sum = 0;
  for (int j = 0; j < k; j++) {
    int e = take(keys, n);
    sum += scores[e];
    if (lane == j % 32) choice[j] = e;
  }
  for (int j = lane; j < k; j += 32) weight[j] = float(r.scale * scores[choice[j]] / divisor(sum, r));
}

extern "C" __global__ void __launch_bounds__(256) scale_choices(float* y, float* terms, const float* x,
    const float* weight, const int* choice, const float* scale, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  if (terms) terms[i] = v * weight[i];
  y[i] = v * scale[choice[i]];
}

__device__ __forceinline__ bool counted(const int* tokens, int row) { return !tokens || tokens[row] >= 0; }

// route_backward has a warp for each row too. With s the scores, f the factor and d the divisor of the weights:
// ds = f/d * (dw - sum(dw*s)/d); the sum is 0 unless weights are normalised; then ds*s*(1-s) for the sigmoid, or
// s*(ds - sum(ds*s)) for the softmax. The last sum is 0 for normalised weights.
template <class T> __device__ __forceinline__ void route_backward(T* dlogits, const float* dweight, const int* choice,
    const float* logits, const float* dshare, const int* tokens, int rows, int n, int k, const Router& r) {
  int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (row >= rows) return;
  double *scores = block_memory<double>() + threadIdx.y * 2 * n, *grads = scores + n;
  logits += (long long)row * n, dlogits += (long long)row * n;
  dweight += (long long)row * k, choice += (long long)row * k;
  for (int e = lane; e < n; e += 32) grads[e] = 0;
  set_scores(scores, logits, n, r.sigmoid);
  double inner = 0, sum = 0;
  for (int j = lane; j < k; j += 32) {
    double s = scores[choice[j]];
    inner += dweight[j] * s, sum += s;
  }
  inner = warp_sum(inner), sum = divisor(warp_sum(sum), r);
  for (int j = lane; j < k; j += 32) {
    grads[choice[j]] = r.scale / sum * (dweight[j] - (r.normalize ? inner / sum : 0));
  }
  __syncwarp();
  double mean = r.normalize ? 0 : r.scale * inner;
  for (int e = lane; e < n; e += 32) {
    double s = scores[e];
    grads[e] = r.sigmoid ? grads[e] * s * (1 - s) : s * (grads[e] - mean);
  }
  if (dshare && counted(tokens, row)) {
    if (r.sigmoid) set_scores(scores, logits, n, false);
    mean = 0;
    for (int e = lane; e < n; e += 32) mean += scores[e] * dshare[e];
    mean = warp_sum(mean);
    for (int e = lane; e < n; e += 32) grads[e] += scores[e] * (dshare[e] - mean);
  }
  for (int e = lane; e < n; e += 32) dlogits[e] = from_float<T>(float(grads[e]));
}

// count_parts writes the choices and, with share, the sum of the softmax of some rows to parts [blocks, 2, n]. The sums
// of each warp are in shared memory.
extern "C" __global__ void __launch_bounds__(128) count_parts(double* parts, const int* choice, const float* logits,
    const int* tokens, int share, int rows, int n, int k) {
  double *all = block_memory<double>(), *scores = all + threadIdx.y * 2 * n, *sums = scores + n;
  int *counts = (int*)(all + blockDim.y * 2 * n), thread = threadIdx.y * 32 + threadIdx.x;
  for (int e = thread; e < n; e += 32 * blockDim.y) counts[e] = 0;
  for (int e = threadIdx.x; e < n; e += 32) sums[e] = 0;
  __syncthreads();
  for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
    if (!counted(tokens, row)) continue;
    for (int j = threadIdx.x; j < k; j += 32) atomicAdd(counts + choice[(long long)row * k + j], 1);
    if (!share) continue;
    set_scores(scores, logits + (long long)row * n, n, false);
    for (int e = threadIdx.x; e < n; e += 32) sums[e] += scores[e];
  }
  __syncthreads();
  parts += (long long)blockIdx.x * 2 * n;
  for (int e = thread; e < n; e += 32 * blockDim.y) {
    double sum = 0;
    for (int w = 0; w < blockDim.y; w++) sum += all[(2 * w + 1) * n + e];
    parts[e] = counts[e], parts[n + e] = sum;
  }
}

// count_add adds the parts to load and share.
extern "C" __global__ void __launch_bounds__(128) count_add(double* load, double* share, const double* parts,
    int blocks, int n) {
  int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= (share ? 2 * n : n)) return;
  double sum = 0;
  for (int b = 0; b < blocks; b++) sum += parts[(long long)b * 2 * n + e];
  double* to = e < n ? load + e : share + e - n;
  *to += sum;
}

// The sort is a stable counting sort of chunks of pairs. sort_count counts each chunk's pairs of an expert to
// counts [experts, chunks]. sort_scan replaces each row of counts by its running sums, and sort_starts adds up the
// totals of the experts. sort_place counts the pairs of each warp's part of a chunk, and takes the pairs in order.
constexpr int SORT_WARPS = 8;

__device__ __forceinline__ int inclusive(int x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    int before = __shfl_up_sync(FULL, x, i);
    if (threadIdx.x % 32 >= i) x += before;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(32 * SORT_WARPS) sort_count(int* counts, const int* choice, int n,
    int chunk, int experts) {
  int* count = block_memory<int>();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  int lo = blockIdx.x * chunk;
  for (int i = lo + threadIdx.x; i < min(n, lo + chunk); i += blockDim.x) atomicAdd(count + choice[i], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[(long long)e * gridDim.x + blockIdx.x] = count[e];
}

// running replaces n numbers by the sums of those before each, by one warp, and returns the sum of all.
__device__ __forceinline__ int running(int* to, const int* from, int n) {
  int sum = 0;
  for (int i = threadIdx.x; i - int(threadIdx.x) < n; i += 32) {
    int x = i < n ? from[i] : 0, upTo = inclusive(x);
    if (i < n) to[i] = sum + upTo - x;
    sum += __shfl_sync(FULL, upTo, 31);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(32) sort_scan(int* counts, int* totals, int chunks) {
  int* row = counts + (long long)blockIdx.x * chunks;
  int sum = running(row, row, chunks);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(32) sort_starts(int* starts, const int* totals, int experts) {
  int sum = running(starts, totals, experts);
  if (threadIdx.x == 0) starts[experts] = sum;
}

extern "C" __global__ void __launch_bounds__(32 * SORT_WARPS) sort_place(int* tokens, int* places, const int* starts,
    const int* counts, const int* choice, int n, int k, int chunk, int experts) {
  int* next = block_memory<int>(); // [SORT_WARPS, experts]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = chunk / SORT_WARPS;
  int lo = blockIdx.x * chunk + warp * part, hi = min(n, lo + part), *mine = next + warp * experts;
  for (int e = lane; e < experts; e += 32) mine[e] = 0;
  __syncwarp();
  for (int i = lo + lane; i < hi; i += 32) atomicAdd(mine + choice[i], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int at = starts[e] + counts[(long long)e * gridDim.x + blockIdx.x];
    for (int w = 0; w < SORT_WARPS; w++) {
      int count = next[w * experts + e];
      next[w * experts + e] = at;
      at += count;
    }
  }
  __syncthreads();
  for (int i = lo + lane; i - lane < hi; i += 32) {
    int e = i < hi ? choice[i] : -1;
    unsigned same = __match_any_sync(FULL, e);
    int before = __popc(same & ((1u << lane) - 1)), at = e < 0 ? 0 : mine[e] + before;
    __syncwarp();
    if (e >= 0) {
      if (before == 0) mine[e] += __popc(same);
      places[i] = at, tokens[at] = i / k;
    }
    __syncwarp();
  }
}

// The kernels below have vectors of L elements, or L is 1 for any size and alignment.

constexpr int ROWS = 8; // of a block, a warp each

__device__ __forceinline__ int place_of_warp() { return blockIdx.x * ROWS + threadIdx.y; }

template <int L> __device__ __forceinline__ void floats(float (&x)[L], const float* p) {
  if constexpr (L == 1) {
    x[0] = __ldg(p);
  } else {
    cached(x, p);
  }
}

template <class T, int L> __device__ __forceinline__ void group_add(T* y, const float* bias, const Pairs& p, int n) {
  int place = place_of_warp();
  if (place >= p.count) return;
  y += (long long)place * n, bias += (long long)p.expert(place) * n;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float x[L], b[L];
    load(x, y + c), floats(b, bias + c);
#pragma unroll
    for (int i = 0; i < L; i++) x[i] += b[i];
    store(y + c, x);
  }
}

// group_sum has a block for an expert and 32 * L columns. Each warp adds up every ROWS-th row.
template <class T, int L> __device__ __forceinline__ void group_sum(float* sum, const T* dy, int by_token,
    const float* weight, const Pairs& p, int n) {
  auto parts = block_memory<float[32 * L]>();
  int e = blockIdx.y, first = blockIdx.x * 32 * L, c = first + threadIdx.x * L;
  int lo = p.starts[e], hi = p.starts[e + 1];
  if (lo == hi) return;
  float total[L] = {};
  for (int place = lo + threadIdx.y; place < hi && c < n; place += ROWS) {
    int row = by_token ? p.tokens[place] : place;
    float w = weight ? weight[p.pair(place)] : 1, x[L];
    load(x, dy + (long long)row * n + c);
#pragma unroll
    for (int i = 0; i < L; i++) total[i] = fmaf(w, x[i], total[i]);
  }
#pragma unroll
  for (int i = 0; i < L; i++) parts[threadIdx.y][threadIdx.x * L + i] = total[i];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < min(32 * L, n - first); i += 32 * ROWS) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < ROWS; w++) all += parts[w][i];
    sum[(long long)e * n + first + i] += all;
  }
}

template <class T, int L> __device__ __forceinline__ void group_dot(float* dweight, const T* dy, int by_token,
    const float* bias, const Pairs& p, int n) {
  int place = place_of_warp();
  if (place >= p.count) return;
  dy += (long long)(by_token ? p.tokens[place] : place) * n, bias += (long long)p.expert(place) * n;
  float sum = 0;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float x[L], b[L];
    load(x, dy + c), floats(b, bias + c);
#pragma unroll
    for (int i = 0; i < L; i++) sum = fmaf(x[i], b[i], sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) dweight[p.pair(place)] += sum;
}

template <class T, class ACT, int L> __device__ __forceinline__ void group_glu(T* y, const T* x, int rows, int n) {
  int row = place_of_warp();
  if (row >= rows) return;
  y += (long long)row * n, x += (long long)row * 2 * n;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float gate[L], up[L];
    load(gate, x + c), load(up, x + n + c);
#pragma unroll
    for (int i = 0; i < L; i++) gate[i] = ACT::at(gate[i]).value * ACT::up(up[i]).value;
    store(y + c, gate);
  }
}

// group_glu_backward works in place: a thread loads its elements before it stores results.
template <class T, class ACT, int L> __device__ __forceinline__ void group_glu_backward(T* dx, T* wy, float* dweight,
    const T* da, const T* x, const float* weight, const Pairs& p, int n) {
  int place = place_of_warp();
  if (place >= p.count) return;
  long long row = (long long)place * n;
  int pair = p.pair(place);
  float w = weight[pair], sum = 0;
  for (int c = threadIdx.x * L; c < n; c += 32 * L) {
    float d[L], gate[L], up[L], y[L];
    load(d, da + row + c), load(gate, x + 2 * row + c), load(up, x + 2 * row + n + c);
#pragma unroll
    for (int i = 0; i < L; i++) {
      y[i] = ACT::at(gate[i]).value * ACT::up(up[i]).value;
      sum = fmaf(d[i], y[i], sum);
      d[i] *= w, y[i] *= w;
    }
    gradient<ACT>(d, gate, up);
    store(dx + 2 * row + c, gate), store(dx + 2 * row + n + c, up), store(wy + row + c, y);
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) dweight[pair] = sum;
}

// group_weights copies the weights of pairs to their places.
extern "C" __global__ void __launch_bounds__(256) group_weights(float* to, const float* weight, const int* places,
    int pairs) {
  int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (pair < pairs) to[places[pair]] = weight[pair];
}

// group_sums adds up the parts of each pair's sum, [parts, places].
extern "C" __global__ void __launch_bounds__(256) group_sums(float* to, const float* sums, const int* places,
    int pairs, int parts) {
  int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (pair >= pairs) return;
  float sum = 0;
  for (int i = 0; i < parts; i++) sum += sums[(long long)i * pairs + places[pair]];
  to[pair] = sum;
}

// combine has a block for each token. A thread loads the rows of four choices at once.
template <class T, int L> __device__ __forceinline__ void combine(T* out, const T* add, const T* y,
    const float* weight, const Pairs& p, int n) {
  constexpr int U = 4;
  long long to = (long long)blockIdx.x * n, pair = (long long)blockIdx.x * p.chosen;
  for (int c = threadIdx.x * L; c < n; c += blockDim.x * L) {
    float sum[L] = {};
    if (add) load(sum, add + to + c);
    for (int first = 0; first < p.chosen; first += U) {
      float x[U][L];
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (first + u < p.chosen) load(x[u], y + (long long)__ldg(p.places + pair + first + u) * n + c);
      }
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (first + u >= p.chosen) break;
        float w = weight ? __ldg(weight + pair + first + u) : 1;
#pragma unroll
        for (int i = 0; i < L; i++) sum[i] = fmaf(w, x[u][i], sum[i]);
      }
    }
    store(out + to + c, sum);
  }
}

using fp32_t = float;

#define GATED(NAME, T, ACT, L)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) group_##NAME##_##T(T##_t* y, const T##_t* x, int rows, int n) { \
    group_glu<T##_t, ACT<T##_t>, L>(y, x, rows, n);                                                              \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) group_##NAME##_backward_##T(T##_t* dx, T##_t* wy,            \
      float* dweight, const T##_t* da, const T##_t* x, const float* weight, Pairs p, int n) {                    \
    group_glu_backward<T##_t, ACT<T##_t>, L>(dx, wy, dweight, da, x, weight, p, n);                              \
  }

#define ROWWISE(ANY, T, L)                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) group_add##ANY##_##T(T##_t* y, const float* bias, Pairs p,   \
      int n) {                                                                                                   \
    group_add<T##_t, L>(y, bias, p, n);                                                                          \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) group_sum##ANY##_##T(float* sum, const T##_t* dy,            \
      int by_token, const float* weight, Pairs p, int n) {                                                       \
    group_sum<T##_t, L>(sum, dy, by_token, weight, p, n);                                                        \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) group_dot##ANY##_##T(float* dweight, const T##_t* dy,        \
      int by_token, const float* bias, Pairs p, int n) {                                                         \
    group_dot<T##_t, L>(dweight, dy, by_token, bias, p, n);                                                      \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) combine##ANY##_##T(T##_t* out, const T##_t* add,             \
      const T##_t* y, const float* weight, Pairs p, int n) {                                                     \
    combine<T##_t, L>(out, add, y, weight, p, n);                                                                \
  }                                                                                                              \
  GATED(swiglu##ANY, T, SiLU, L)                                                                                 \
  GATED(geglu##ANY, T, GELU, L)                                                                                  \
  GATED(clamped##ANY, T, Clamped, L)

#define EXPERTS(T)                                                                                               \
  extern "C" __global__ void __launch_bounds__(128) route_backward_##T(T##_t* dlogits, const float* dweight,     \
      const int* choice, const float* logits, const float* dshare, const int* tokens, int rows, int n,           \
      int k, Router r) {                                                                                         \
    route_backward(dlogits, dweight, choice, logits, dshare, tokens, rows, n, k, r);                             \
  }                                                                                                              \
  ROWWISE(, T, LANES<T##_t>)                                                                                     \
  ROWWISE(_any, T, 1)

EXPERTS(bf16)
EXPERTS(fp16)
EXPERTS(fp32)
