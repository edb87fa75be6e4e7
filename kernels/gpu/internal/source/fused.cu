// The work between cuDNN's attention and float32 accumulators: merging partial results by their LSE,
// adding partial gradients, and reordering the axes of LSE. Memory bounds all of it, so each thread
// has several 16-byte loads in flight.
//
// Head dims are multiples of 8, and rows of a head begin at multiples of 16 bytes.
#include "element.cuh"

#define INF __int_as_float(0x7f800000)

// Strides of [batch, seq, heads], in elements.
struct Strides {
  long long batch, seq, head;
  __device__ long long at(int b, int s, int h) const { return b * batch + s * seq + h * head; }
};

// A Part is a partial result: rows [lo, hi) of x, dense [batch, hi - lo, heads, dim] of 16-bit
// floats, and of the LSE.
struct Part {
  const void* x;
  const float* lse;
  Strides l;
  int lo, hi;
  __device__ bool has(int row) const { return row >= lo && row < hi; }
};

constexpr int MAX_PARTS = 8;
constexpr int PAIRS = 256; // largest number of (row, head) pairs in a block of fused_merge

struct Merge {
  Part parts[MAX_PARTS];
  const float* state; // the earlier results; not read if fresh
  Strides state_at;
  float* lse;
  Strides lse_at;
  void* out;
  Strides out_at;
  int count, fresh, all; // all: also write rows without any result
  int seq, heads, dim;
  int rows_per_block, heads_per_block;
};

template <int N>
__device__ void load(float (&x)[N], const float* p) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float4 v = *reinterpret_cast<const float4*>(p + i);
    x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
  }
}

__device__ void store(float* p, const float (&x)[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <class T>
__device__ void store(T* p, const float (&x)[8]) {
  uint4 v;
  v.x = pack<T>(x[0], x[1]), v.y = pack<T>(x[2], x[3]);
  v.z = pack<T>(x[4], x[5]), v.w = pack<T>(x[6], x[7]);
  *reinterpret_cast<uint4*>(p) = v;
}

// axpy adds w * v to y; v holds 8 numbers of type T.
template <class T>
__device__ void axpy(float (&y)[8], float w, uint4 v) {
  const unsigned bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float lo, hi;
    unpack<T>(bits[i], lo, hi);
    y[2 * i] += w * lo;
    y[2 * i + 1] += w * hi;
  }
}

// weigh sets w[p] to exp(lse_p - lse) for every part and for the state, or 0 if a part does not
// have the row, and lse to the log of the sum. Without any finite LSE, they are 0 and -inf. NaN
// stays NaN.
__device__ float weigh(float (&w)[MAX_PARTS + 1], const Merge& m, int b, int row, int head) {
  const float none = -INF;
  float top = none;
#pragma unroll
  for (int p = 0; p < MAX_PARTS; p++) {
    const Part& part = m.parts[p];
    w[p] = p < m.count && part.has(row) ? part.lse[part.l.at(b, row - part.lo, head)] : none;
    top = fmaxf(top, w[p]);
  }
  w[MAX_PARTS] = m.fresh ? none : m.lse[m.lse_at.at(b, row, head)];
  top = fmaxf(top, w[MAX_PARTS]);
  if (top == none) top = 0;
  float sum = 0;
#pragma unroll
  for (int p = 0; p <= MAX_PARTS; p++) sum += w[p] = expf(w[p] - top);
  const float inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
  for (int p = 0; p <= MAX_PARTS; p++)
    w[p] = w[p] == 0 ? 0 : w[p] * inverse; // 0 times NaN is NaN, and a part without the row has no memory
  return top + logf(sum);
}

// A block merges a few rows of a few heads. First, one thread per (row, head) pair computes the
// weights, with threads along rows, since LSEs of one head are contiguous. Then all threads process
// the head dims, with threads along heads.
template <class T, class Out>
__device__ void merge(const Merge& m) {
  __shared__ float weights[MAX_PARTS + 1][PAIRS];
  const int b = blockIdx.z, row0 = blockIdx.x * m.rows_per_block, head0 = blockIdx.y * m.heads_per_block;
  const int rows = min(m.rows_per_block, m.seq - row0), heads = min(m.heads_per_block, m.heads - head0);
  for (int i = threadIdx.x; i < rows * heads; i += blockDim.x) {
    const int r = i % rows, h = i / rows;
    float w[MAX_PARTS + 1];
    const float lse = weigh(w, m, b, row0 + r, head0 + h);
    m.lse[m.lse_at.at(b, row0 + r, head0 + h)] = lse;
#pragma unroll
    for (int p = 0; p <= MAX_PARTS; p++) weights[p][r * heads + h] = w[p];
  }
  __syncthreads();
  const int vectors = m.dim / 8;
  for (int i = threadIdx.x; i < rows * heads * vectors; i += blockDim.x) {
    const int pair = i / vectors, d = i % vectors * 8;
    const int row = row0 + pair / heads, head = head0 + pair % heads;
    uint4 x[MAX_PARTS];
    float w[MAX_PARTS], y[8] = {};
    bool any = m.all;
#pragma unroll
    for (int p = 0; p < MAX_PARTS; p++) {
      w[p] = weights[p][pair];
      if (w[p] != 0) {
        const Part& part = m.parts[p];
        const long long at = (((long long)b * (part.hi - part.lo) + row - part.lo) * m.heads + head) * m.dim + d;
        x[p] = load_streaming(static_cast<const T*>(part.x) + at);
        any = true;
      }
    }
    if (!any) continue; // the state stays the same
    if (weights[MAX_PARTS][pair] != 0) {
      load(y, m.state + m.state_at.at(b, row, head) + d);
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] *= weights[MAX_PARTS][pair];
    }
#pragma unroll
    for (int p = 0; p < MAX_PARTS; p++) {
      if (w[p] != 0) axpy<T>(y, w[p], x[p]);
    }
    store(static_cast<Out*>(m.out) + m.out_at.at(b, row, head) + d, y);
  }
}

// A Sum is one tensor of gradients: rows [lo, hi) of dst, float32. They become the sum of the parts
// and of src, or get it added. src, float32 also, has the rows [src0, src1). Rows in [fresh0, fresh1)
// are not initialised.
struct Sum {
  Part parts[MAX_PARTS];
  float* dst;
  Strides at;
  const float* src;
  Strides src_at;
  int count, lo, hi, fresh0, fresh1, src0, src1;
  int heads, dim, unused;
};

struct Sums {
  Sum of[2]; // indexed by blockIdx.y
};

template <class T>
__device__ void sum(const Sum& s) {
  const unsigned vectors = s.dim / 8, per_row = s.heads * vectors, total = (s.hi - s.lo) * per_row;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
    const int row = s.lo + i / per_row, b = blockIdx.z;
    const unsigned rest = i % per_row;
    uint4 x[MAX_PARTS];
    float y[8] = {};
    bool has[MAX_PARTS], any = false;
#pragma unroll
    for (int p = 0; p < MAX_PARTS; p++) {
      const Part& part = s.parts[p];
      has[p] = p < s.count && part.has(row);
      if (has[p]) {
        const long long at = ((long long)b * (part.hi - part.lo) + row - part.lo) * per_row + rest;
        x[p] = load_streaming(static_cast<const uint4*>(part.x) + at);
        any = true;
      }
    }
    const bool fresh = row >= s.fresh0 && row < s.fresh1, more = row >= s.src0 && row < s.src1;
    const int head = rest / vectors, d = rest % vectors * 8;
    float* dst = s.dst + s.at.at(b, row, head) + d, z[8] = {};
    if (more) load(z, s.src + s.src_at.at(b, row - s.src0, head) + d);
    if (!fresh) {
      if (!any && !more) continue;
      load(y, dst);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) y[k] += z[k];
#pragma unroll
    for (int p = 0; p < MAX_PARTS; p++) {
      if (has[p]) axpy<T>(y, 1, x[p]);
    }
    store(dst, y);
  }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

KERNEL fused_merge_bf16(const Merge m) { merge<bf16_t, bf16_t>(m); }
KERNEL fused_merge_bf16_fp32(const Merge m) { merge<bf16_t, float>(m); }
KERNEL fused_merge_fp16(const Merge m) { merge<fp16_t, fp16_t>(m); }
KERNEL fused_merge_fp16_fp32(const Merge m) { merge<fp16_t, float>(m); }
KERNEL fused_sum_bf16(const Sums s) { sum<bf16_t>(s.of[blockIdx.y]); }
KERNEL fused_sum_fp16(const Sums s) { sum<fp16_t>(s.of[blockIdx.y]); }

// fused_lse copies rows of LSE from one order of axes to another, through shared memory, since only
// one of the two is along seq. With open, -inf becomes inf: exp(score - inf) is 0, the
// probability in rows that see no key. The block is 32 by 8.
struct Lse {
  const float* src;
  Strides src_at;
  float* dst;
  Strides dst_at;
  int rows, heads, open, unused;
};

KERNEL fused_lse(const Lse l) {
  __shared__ float tile[32][33];
  const int row0 = blockIdx.x * 32, head0 = blockIdx.y * 32, b = blockIdx.z;
  // threadIdx.x goes along the axis with stride 1.
  const bool by_row = l.src_at.seq == 1, to_row = l.dst_at.seq == 1;
  for (int k = threadIdx.y; k < 32; k += 8) {
    const int r = by_row ? threadIdx.x : k, h = by_row ? k : threadIdx.x;
    if (row0 + r < l.rows && head0 + h < l.heads) {
      float x = l.src[l.src_at.at(b, row0 + r, head0 + h)];
      tile[r][h] = l.open && x == -INF ? INF : x;
    }
  }
  __syncthreads();
  for (int k = threadIdx.y; k < 32; k += 8) {
    const int r = to_row ? threadIdx.x : k, h = to_row ? k : threadIdx.x;
    if (row0 + r < l.rows && head0 + h < l.heads) l.dst[l.dst_at.at(b, row0 + r, head0 + h)] = tile[r][h];
  }
}

// fused_fill sets n floats to x.
KERNEL fused_fill(float* p, long long n, float x) {
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    p[i] = x;
}
