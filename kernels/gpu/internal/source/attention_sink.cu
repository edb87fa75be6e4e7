// Attention sinks: an additional score of each head in the denominator of the softmax, folded into O and LSE of a
// complete forward pass, and the gradient of the sinks.
//
// A row is the elements of one (batch, seq, head), and belongs to a warp. Lanes take neighbouring elements.
// The fold has one warp per row. The gradient has one block per head: its warps take rows in turn and add up
// in double, so that the order of the sum depends only on the shape.
#include "element.cuh"

#define NO_KEY __int_as_float(0xff800000) // -Inf: the LSE of a row that saw no key

// Strided is a tensor [batch, seq, heads, dim]; strides count elements, and dim has stride 1.
struct Strided {
  void* at;
  long long batch, seq, head;

  template <class T> __device__ T* row(int b, int s, int h) const { return (T*)at + b * batch + s * seq + h * head; }
};

struct SinkParams {
  Strided o, dout, lse; // dout: only for the gradient
  const float* sink;    // of each head
  float* dsink;
  int batch, seqs, heads, dim;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16_t x) { return half_to_float(x.bits); }
__device__ __forceinline__ void convert(float& y, float x) { y = x; }
template <class T> __device__ __forceinline__ void convert(T& y, float x) { y.bits = (unsigned short)pack<T>(x, 0); }

template <class T> __device__ __forceinline__ void fold(const SinkParams& p) {
  const long long n = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (n >= (long long)p.batch * p.seqs * p.heads) {
    return;
  }
  const int head = n % p.heads, row = n / p.heads, lane = threadIdx.x % 32;
  float* lse = p.lse.row<float>(row / p.seqs, row % p.seqs, head);
  const float old = *lse, sink = p.sink[head];
  float most = old > sink ? old : sink;
  if (old != old || sink != sink) {
    most = old + sink; // NaN stays
  }
  if (most == NO_KEY) {
    return; // no key is visible, and the sink's weight is 0
  }
  const float low = old > sink ? sink : old, with = most == -NO_KEY ? most : most + log1pf(expf(low - most)),
              shrink = expf(old - with);
  T* o = p.o.row<T>(row / p.seqs, row % p.seqs, head);
  for (int col = lane; col < p.dim; col += 32) {
    convert(o[col], to_float(o[col]) * shrink);
  }
  __syncwarp(); // all lanes have read LSE
  if (lane == 0) {
    *lse = with;
  }
}

template <class O, class D> __device__ __forceinline__ void grad(const SinkParams& p) {
  extern __shared__ __align__(1024) char shared[];
  double* sums = (double*)shared; // of each warp
  const int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32,
            rows = p.batch * p.seqs;
  const float sink = p.sink[head];
  double total = 0;
  for (int row = warp; row < rows; row += warps) {
    const float lse = *p.lse.row<float>(row / p.seqs, row % p.seqs, head);
    const O* o = p.o.row<O>(row / p.seqs, row % p.seqs, head);
    const D* dout = p.dout.row<D>(row / p.seqs, row % p.seqs, head);
    float sum = 0;
    for (int col = lane; col < p.dim; col += 32) {
      sum += to_float(o[col]) * to_float(dout[col]);
    }
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
    if (lse != NO_KEY) {
      total += (double)(expf(sink - lse) * sum);
    }
  }
  if (lane == 0) {
    sums[warp] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int i = 0; i < warps; i++) {
      total += sums[i];
    }
    p.dsink[head] = (float)-total;
  }
}

// Entries are named by the types of O and, after it, of dO.
#define FOR_O(on, O) \
  extern "C" __global__ void __launch_bounds__(256) attention_sink_##on(const __grid_constant__ SinkParams p) { \
    fold<O>(p); \
  } \
  GRAD(on, O, fp32, float) GRAD(on, O, bf16, bf16_t) GRAD(on, O, fp16, fp16_t)

#define GRAD(on, O, dn, D) \
  extern "C" __global__ void __launch_bounds__(1024) \
      attention_sink_grad_##on##_##dn(const __grid_constant__ SinkParams p) { \
    grad<O, D>(p); \
  }

FOR_O(fp32, float)
FOR_O(bf16, bf16_t)
FOR_O(fp16, fp16_t)
