// The cross entropy of rows of logits, and its gradient in place.
#include "ops.cuh"

constexpr float LOG2E = 1.4426950408889634f;
#define INF __int_as_float(0x7f800000)

// Softmax holds the largest of some logits and the sum of exp(logit - top).
struct Softmax {
  float top, sum;

  // floor returns the number to subtract from a logit: 0 if all are -inf, to avoid NaN.
  __device__ __forceinline__ static float floor(float top) { return top == -INF ? 0 : top; }

  // add includes N more logits. top skips a NaN, which makes sum NaN.
  template <int N> __device__ __forceinline__ void add(const float (&x)[N]) {
    float most = top;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, x[i]);
    float from = floor(most);
    sum *= exp2_fast((top - from) * LOG2E);
    top = most;
#pragma unroll
    for (int i = 0; i < N; i++) sum += exp2_fast((x[i] - from) * LOG2E);
  }
};

// A Row has n logits in memory: single ones up to an alignment of 16 bytes, vectors, and
// single ones at the end.
template <class T> struct Row {
  T* at;
  int n, head, vecs;

  __device__ __forceinline__ Row(T* at, int n) : at(at), n(n) {
    head = min(n, int(-(unsigned long long)at / sizeof(T) % LANES<T>));
    vecs = (n - head) / LANES<T>;
  }
  __device__ __forceinline__ T* vec(int i) const { return at + head + i * LANES<T>; }
  // loose returns the number of single logits: one(0), one(1) and so on.
  __device__ __forceinline__ int loose() const { return n - vecs * LANES<T>; }
  __device__ __forceinline__ T* one(int i) const { return at + (i < head ? i : i + vecs * LANES<T>); }
};

// slope returns the derivative of softcap * tanh(z / softcap) from its value y; 1 without a soft cap.
__device__ __forceinline__ float slope(float y, float softcap) {
  float tanh = y / softcap;
  return softcap > 0 ? 1.0f - tanh * tanh : 1.0f;
}

// cross_entropy has one block per row. It writes the loss to losses: -log softmax(logits)[target], 0 for a negative
// target, NaN for n or more. With GRAD, the row becomes scale * (softmax - onehot(target)), or 0, times the derivative
// of the soft cap that made the logits, unless that is 0. Shared memory
// keeps the first `held` vectors of the row between the two passes, each for the thread that loaded it.
template <class T, bool GRAD>
__device__ __forceinline__ void cross_entropy(double* losses, T* logits, const int* targets, int n,
    float scale, int held, float softcap) {
  constexpr int L = LANES<T>, U = 4;
  extern __shared__ uint4 hold[];
  __shared__ float tops[32];
  __shared__ double sums[32];
  int target = targets[blockIdx.x], step = blockDim.x;
  Row<T> row(logits + (long long)blockIdx.x * n, n);
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if constexpr (GRAD) {
      Vec<T> zero{make_uint4(0, 0, 0, 0)};
      for (int i = threadIdx.x; i < row.vecs; i += step) put(row.vec(i), zero);
      for (int i = threadIdx.x; i < row.loose(); i += step) *row.one(i) = from_float<T>(0);
    }
    return;
  }
  float hit = threadIdx.x == 0 && target < n ? to_float(row.at[target]) : 0;

  Softmax s{-INF, 0};
  for (int i = threadIdx.x; i < row.vecs; i += U * step) {
    Vec<T> v[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (i + u * step < row.vecs) v[u] = stream((const T*)row.vec(i + u * step));
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (i + u * step >= row.vecs) continue;
      if (GRAD && i + u * step < held) hold[i + u * step] = v[u].raw;
      float x[L];
      v[u].get(x);
      s.add(x);
    }
  }
  for (int i = threadIdx.x; i < row.loose(); i += step) {
    float x[1] = {to_float(*row.one(i))};
    s.add(x);
  }
  float top = Softmax::floor(block_max(s.top, tops));
  double sum = block_sum((double)(s.sum * exp2_fast((Softmax::floor(s.top) - top) * LOG2E)), sums);
  double loss = 0;
  if (threadIdx.x == 0) {
    loss = log(sum) - (double)(hit - top);
    losses[blockIdx.x] = target < n ? loss : __longlong_as_double(0x7ff8000000000000);
  }
  if constexpr (GRAD) {
    float factor = (float)(scale / sum);
#pragma unroll 4
    for (int i = threadIdx.x; i < row.vecs; i += step) {
      Vec<T> v;
      if (i < held) {
        v.raw = hold[i];
      } else {
        v = stream((const T*)row.vec(i));
      }
      float x[L];
      v.get(x);
#pragma unroll
      for (int k = 0; k < L; k++) x[k] = exp2_fast((x[k] - top) * LOG2E) * factor * slope(x[k], softcap);
      v.set(x);
      put(row.vec(i), v);
    }
    for (int i = threadIdx.x; i < row.loose(); i += step) {
      float x = to_float(*row.one(i));
      *row.one(i) = from_float<T>(exp2_fast((x - top) * LOG2E) * factor * slope(x, softcap));
    }
    __syncthreads();
    // softmax - 1 is expm1 of the logarithm, which keeps its digits for a likely target.
    if (threadIdx.x == 0 && target < n) {
      row.at[target] = from_float<T>(scale * expm1f((float)-loss) * slope(hit, softcap));
    }
  }
}

#define CROSS_ENTROPY(NAME, T)                                                                                 \
  extern "C" __global__ void __launch_bounds__(1024)                                                           \
      cross_entropy_##NAME(double* losses, T* logits, const int* targets, int n, float scale, int held,        \
          float softcap) {                                                                                     \
    cross_entropy<T, false>(losses, logits, targets, n, scale, held, softcap);                                 \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(1024)                                                           \
      cross_entropy_grad_##NAME(double* losses, T* logits, const int* targets, int n, float scale, int held,   \
          float softcap) {                                                                                     \
    cross_entropy<T, true>(losses, logits, targets, n, scale, held, softcap);                                  \
  }

CROSS_ENTROPY(bf16, bf16_t)
CROSS_ENTROPY(fp16, fp16_t)
CROSS_ENTROPY(fp32, float)
