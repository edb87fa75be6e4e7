// Attention by its definition, for tests and for float32: a warp takes one query (or one key, for dK
// and dV) of a head. Its lanes share the head dim, and it visits the visible keys one after
// another. All arithmetic is in float64; results are rounded into the accumulators. There are
// no blocks and no shared memory, and the order is fixed.
//
// Compiled with SLOTS, the head dim over 32, rounded up.
#include "element.cuh"

#define INF __longlong_as_double(0x7ff0000000000000ll)

struct Strided {
  void* at;
  long long batch, seq, head;
};

// A Tile lets query i see key j if lo <= j - i <= hi.
struct Tile {
  int q_lo, q_hi, k_lo, k_hi, lo, hi;
};

struct Params {
  Strided q, k, v, dout, o, lse, delta, dq, dk, dv; // o: the accumulator
  // The bias of scores and the largest scores, as in attention.Scores; null: none. An axis that a
  // bias shares has stride 0.
  Strided bias, dbias, largest;
  const Tile* tiles;
  const int *rows, *columns; // of each query, of each key
  const float* slopes;       // of each head
  int tile_count, seq_q, seq_k, heads, kv_heads, dim, dim_v, batch, bias_batch, bias_heads;
  double scale, softcap;
};
static_assert(sizeof(Params) == 504, "ReferenceParams of params.go is laid out so");

template <class T> __device__ T* row_of(const Strided& s, int batch, int row, int head) {
  return (T*)s.at + batch * s.batch + row * s.seq + head * s.head;
}

__device__ double to_double(float x) { return x; }
__device__ double to_double(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ double to_double(fp16_t x) { return half_to_float(x.bits); }

// Row is a row of a matrix, divided among the lanes of a warp.
struct Row {
  double x[SLOTS];
};

template <class T> __device__ Row load(const Strided& s, int batch, int row, int head, int dim) {
  const T* p = row_of<T>(s, batch, row, head);
  Row y;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    int col = 32 * i + threadIdx.x;
    y.x[i] = col < dim ? to_double(p[col]) : 0;
  }
  return y;
}

__device__ void store(const Strided& s, int batch, int row, int head, int dim, const Row& y) {
  float* p = row_of<float>(s, batch, row, head);
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    int col = 32 * i + threadIdx.x;
    if (col < dim) {
      p[col] = (float)y.x[i];
    }
  }
}

__device__ double dot(const Row& a, const Row& b) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    sum += a.x[i] * b.x[i];
  }
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, step);
  }
  return sum;
}

// axpy adds a x to y.
__device__ void axpy(double a, const Row& x, Row& y) {
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    y.x[i] += a * x.x[i];
  }
}

__device__ void scale(double a, Row& y) {
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    y.x[i] *= a;
  }
}

// score computes the score of a dot product.
__device__ double score(double x, const Params& p) {
  x *= p.scale;
  return p.softcap > 0 ? p.softcap * tanh(x / p.softcap) : x;
}

// added returns the bias and the ALiBi term of a pair.
__device__ double added(const Params& p, int batch, int head, int i, int j) {
  double sum = 0;
  if (p.slopes) {
    const int far = p.rows[i] - p.columns[j];
    sum -= (double)p.slopes[head] * max(far, -far);
  }
  if (p.bias.at) {
    sum += row_of<float>(p.bias, batch, i, head)[p.columns[j]];
  }
  return sum;
}

// slope returns the derivative of score at a score s.
__device__ double slope(double s, const Params& p) {
  double t = p.softcap > 0 ? s / p.softcap : 0;
  return p.scale * (1 - t * t);
}

// each_key calls f for the keys that query i sees; each_query for the queries that see key j.
template <class F> __device__ void each_key(const Params& p, int i, F f) {
  for (int n = 0; n < p.tile_count; n++) {
    const Tile t = p.tiles[n];
    if (i < t.q_lo || i >= t.q_hi) {
      continue;
    }
    for (int j = max(t.k_lo, i + t.lo); j < min(t.k_hi, i + t.hi + 1); j++) {
      f(j);
    }
  }
}

template <class F> __device__ void each_query(const Params& p, int j, F f) {
  for (int n = 0; n < p.tile_count; n++) {
    const Tile t = p.tiles[n];
    if (j < t.k_lo || j >= t.k_hi) {
      continue;
    }
    for (int i = max(t.q_lo, j - t.hi); i < min(t.q_hi, j - t.lo + 1); i++) {
      f(i);
    }
  }
}

// forward: the old state counts as one more key, with its LSE for a score and its O for a value.
template <class T> __device__ void forward(const Params& p) {
  const int i = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y, batch = blockIdx.z,
            kv_head = head / (p.heads / p.kv_heads);
  if (i >= p.seq_q) {
    return;
  }
  float* lse = row_of<float>(p.lse, batch, i, head);
  const Row q = load<T>(p.q, batch, i, head, p.dim);
  Row o = load<float>(p.o, batch, i, head, p.dim_v);
  double most = *lse, sum = most == -INF ? 0 : 1, largest = -INF;
  bool any = false;
  each_key(p, i, [&](int j) {
    any = true;
    const double s = score(dot(q, load<T>(p.k, batch, j, kv_head, p.dim)), p) + added(p, batch, head, i, j);
    largest = s > largest || s != s ? s : largest; // NaN stays
    if (!(s <= most)) { // or NaN
      const double shrink = sum == 0 ? 0 : exp(most - s);
      sum *= shrink;
      scale(shrink, o);
      most = s;
    }
    const double w = s == -INF ? 0 : exp(s - most);
    sum += w;
    axpy(w, load<T>(p.v, batch, j, kv_head, p.dim_v), o);
  });
  if (p.largest.at && threadIdx.x == 0) {
    float* kept = row_of<float>(p.largest, batch, i, head);
    *kept = largest > *kept || largest != largest ? (float)largest : *kept;
  }
  if (!any || sum == 0 && p.bias.at) {
    return; // no visible key, or the bias hides all, in this block and earlier ones
  }
  sum = sum == 0 ? sum / sum : sum; // without a bias, which hides pairs, scores of -Inf are an invalid input: NaN
  scale(1 / sum, o);
  store(p.o, batch, i, head, p.dim_v, o);
  __syncwarp(); // all lanes have read LSE
  if (threadIdx.x == 0) {
    *lse = (float)(most + log(sum));
  }
}

// gradient computes P of one pair, the gradient of its score before the bias, and dS, the gradient of the
// dot product, by algorithm 2 of FlashAttention-2 (arXiv:2307.08691).
struct Gradient {
  double p, score, ds;
};

__device__ Gradient gradient(
    const Params& p, const Row& q, const Row& k, const Row& v, const Row& dout, double lse, double delta, double more) {
  const double s = score(dot(q, k), p), prob = exp(s + more - lse), grad = prob * (dot(dout, v) - delta);
  return {prob, grad, grad * slope(s, p)};
}

template <class T, class D> __device__ void queries(const Params& p) {
  const int i = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y, batch = blockIdx.z,
            kv_head = head / (p.heads / p.kv_heads);
  if (i >= p.seq_q) {
    return;
  }
  const double lse = *row_of<float>(p.lse, batch, i, head), delta = *row_of<float>(p.delta, batch, i, head);
  if (lse == -INF) {
    return;
  }
  const Row q = load<T>(p.q, batch, i, head, p.dim), dout = load<D>(p.dout, batch, i, head, p.dim_v);
  Row dq = load<float>(p.dq, batch, i, head, p.dim);
  bool any = false;
  each_key(p, i, [&](int j) {
    any = true;
    const Row k = load<T>(p.k, batch, j, kv_head, p.dim);
    axpy(gradient(p, q, k, load<T>(p.v, batch, j, kv_head, p.dim_v), dout, lse, delta, added(p, batch, head, i, j)).ds,
        k, dq);
  });
  if (any) {
    store(p.dq, batch, i, head, p.dim, dq);
  }
}

template <class T, class D> __device__ void keys(const Params& p) {
  const int j = blockIdx.x * blockDim.y + threadIdx.y, kv_head = blockIdx.y, batch = blockIdx.z,
            group = p.heads / p.kv_heads;
  if (j >= p.seq_k) {
    return;
  }
  const Row k = load<T>(p.k, batch, j, kv_head, p.dim), v = load<T>(p.v, batch, j, kv_head, p.dim_v);
  Row dk = load<float>(p.dk, batch, j, kv_head, p.dim), dv = load<float>(p.dv, batch, j, kv_head, p.dim_v);
  bool any = false;
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    each_query(p, j, [&](int i) {
      const double lse = *row_of<float>(p.lse, batch, i, head), delta = *row_of<float>(p.delta, batch, i, head);
      if (lse == -INF) {
        return;
      }
      any = true;
      const Row q = load<T>(p.q, batch, i, head, p.dim), dout = load<D>(p.dout, batch, i, head, p.dim_v);
      const Gradient g = gradient(p, q, k, v, dout, lse, delta, added(p, batch, head, i, j));
      axpy(g.p, dout, dv);
      axpy(g.ds, q, dk);
    });
  }
  if (any) {
    store(p.dk, batch, j, kv_head, p.dim, dk);
    store(p.dv, batch, j, kv_head, p.dim_v, dv);
  }
}

// bias_rows adds to the gradient of a bias: a warp takes a query of a row of it, and all batches and heads
// that share the row, in turn.
template <class T, class D> __device__ void bias_rows(const Params& p) {
  const int i = blockIdx.x * blockDim.y + threadIdx.y;
  if (i >= p.seq_q) {
    return;
  }
  float* dbias = row_of<float>(p.dbias, blockIdx.z, i, blockIdx.y);
  for (int batch = blockIdx.z; batch < p.batch; batch += p.bias_batch) {
    for (int head = blockIdx.y; head < p.heads; head += p.bias_heads) {
      const int kv_head = head / (p.heads / p.kv_heads);
      const double lse = *row_of<float>(p.lse, batch, i, head), delta = *row_of<float>(p.delta, batch, i, head);
      if (lse == -INF) {
        continue;
      }
      const Row q = load<T>(p.q, batch, i, head, p.dim), dout = load<D>(p.dout, batch, i, head, p.dim_v);
      each_key(p, i, [&](int j) {
        const Row k = load<T>(p.k, batch, j, kv_head, p.dim), v = load<T>(p.v, batch, j, kv_head, p.dim_v);
        const double grad = gradient(p, q, k, v, dout, lse, delta, added(p, batch, head, i, j)).score;
        if (threadIdx.x == 0) {
          dbias[p.columns[j]] += (float)grad;
        }
      });
    }
  }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(128, SLOTS > 8 ? 1 : 3)

#define FOR_T(name, T) \
  KERNEL reference_forward_##name(const __grid_constant__ Params p) { forward<T>(p); } \
  KERNEL reference_queries_##name(const __grid_constant__ Params p) { queries<T, T>(p); } \
  KERNEL reference_keys_##name(const __grid_constant__ Params p) { keys<T, T>(p); } \
  KERNEL reference_bias_##name(const __grid_constant__ Params p) { bias_rows<T, T>(p); }

FOR_T(fp32, float)
FOR_T(bf16, bf16_t)
FOR_T(fp16, fp16_t)
