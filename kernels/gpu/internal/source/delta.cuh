// The arguments and the chunks of delta.cu, and products of its tiles.
#pragma once
#include "flash_products.cuh"
#include "ops.cuh"

constexpr int ROWS = 64, COLS = 32, TILE = 128, THREADS = 256, SIZE = sizeof(Stored), SEGMENTS = 96;

struct Segment {
  int lo, hi, chunk, from; // its rows; the number of its first chunk; the place of its state in from, or -1
};

// Bits of DeltaParams.flags.
constexpr int ALIGNED_Q = 1, ALIGNED_K = 2, ALIGNED_V = 4, ALIGNED_DOUT = 8; // rows of aligned pieces of 16 bytes
constexpr int WIDE_DOUT = 16, WIDE_O = 32, WIDE_DQ = 64, WIDE_DK = 128, WIDE_DV = 256; // float32, whatever q is
constexpr int MAPS = 512;     // states are maps M | R
constexpr int KEEP = 1024;    // the chains keep what delta_grads needs
constexpr int BACKWARD = 2048;  // delta_prepare stores P transposed
constexpr int PIECES_O = 4096;  // o has the type of q and aligned pieces

struct DeltaParams {
  Strided q, k, v, g, beta, dout, o, dq, dk, dv, dg, dbeta;
  Strided from, to; // states before the first chunk and after the last, seq for rows; none: 0, or the map I | 0
  // For each chunk, batch element and head, in the type of q: T, P, E, X, the states before chunks, and the
  // gradients of states after them; and Factors.
  Stored *t, *p, *e, *x, *s, *ds;
  struct Factors* factors;
  int batch, heads, key_heads, dim, dim_v, wide_v, count, flags; // wide_v: columns of E, X and states
  float scale;
  int stages; // buffers of copies: of the chains 1 to 3, of delta_grads 1 or 2
  Segment segments[SEGMENTS];
};

// Factors belong to rows: beta, D(i, before), D(last, i), and the sums of g. They are 0 since the segment's end.
struct Factors {
  float beta[ROWS], into[ROWS], out[ROWS];
  double sum[ROWS];
};

#ifdef FLOAT32
using fp32_t = float;

// A Sum is a warp's share of a product: a lane has the elements of an mma.
template <int HEIGHT, int WIDTH> struct Sum {
  static constexpr int MT = HEIGHT / 16, NT = WIDTH / 8;
  float x[MT][NT][4];
};

template <class In> __device__ __forceinline__ float element(const In& in, int outer, int k) {
  using At = typename In::Tile;
  return load_shared(in.smem + (In::TRANS ? At::offset(k, in.at + outer) : At::offset(in.at + outer, k)));
}

// product adds A B, over K, to c. Its operands are as in multiply.
template <class T, int K, class C, class A, class B>
__device__ __forceinline__ void product(C& c, const A& a, const B& b) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    float x[C::MT][2], y[C::NT][2];
#pragma unroll
    for (int i = 0; i < C::MT * 2; i++) x[i / 2][i % 2] = element(a, i * 8 + lane / 4, k);
#pragma unroll
    for (int j = 0; j < C::NT * 2; j++) y[j / 2][j % 2] = element(b, j / 2 * 8 + lane % 4 * 2 + j % 2, k);
#pragma unroll
    for (int m = 0; m < C::MT; m++) {
#pragma unroll
      for (int n = 0; n < C::NT * 4; n++) c.x[m][n / 4][n % 4] += x[m][n % 4 / 2] * y[n / 4][n % 2];
    }
  }
}

template <class T> __device__ __forceinline__ void put_shared(unsigned at, float a, float b) {
  store_shared(at, __float_as_uint(a), __float_as_uint(b));
}
template <class T> __device__ __forceinline__ float2 get_shared(unsigned at) {
  return make_float2(load_shared(at), load_shared(at + 4));
}
#else
template <int HEIGHT, int WIDTH> using Sum = Fragment<HEIGHT, WIDTH, false, false>;

template <class T, int K, class C, class A, class B>
__device__ __forceinline__ void product(C& c, const A& a, const B& b) {
  multiply<T, K>(c, a, b);
}

template <class T> __device__ __forceinline__ void put_shared(unsigned at, float a, float b) {
  store_shared(at, pack<T>(a, b));
}
template <class T> __device__ __forceinline__ float2 get_shared(unsigned at) {
  float2 x;
  unpack<T>(__float_as_uint(load_shared(at)), x.x, x.y);
  return x;
}
#endif

// pairs calls f(row, column, x, y) for all neighbours of a sum that begins at (row, column). Columns are even. NVRTC
// 13.0 compiles Operand::offset of the next, odd column without its division by 8.
template <class C, class F> __device__ __forceinline__ void pairs(C& c, int row, int col, F f) {
  row += threadIdx.x % 32 / 4, col += threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::MT; m++) {
#pragma unroll
    for (int n = 0; n < C::NT; n++) {
      f(row + m * 16, col + n * 8, c.x[m][n][0], c.x[m][n][1]);
      f(row + m * 16 + 8, col + n * 8, c.x[m][n][2], c.x[m][n][3]);
    }
  }
}

template <class C> __device__ __forceinline__ void zero(C& c) {
  pairs(c, 0, 0, [](int, int, float& x, float& y) { x = y = 0; });
}

// hold stores a sum as an operand of H by W, from (row, column).
template <class T, int H, int W, class C> __device__ __forceinline__ void hold(unsigned smem, C& c, int row, int col) {
  pairs(c, row, col, [=](int i, int j, float x, float y) { put_shared<T>(smem + Operand<H, W>::offset(i, j), x, y); });
}

// copy_out copies an operand of H by W to aligned memory, with these numbers of rows and columns.
template <class T, int H, int W>
__device__ __forceinline__ void copy_out(Stored* to, long long stride, unsigned smem, int rows, int cols = W) {
  constexpr int PIECE = Operand<H, W>::PIECE, ACROSS = W / PIECE;
  for (int i = threadIdx.x; i < H * ACROSS; i += THREADS) {
    int row = i / ACROSS, col = i % ACROSS * PIECE;
    if (row >= rows || col >= cols) continue;
    float x[4];
    load_shared(smem + Operand<H, W>::offset(row, col), x);
    *(float4*)(to + row * stride + col) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

// put_pair stores the first left of two neighbours, as one word if it is aligned.
template <class T> __device__ __forceinline__ void put_pair(T* to, int left, float x, float y) {
  if (left > 1 && (size_t)to % (2 * sizeof(T)) == 0) {
    if constexpr (sizeof(T) == 4) {
      *(float2*)to = make_float2(x, y);
    } else {
      *(unsigned*)to = pack<T>(x, y);
    }
    return;
  }
  if (left > 0) to[0] = from_float<T>(x);
  if (left > 1) to[1] = from_float<T>(y);
}

// A Chunk is rows [lo, lo + n) of batch element b, with its number among all.
struct Chunk {
  int number, b, lo, n;

  __device__ __forceinline__ Chunk(const DeltaParams& p, int number, int b) : number(number), b(b) {
    int first = 0, end = p.count;
    while (end - first > 1) {
      int middle = (first + end) / 2;
      if (p.segments[middle].chunk <= number) {
        first = middle;
      } else {
        end = middle;
      }
    }
    of(p.segments[first]);
  }

  __device__ __forceinline__ Chunk(const Segment& s, int i, int b) : number(s.chunk + i), b(b) { of(s); }

  __device__ __forceinline__ void of(const Segment& s) {
    lo = s.lo + (number - s.chunk) * ROWS;
    n = min(ROWS, s.hi - lo);
  }

  // of_head returns the place of a head among all products.
  __device__ __forceinline__ long long of_head(const DeltaParams& p, int head) const {
    return ((long long)number * p.batch + b) * p.heads + head;
  }

  // element returns the address of an element of a row of the chunk.
  template <class T> __device__ __forceinline__ T* at(const Strided& s, int head, int row, int col) const {
    return head_of<T>(s, b, head) + (lo + row) * s.seq + col;
  }

  // load starts copies of WIDTH columns since col.
  template <int WIDTH>
  __device__ __forceinline__ void load(
      unsigned smem, const Strided& s, int head, int col, int dim, bool aligned) const {
    ::load<ROWS, WIDTH, THREADS>(smem, head_of<Stored>(s, b, head) + col, s.seq, lo, lo, lo + n, dim - col, aligned);
  }

  // load_dout does the same with dO, which may be float32.
  template <class T, int WIDTH>
  __device__ __forceinline__ void load_dout(unsigned smem, const DeltaParams& p, int head, int col) const {
    if (!(p.flags & WIDE_DOUT)) {
      load<WIDTH>(smem, p.dout, head, col, p.dim_v, p.flags & ALIGNED_DOUT);
      return;
    }
    for (int i = threadIdx.x; i < ROWS * WIDTH / 2; i += THREADS) {
      int row = i * 2 / WIDTH, c = i * 2 % WIDTH;
      const float* x = at<float>(p.dout, head, row, col + c);
      bool first = row < n && col + c < p.dim_v, second = row < n && col + c + 1 < p.dim_v;
      put_shared<T>(smem + Operand<ROWS, WIDTH>::offset(row, c), first ? x[0] : 0.0f, second ? x[1] : 0.0f);
    }
  }

  // put stores two neighbours of a row, unless they are at dim or beyond.
  template <class T>
  __device__ __forceinline__ void put(
      const Strided& s, bool wide, int head, int row, int col, int dim, float x, float y) const {
    if (row >= n) return;
    if (wide) {
      put_pair(at<float>(s, head, row, col), dim - col, x, y);
    } else {
      put_pair(at<T>(s, head, row, col), dim - col, x, y);
    }
  }
};

// scan sets x and y, of consecutive elements of the warp, to sums of all elements up to them.
__device__ __forceinline__ void scan(double& x, double& y) {
  const int lane = threadIdx.x % 32;
  double sum = x + y;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    double before = __shfl_up_sync(0xffffffffu, sum, i);
    if (lane >= i) sum += before;
  }
  double before = __shfl_up_sync(0xffffffffu, sum, 1);
  x += lane ? before : 0;
  y += x;
}

// decay returns D(i, j).
__device__ __forceinline__ float decay(const Factors& f, int i, int j) {
  return expf((float)(f.sum[i] - f.sum[j]));
}

using Square = float[ROWS][ROWS + 1];

// invert sets t to the inverse of 1 + a, of which only the elements below the diagonal count, and overwrites a: blocks
// of 16 by 16 on the diagonal by forward substitution, then rows of blocks by products with the blocks above.
__device__ __forceinline__ void invert(Square& t, Square& a) {
  const int thread = threadIdx.x, row = thread / 16, col = thread % 16;
  if (thread < ROWS) {
    const int r = row * 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      x[i] = i == col;
#pragma unroll
      for (int j = 0; j < i; j++) x[i] -= a[r + i][r + j] * x[j];
      t[r + i][r + col] = x[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; r += 16) {
    float y[ROWS / 16];
#pragma unroll
    for (int c = 0; c < r; c += 16) {
      y[c / 16] = 0;
#pragma unroll 16
      for (int l = c; l < r; l++) y[c / 16] += a[r + row][l] * t[l][c + col];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < r; c += 16) a[r + row][c + col] = y[c / 16];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < ROWS; c += 16) {
      float x = 0;
#pragma unroll
      for (int l = 0; c < r && l < 16; l++) x -= t[r + row][r + l] * a[r + l][c + col];
      if (c != r) t[r + row][c + col] = x;
    }
    __syncthreads();
  }
}
