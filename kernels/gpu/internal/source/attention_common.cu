// Common kernels of cprun's own attention: initialising accumulators, adding and converting them, delta, and
// writing lists of tiles to the device.
//
// A row is the elements of one (batch, seq, head). WIDTH threads, a power of two up to 32, process it, V neighbouring
// elements each at a time.
#include "element.cuh"

// Strided is a tensor [batch, seq, heads, dim]; strides count elements, and dim's is 1.
struct Strided {
  void* at;
  long long batch, seq, head;

  template <class T> __device__ T* row(int n, int seqs, int heads) const {
    int r = n / heads;
    return (T*)at + r / seqs * batch + r % seqs * seq + n % heads * head;
  }
};

struct Rows {
  int rows, seqs, heads, dim, width, unused; // rows: batch * seqs * heads
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16_t x) { return half_to_float(x.bits); }
__device__ __forceinline__ void convert(float& y, float x) { y = x; }
template <class T> __device__ __forceinline__ void convert(T& y, float x) { y.bits = (unsigned short)pack<T>(x, 0); }

// A Pack holds V elements that are loaded and stored at once.
template <class T, int V> struct __align__(sizeof(T) * V) Pack { T x[V]; };

// each calls f(row, column) for the thread's pieces of V elements of its row.
template <int V, class F> __device__ __forceinline__ void each(const Rows& r, F f) {
  const int per_block = blockDim.x / r.width;
  const int row = blockIdx.x * per_block + threadIdx.x / r.width;
  if (row < r.rows) {
    for (int col = threadIdx.x % r.width * V; col < r.dim; col += r.width * V) {
      f(row, col);
    }
  }
}

template <int V> __device__ __forceinline__ void fill(const Rows& r, const Strided& y, float value) {
  each<V>(r, [&](int row, int col) {
    Pack<float, V> p;
#pragma unroll
    for (int i = 0; i < V; i++) {
      p.x[i] = value;
    }
    *(Pack<float, V>*)(y.row<float>(row, r.seqs, r.heads) + col) = p;
  });
}

template <int V> __device__ __forceinline__ void add(const Rows& r, const Strided& y, const Strided& x) {
  each<V>(r, [&](int row, int col) {
    auto* to = (Pack<float, V>*)(y.row<float>(row, r.seqs, r.heads) + col);
    Pack<float, V> a = *to, b = *(const Pack<float, V>*)(x.row<float>(row, r.seqs, r.heads) + col);
#pragma unroll
    for (int i = 0; i < V; i++) {
      a.x[i] += b.x[i];
    }
    *to = a;
  });
}

template <class T, int V> __device__ __forceinline__ void cast(const Rows& r, const Strided& y, const Strided& x) {
  each<V>(r, [&](int row, int col) {
    Pack<float, V> a = *(const Pack<float, V>*)(x.row<float>(row, r.seqs, r.heads) + col);
    Pack<T, V> b;
#pragma unroll
    for (int i = 0; i < V; i++) {
      convert(b.x[i], a.x[i]);
    }
    *(Pack<T, V>*)(y.row<T>(row, r.seqs, r.heads) + col) = b;
  });
}

// delta sets d to the dot products of the rows of x and y. It also zeroes the rows of cleared, with columns elements.
template <class X, class Y, int V>
__device__ __forceinline__ void delta(
    const Rows& r, const Strided& d, const Strided& x, const Strided& y, const Strided& cleared, int columns) {
  float sum = 0;
  each<V>(r, [&](int row, int col) {
    Pack<X, V> a = *(const Pack<X, V>*)(x.row<X>(row, r.seqs, r.heads) + col);
    Pack<Y, V> b = *(const Pack<Y, V>*)(y.row<Y>(row, r.seqs, r.heads) + col);
#pragma unroll
    for (int i = 0; i < V; i++) {
      sum += to_float(a.x[i]) * to_float(b.x[i]);
    }
  });
  for (int step = r.width / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, step);
  }
  const int row = blockIdx.x * (blockDim.x / r.width) + threadIdx.x / r.width;
  if (row >= r.rows) {
    return;
  }
  if (threadIdx.x % r.width == 0) {
    *d.row<float>(row, r.seqs, r.heads) = sum;
  }
  for (int col = threadIdx.x % r.width * 4; col < columns; col += r.width * 4) {
    *(float4*)(cleared.row<float>(row, r.seqs, r.heads) + col) = {0, 0, 0, 0};
  }
}

// Names end in the number of elements of a piece: 8 or 4 for rows that consist of aligned pieces, else 1.
#define KERNEL extern "C" __global__ void __launch_bounds__(256)

#define FOR_V(V) \
  KERNEL attention_fill_##V(Rows r, Strided y, float value) { fill<V>(r, y, value); } \
  KERNEL attention_add_##V(Rows r, Strided y, Strided x) { add<V>(r, y, x); } \
  FOR_T(V, fp32, float) FOR_T(V, bf16, bf16_t) FOR_T(V, fp16, fp16_t)

#define FOR_T(V, name, T) \
  KERNEL attention_cast_##name##_##V(Rows r, Strided y, Strided x) { cast<T, V>(r, y, x); } \
  DELTA(V, name, T, fp32, float) DELTA(V, name, T, bf16, bf16_t) DELTA(V, name, T, fp16, fp16_t)

#define DELTA(V, xn, X, yn, Y) \
  KERNEL attention_delta_##xn##_##yn##_##V(Rows r, Strided d, Strided x, Strided y, Strided cleared, int columns) { \
    delta<X, Y, V>(r, d, x, y, cleared, columns); \
  }

FOR_V(4)
FOR_V(1)
DELTA(8, bf16, bf16_t, bf16, bf16_t)
DELTA(8, bf16, bf16_t, fp16, fp16_t)
DELTA(8, fp16, fp16_t, bf16, bf16_t)
DELTA(8, fp16, fp16_t, fp16, fp16_t)

// attention_store writes its argument to memory. The argument travels with the launch, so that the host keeps no buffer
// and the stream waits for no copy.
struct Words {
  unsigned x[224];
};
extern "C" __global__ void attention_store(unsigned* to, int count, const __grid_constant__ Words words) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    to[i] = words.x[i];
  }
}
