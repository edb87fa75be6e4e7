// The arguments and the chunks of delta.cu, and products of its tiles.
#pragma once
#include "flash_products.cuh"
#include "hopper.cuh"
#include "ops.cuh"

constexpr int ROWS = 64, TILE = 128, THREADS = 256, HALF = THREADS / 2, SIZE = sizeof(Stored), SEGMENTS = 96;

struct Segment {
  int lo, hi, chunk, from; // its rows; the number of its first chunk; the place of its state in from, or -1
};

// Bits of DeltaParams.flags.
constexpr int ALIGNED_Q = 1, ALIGNED_K = 2, ALIGNED_V = 4, ALIGNED_DOUT = 8; // rows of aligned pieces of 16 bytes
constexpr int WIDE_DOUT = 16, WIDE_O = 32, WIDE_DQ = 64, WIDE_DK = 128, WIDE_DV = 256; // float32, whatever q is
constexpr int MAPS = 512;     // states are maps M | R
constexpr int KEEP = 1024;    // the chains keep what delta_grads needs
constexpr int PIECES_O = 2048, PIECES_DQ = 4096, PIECES_DK = 8192, PIECES_DV = 16384; // of the type of q, aligned

struct DeltaParams {
  Strided q, k, v, g, beta, dout, o, dq, dk, dv, dg, dbeta;
  Strided from, to; // states before the first chunk and after the last, seq for rows; none: 0, or the map I | 0
  // For each chunk, batch element and head, in the type of q: T, P, E, X, the states before chunks, and the
  // gradients of states after them; and Factors. T and P are operands; so are all SLICE columns of E and X, and of all
  // TILE rows of states.
  Stored *t, *p, *e, *x, *s, *ds;
  struct Factors* factors;
  int batch, heads, key_heads, dim, dim_v, wide_v, count, flags; // wide_v: columns of E, X and states
  float scale;
  int stages; // buffers of copies: of the chains 1 to 3, of delta_grads 1 or 2
  Segment segments[SEGMENTS];
};

// Factors belong to rows: beta, D(i, before), D(last, i), and the sums of g. The first three are 0 since the segment's
// end.
struct Factors {
  float beta[ROWS], into[ROWS], out[ROWS];
  float sum[ROWS], rest[ROWS]; // times log2 e: a rounded sum, and its error
};

// A Matrix is an operand of product in shared memory, as [outer][k] or, with TRANS, as [k][outer]: outer since at.
template <int H, int W, bool TRANSPOSED> struct Matrix {
  using Tile = Operand<H, W>;
  static constexpr bool TRANS = TRANSPOSED;
  static constexpr int LINES = H;
  unsigned smem;
  int at;
};

// block_sync waits for all threads of the block. Then products see their stores to shared memory and finished copies.
__device__ __forceinline__ void block_sync() {
#ifdef HOPPER
  shared_for_engine();
#endif
  __syncthreads();
}

// warp_product adds A B, over K, to c: 16 rows of A since a.at, and columns of B since b.at.
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

template <class T, int K, class C, class A, class B>
__device__ __forceinline__ void warp_product(C& c, const A& a, const B& b) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    float x[2], y[C::NT][2];
#pragma unroll
    for (int i = 0; i < 2; i++) x[i] = element(a, i * 8 + lane / 4, k);
#pragma unroll
    for (int j = 0; j < C::NT * 2; j++) y[j / 2][j % 2] = element(b, j / 2 * 8 + lane % 4 * 2 + j % 2, k);
#pragma unroll
    for (int n = 0; n < C::NT * 4; n++) c.x[0][n / 4][n % 4] += x[n % 4 / 2] * y[n / 4][n % 2];
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

template <class T, int K, class C, int H, int W, bool TRANS, int H2, int W2, bool TRANS2>
__device__ __forceinline__ void warp_product(C& c, const Matrix<H, W, TRANS>& a, const Matrix<H2, W2, TRANS2>& b) {
  multiply<T, K>(c, InShared<H, W, TRANS, 16>(a.smem, a.at), InShared<H2, W2, TRANS2, 16>(b.smem, b.at));
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

// product starts the same with all warps of a group. complete waits for all products of this thread except the last
// PENDING, which have added to c.
#ifdef HOPPER
// described returns the description of a matrix for wgmma, since a place that is a constant in a product's loop. Only
// its lower half depends on the address, so that the upper one is a constant.
template <class M> __device__ __forceinline__ unsigned long long described(const M& m, int outer, int k) {
  constexpr int LINE = M::Tile::PANEL * 2, PANEL = M::LINES * LINE;
  constexpr unsigned HALF_LINE = LINE == 64 ? 3u << 30 : 0; // matrix describes lines of 128 bytes
  const int row = M::TRANS ? k : outer, col = (M::TRANS ? outer : k) * 2;
  const unsigned place = (m.smem >> 4) + ((col / LINE * PANEL + row * LINE + col % LINE) >> 4);
  const unsigned long long rest = matrix(0, PANEL, LINE * 8);
  return (unsigned long long)((unsigned)(rest >> 32) ^ HALF_LINE) << 32 | ((unsigned)rest + place);
}

template <class T, int K, class C, class A, class B>
__device__ __forceinline__ void product(C& c, const A& a, const B& b) {
  wg_begin();
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    wg_multiply<T, A::TRANS, B::TRANS>(
        (float(&)[C::NT * 4])c.x, described(a, a.at / 64 * 64, k), described(b, b.at, k), true);
  }
  wg_commit();
}
template <int PENDING = 0, class... C> __device__ __forceinline__ void complete(C&... c) {
  wg_wait<PENDING>();
  (hold(c.x), ...);
}
#else
template <class T, int K, class C, class A, class B>
__device__ __forceinline__ void product(C& c, const A& a, const B& b) {
  warp_product<T, K>(c, a, b);
}

template <int PENDING = 0, class... C> __device__ __forceinline__ void complete(C&...) {}
#endif

// lane_row and lane_col are the place of a lane's first element in a sum.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_col() { return threadIdx.x % 4 * 2; }

// pairs calls f(row, column, x, y) for a lane's neighbours in a sum. They are constants, relative to the lane's first
// element. Columns are even: NVRTC 13.0 compiles Operand::offset of the next, odd column without its division by 8.
template <class C, class F> __device__ __forceinline__ void pairs(C& c, F f) {
#pragma unroll
  for (int n = 0; n < C::NT; n++) {
    f(0, n * 8, c.x[0][n][0], c.x[0][n][1]);
    f(8, n * 8, c.x[0][n][2], c.x[0][n][3]);
  }
}

template <class C> __device__ __forceinline__ void zero(C& c) {
  pairs(c, [](int, int, float& x, float& y) { x = y = 0; });
}

// A Spot has the addresses of a lane's elements in an operand, for a sum that begins at (row, col).
template <int H, int W> struct Spot {
  unsigned smem;
  int row, col;

  __device__ __forceinline__ Spot(unsigned at, int row, int col)
      : smem(at), row(row + lane_row()), col(col + lane_col()) {
    if (SIZE == 2) smem += Operand<H, W>::offset(this->row, this->col);
  }

  __device__ __forceinline__ unsigned operator()(int i, int j) const {
#ifdef FLOAT32
    return smem + Operand<H, W>::offset(row + i, col + j);
#else
    return InShared<H, W, false>::move(smem, i, j);
#endif
  }
};

// read returns the elements of an operand of H by W at the places of a sum that begins at (row, 0).
template <class T, int H, int W> __device__ __forceinline__ void read(float2 (&x)[W / 4], unsigned smem, int row) {
  const Spot<H, W> from(smem, row, 0);
#pragma unroll
  for (int n = 0; n < W / 4; n++) x[n] = get_shared<T>(from(n % 2 * 8, n / 2 * 8));
}

// scale_rows multiplies the rows of y, which begins at row, by factors.
template <class C, class F> __device__ __forceinline__ void scale_rows(C& y, int row, F factor) {
  const float by[] = {factor(row + lane_row()), factor(row + lane_row() + 8)};
  pairs(y, [&](int i, int, float& a, float& b) { a *= by[i / 8], b *= by[i / 8]; });
}

// hold stores a sum as an operand of H by W, from (row, column).
template <class T, int H, int W, class C> __device__ __forceinline__ void hold(unsigned smem, C& c, int row, int col) {
  const Spot<H, W> to(smem, row, col);
  pairs(c, [&](int i, int j, float x, float y) { put_shared<T>(to(i, j), x, y); });
}

// copy_tiles copies an operand of H by W to memory, where operands have SLICE columns and up to TILE rows: to the columns
// since col. step is the distance of the operands' rows. Half of the block's threads call it.
template <int H, int W>
__device__ __forceinline__ void copy_tiles(Stored* to, long long step, unsigned smem, int col) {
  constexpr int LINES = H < TILE ? H : TILE, ACROSS = W / Operand<H, W>::PIECE, N = H * ACROSS / HALF;
  constexpr int PASS = HALF / ACROSS;
  static_assert(PASS % 16 == 0, "the permutation of pieces repeats");
  const int i = threadIdx.x % HALF, row = i / ACROSS, c = i % ACROSS * Operand<H, W>::PIECE;
  const unsigned from = smem + Operand<H, W>::offset(row, c);
  char* at = (char*)(to + col / SLICE * (LINES * SLICE)) + Operand<LINES, SLICE>::offset(row, col % SLICE + c);
  float x[N][4];
#pragma unroll
  for (int j = 0; j < N; j++) load_shared(from + Operand<H, W>::offset(j * PASS, 0), x[j]);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const int r = j * PASS;
    *(float4*)(at + r / LINES * step * SIZE + Operand<LINES, SLICE>::offset(r % LINES, 0)) =
        make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
  }
}

// copy_out copies an operand of H by W to aligned memory, with these numbers of rows and columns, by COUNT threads.
template <int H, int W, int COUNT = HALF>
__device__ __forceinline__ void copy_out(Stored* to, long long stride, unsigned smem, int rows, int cols = W) {
  constexpr int PIECE = Operand<H, W>::PIECE, ACROSS = W / PIECE, N = H * ACROSS / COUNT;
  const int i = threadIdx.x % COUNT, row = i / ACROSS, col = i % ACROSS * PIECE;
  float x[N][4];
#pragma unroll
  for (int j = 0; j < N; j++) load_shared(smem + Operand<H, W>::offset(row + j * (COUNT / ACROSS), col), x[j]);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const int r = row + j * (COUNT / ACROSS);
    if (r < rows && col < cols) *(float4*)(to + r * stride + col) = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
  }
}

// copy_in starts copies of the bytes of an operand, by COUNT threads.
template <int BYTES, int COUNT> __device__ __forceinline__ void copy_in(unsigned to, const void* from) {
  const unsigned at = threadIdx.x % COUNT * 16;
#pragma unroll
  for (int i = 0; i < BYTES; i += COUNT * 16) {
    if (BYTES % (COUNT * 16) == 0 || at + i < BYTES) copy16(to + at + i, (const char*)from + at + i, true);
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
    if (p.flags & WIDE_DOUT) {
      load_wide<T, WIDTH, THREADS>(smem, p, head, col);
    } else {
      load<WIDTH>(smem, p.dout, head, col, p.dim_v, p.flags & ALIGNED_DOUT);
    }
  }
  template <class T, int WIDTH, int COUNT> // of threads
  __device__ __forceinline__ void load_wide(unsigned smem, const DeltaParams& p, int head, int col) const {
    for (int i = threadIdx.x % COUNT; i < ROWS * WIDTH / 2; i += COUNT) {
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
  return exp2_fast(f.sum[i] - f.sum[j] + (f.rest[i] - f.rest[j]));
}

constexpr int STRIDE = ROWS + 4, BLOCK = 32; // STRIDE: of a Square, whose rows begin with a piece of 16 bytes
using Square = float[ROWS][STRIDE];

// invert sets the blocks of t on and above the diagonal to the inverse of 1 + A. a has the elements of A below the
// diagonal, transposed. Two warps call it. A thread has a column of a block, and computes 16 rows at a time from the rows
// above.
__device__ __forceinline__ void invert(Square& t, const Square& a) {
  const int col = threadIdx.x, first = col / BLOCK * BLOCK;
  for (int i = 0; i < first; i++) t[i][col] = 0;
#pragma unroll 1
  for (int r = first; r < first + BLOCK; r += 16) {
    float x[16];
    auto subtract = [&](int j, int from, float by) { // by, in row j
#pragma unroll
      for (int i = from / 4 * 4; i < 16; i += 4) {
        float y[4];
        load_shared(smem_address(&a[j][r + i]), y);
#pragma unroll
        for (int l = 0; l < 4; l++) x[i + l] -= i + l < from ? 0 : y[l] * by;
      }
    };
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = r + i == col;
#pragma unroll 1
    for (int j = first; j < r; j++) subtract(j, 0, t[j][col]);
#pragma unroll
    for (int i = 0; i < 15; i++) subtract(r + i, i + 1, x[i]);
#pragma unroll
    for (int i = 0; i < 16; i++) t[r + i][col] = x[i];
  }
}

// multiply_below sets the block of t below the diagonal to -T22 A21 T11, and overwrites a. All threads call it, and wait
// at its end.
__device__ __forceinline__ void multiply_below(Square& t, Square& a) {
  const int row = threadIdx.x / 8, col = threadIdx.x % 8 * 4;
  for (int turn = 0; turn < 2; turn++) {
    float x[4] = {};
#pragma unroll 4
    for (int l = 0; l < BLOCK; l++) {
      // A21 T11, into the transpose of A21; then T22 times that.
      const float by = turn ? t[BLOCK + row][BLOCK + l] : a[l][BLOCK + row];
      float y[4];
      load_shared(smem_address(turn ? &a[BLOCK + l][col] : &t[l][col]), y);
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] += by * y[i];
    }
    float4* to = (float4*)(turn ? &t[BLOCK + row][col] : &a[BLOCK + row][col]);
    *to = turn ? make_float4(-x[0], -x[1], -x[2], -x[3]) : make_float4(x[0], x[1], x[2], x[3]);
    __syncthreads();
  }
}
