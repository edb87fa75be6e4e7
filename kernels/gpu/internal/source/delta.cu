// The gated delta rule; see attention/delta and, for the algebra of a chunk of 64 rows, kernels/cpu/delta.go:
//
//	A = beta_i k_i.k_j D(i, j) for j < i;   T = inverse of 1 + A;   P = scale q_i.k_j D(i, j) for j <= i
//	E = T (beta_i (v_i - D(i, before) S' k_i));   o = scale D(i, before) q S + P E
//	S' = D(last, before) S + (D(last, i) k_i)' E
//
// delta_prepare computes P and T of all chunks at once, delta_forward and delta_reverse follow the states and their
// gradients through the chunks of a segment, with a block for 32 columns of a state, and delta_grads computes the
// gradients of all chunks at once. The gradient of T's right factor is X = T' dE, and that of A is -X E'.
//
// 16-bit floats are multiplied on tensor cores. Sums, states and decays are float32, sums of g float64.
//
// Compiled with SLICE, the columns of v that delta_grads takes at once, and, for float32, FLOAT32.
#include "flash_products.cuh"
#include "ops.cuh"

constexpr int ROWS = 64, COLS = 32, TILE = 128, THREADS = 256, SIZE = sizeof(Stored), SEGMENTS = 96;

struct Segment {
  int lo, hi, chunk; // its rows; the number of its first chunk
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
  Strided from, to; // states before the first chunk and after the last, seq for rows; NULL from: the map I | 0
  // For each chunk, batch element and head, in the type of q: T, P, E, X, the states before chunks, and the
  // gradients of states after them; and Factors.
  Stored *t, *p, *e, *x, *s, *ds;
  struct Factors* factors;
  int batch, heads, key_heads, dim, dim_v, wide_v, count, flags; // wide_v: columns of E, X and states
  float scale;
  int stages; // buffers of copies: of the chains 1 to 3, of delta_grads 1 or 2
  Segment segments[SEGMENTS];
};

// Factors are those of rows: beta, D(i, before), D(last, i), and the sums of g. They are 0 since the segment's end.
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

// product adds A B, over K, to c, whose operands are as those of multiply.
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

// copy_out copies an operand of H by W to aligned memory: so many rows and columns.
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

// put_pair stores two neighbours, of which left exist, as one word if it is aligned.
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

  // put stores two neighbours of a row, of which those since dim do not exist.
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

struct PrepareShared {
  Square a, t;
  Factors f;
};

template <class T> __device__ __forceinline__ void prepare(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int BYTES = ROWS * ROWS * SIZE;
  const unsigned q = smem_address(shared), k = q + BYTES;
  PrepareShared& m = *(PrepareShared*)(shared + 2 * BYTES);
  const Chunk c(p, blockIdx.x, blockIdx.z);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 16, col = warp % 2 * 32;
  Sum<16, 32> qk, kk;
  zero(qk), zero(kk);
  for (int d = 0; d < p.dim; d += ROWS) {
    c.load<ROWS>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    c.load<ROWS>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    InShared<ROWS, ROWS, false> keys(k, col);
    product<T, ROWS>(qk, InShared<ROWS, ROWS, false>(q, row), keys);
    product<T, ROWS>(kk, InShared<ROWS, ROWS, false>(k, row), keys);
    __syncthreads();
  }
  const int group = p.heads / p.key_heads;
  for (int head = blockIdx.y * group; head < int(blockIdx.y + 1) * group; head++) {
    const long long to = c.of_head(p, head);
    if (warp == 0) {
      double g[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        bool inside = lane * 2 + i < c.n;
        g[i] = inside ? *c.at<float>(p.g, head, lane * 2 + i, 0) : 0;
        m.f.beta[lane * 2 + i] = inside ? *c.at<float>(p.beta, head, lane * 2 + i, 0) : 0;
      }
      scan(g[0], g[1]);
      m.f.sum[lane * 2] = g[0], m.f.sum[lane * 2 + 1] = g[1];
      __syncwarp();
#pragma unroll
      for (int i = lane; i < ROWS; i += 32) {
        bool inside = i < c.n;
        m.f.into[i] = inside ? expf((float)m.f.sum[i]) : 0;
        m.f.out[i] = inside ? decay(m.f, c.n - 1, i) : 0;
      }
    }
    __syncthreads();
    const bool turned = p.flags & BACKWARD;
#pragma unroll
    for (int n = 0; n < Sum<16, 32>::NT * 4; n++) {
      int i = row + lane / 4 + n % 4 / 2 * 8, j = col + n / 4 * 8 + lane % 4 * 2 + n % 2;
      float d = j <= i && i < c.n ? decay(m.f, i, j) : 0;
      float x = j <= i && i < c.n ? p.scale * qk.x[0][n / 4][n % 4] * d : 0;
      float y = j < i && i < c.n ? kk.x[0][n / 4][n % 4] * d : 0;
      ((T*)p.p)[to * ROWS * ROWS + (turned ? j * ROWS + i : i * ROWS + j)] = from_float<T>(x);
      m.a[i][j] = m.f.beta[i] * y;
    }
    const float *from = (const float*)&m.f;
    for (int i = threadIdx.x; i < int(sizeof(Factors) / 4); i += THREADS) ((float*)(p.factors + to))[i] = from[i];
    __syncthreads();
    invert(m.t, m.a);
    for (int i = threadIdx.x * 2; i < ROWS * ROWS; i += THREADS * 2) {
      put_pair((T*)p.t + to * ROWS * ROWS + i, 2, m.t[i / ROWS][i % ROWS], m.t[i / ROWS][i % ROWS + 1]);
    }
  }
}

// Chain has the shared memory of delta_forward and delta_reverse, for a dim up to DIM.
template <int DIM> struct Chain {
  static constexpr int KEYS = ROWS * DIM * SIZE, PAIRS = ROWS * ROWS * SIZE, VALUES = ROWS * COLS * SIZE;
  static constexpr int K = 0, Q = KEYS, T = 2 * KEYS, P = T + PAIRS, V = P + PAIRS, F = V + VALUES;
  static constexpr int STATE = DIM * COLS * SIZE, STATES = SIZE == 2 ? 2 : 1; // of a chunk and the next
  static constexpr int S = 0, E = STATES * STATE, STAGE = E + (SIZE == 2 ? 4 : 3) * VALUES, STAGE_BYTES = F + 2048;
  static_assert(sizeof(Factors) <= 2048, "room for the factors");
};

// A Feed copies 64 rows of WIDTH aligned columns, of one chunk after another. It keeps addresses, since a chain has few
// threads to compute them.
template <int WIDTH> struct Feed {
  using To = Operand<ROWS, WIDTH>;
  static constexpr int PIECES = WIDTH / To::PIECE, PASS = THREADS / PIECES;
  const Stored* at;
  long long pass, step; // to this thread's next row, and to the next chunk
  int row, col;
  bool inside;

  __device__ __forceinline__ void set(const Stored* from, long long stride, long long step, int cols) {
    row = threadIdx.x / PIECES, col = threadIdx.x % PIECES * To::PIECE;
    at = from + row * stride + col, pass = PASS * stride, this->step = step, inside = col < cols;
  }

  // copy starts copies of the first n rows, and of zeros for the others, and moves on.
  __device__ __forceinline__ void copy(unsigned to, int n) {
    const unsigned first = to + To::offset(row, col);
#pragma unroll
    for (int i = 0; i < ROWS / PASS; i++) {
      // In 16 bits, the permutation of pieces repeats after 8 rows.
      const unsigned place = SIZE == 2 ? first + To::offset(i * PASS, 0) : to + To::offset(row + i * PASS, col);
      copy16(place, at + i * pass, inside && row + i * PASS < n);
    }
    at += step;
  }
};

// A Part is what a block of a chain has: columns of one head's state, for a segment and batch element. Each warp has
// rows of the state.
template <class T, int DIM> struct Part {
  using In = Chain<DIM>;
  static constexpr int HEIGHT = DIM / 8;
  const DeltaParams& p;
  const Segment& segment;
  int b, head, key_head, chunks, index; // index: of the state
  int col, width, at;                   // columns since col of M or R, and the first one's number in a state
  bool front;                           // columns of M
  int state_row, row, from_col;         // this warp's part of a state, and of 64 by 32
  const char* shared;
  unsigned base;
  Feed<DIM> k, q;
  Feed<ROWS> t, pairs_of;
  Feed<COLS> v; // or dO
  const char* factors;
  Sum<HEIGHT, COLS> s;

  __device__ __forceinline__ Part(const DeltaParams& p, const char* shared)
      : p(p), segment(p.segments[blockIdx.z / p.batch]), b(blockIdx.z % p.batch), head(blockIdx.y),
        key_head(head / (p.heads / p.key_heads)), chunks((segment.hi - segment.lo + ROWS - 1) / ROWS),
        index(blockIdx.z), shared(shared), base(smem_address(shared)) {
    const int warp = threadIdx.x / 32, fronts = p.flags & MAPS ? (p.dim + COLS - 1) / COLS : 0;
    front = int(blockIdx.x) < fronts;
    col = (front ? blockIdx.x : blockIdx.x - fronts) * COLS;
    width = (front ? p.dim : p.dim_v) - col;
    at = col + (front || !(p.flags & MAPS) ? 0 : p.dim);
    state_row = warp * HEIGHT, row = warp / 2 * 16, from_col = warp % 2 * 16;
    pairs(s, state_row, 0, [&](int i, int j, float& x, float& y) { x = first(i, j), y = first(i, j + 1); });
    hold<T, DIM, COLS>(state_at(0), s, state_row, 0);
  }

  __device__ __forceinline__ float* state(const Strided& s, int i, int j) const {
    return (float*)s.at + index * s.batch + head * s.head + i * s.seq + at + j;
  }

  // first returns an element of the state before the first chunk.
  __device__ __forceinline__ float first(int i, int j) const {
    if (i >= p.dim || j >= width) return 0;
    return p.from.at ? *state(p.from, i, j) : front && i == col + j;
  }

  __device__ __forceinline__ void finish() {
    if (!p.to.at) return;
    pairs(s, state_row, 0, [&](int i, int j, float x, float y) {
      if (i >= p.dim) return;
      if (j < width) *state(p.to, i, j) = x;
      if (j + 1 < width) *state(p.to, i, j + 1) = y;
    });
  }

  __device__ __forceinline__ unsigned stage(int i) const { return base + In::STAGE + i % p.stages * In::STAGE_BYTES; }

  // fetch starts copies of the i-th chunk of the chain, and of its columns of v or dO. M has zeros for them.
  template <bool REVERSE> __device__ __forceinline__ void fetch(int i) {
    if (i < chunks) {
      const Chunk c(segment, REVERSE ? chunks - 1 - i : i, b);
      const unsigned to = stage(i);
      const Strided& values = REVERSE ? p.dout : p.v;
      const bool wide = REVERSE && p.flags & WIDE_DOUT;
      if (p.flags & ALIGNED_K) {
        k.copy(to + In::K, c.n);
      } else {
        c.load<DIM>(to + In::K, p.k, key_head, 0, p.dim, false);
      }
      t.copy(to + In::T, ROWS);
      if (REVERSE || p.o.at) {
        if (p.flags & ALIGNED_Q) {
          q.copy(to + In::Q, c.n);
        } else {
          c.load<DIM>(to + In::Q, p.q, key_head, 0, p.dim, false);
        }
        pairs_of.copy(to + In::P, ROWS);
      }
      if (front || (!wide && p.flags & (REVERSE ? ALIGNED_DOUT : ALIGNED_V))) {
        v.copy(to + In::V, c.n);
      } else if (wide) {
        c.load_dout<T, COLS>(to + In::V, p, head, col);
      } else {
        c.load<COLS>(to + In::V, values, head, col, p.dim_v, false);
      }
      if (threadIdx.x < sizeof(Factors) / 16) copy16(to + In::F + threadIdx.x * 16, factors + threadIdx.x * 16, true);
      factors += (REVERSE ? -1 : 1) * (long long)sizeof(Factors) * p.batch * p.heads;
    }
    copies_commit();
  }

  // begin starts the first copies.
  template <bool REVERSE> __device__ __forceinline__ void begin() {
    const Chunk c(segment, REVERSE ? chunks - 1 : 0, b);
    const long long from = c.of_head(p, head), next = REVERSE ? -1 : 1, square = next * p.batch * p.heads * ROWS * ROWS;
    const Strided& values = REVERSE ? p.dout : p.v;
    k.set(c.at<Stored>(p.k, key_head, 0, 0), p.k.seq, next * ROWS * p.k.seq, p.dim);
    q.set(c.at<Stored>(p.q, key_head, 0, 0), p.q.seq, next * ROWS * p.q.seq, p.dim);
    t.set(p.t + from * ROWS * ROWS, ROWS, square, ROWS);
    pairs_of.set(p.p + from * ROWS * ROWS, ROWS, square, ROWS);
    v.set(front ? p.t : c.at<Stored>(values, head, 0, col), values.seq, front ? 0 : next * ROWS * values.seq,
        front ? 0 : p.dim_v - col);
    factors = (const char*)(p.factors + from);
    for (int i = 0; i < p.stages - 1; i++) fetch<REVERSE>(i);
  }

  // await waits for the i-th chunk of the chain, and for all warps. Then it starts the copies of a later one.
  template <bool REVERSE> __device__ __forceinline__ const Factors& await(int i) {
    if (p.stages == 1) {
      __syncthreads();
      fetch<REVERSE>(i);
    }
    if (p.stages < 3) {
      copies_wait<0>();
    } else {
      copies_wait<1>();
    }
    __syncthreads();
    if (p.stages > 1) fetch<REVERSE>(i + p.stages - 1);
    return *(const Factors*)(shared + (stage(i) - base) + In::F);
  }

  // state_at returns the address of the state before the i-th chunk, and keep_state stores the one after it.
  __device__ __forceinline__ unsigned state_at(int i) const { return base + In::S + i % In::STATES * In::STATE; }
  __device__ __forceinline__ void keep_state(int i) {
    if (In::STATES == 1) __syncthreads();
    hold<T, DIM, COLS>(state_at(i + 1), s, state_row, 0);
  }

  // add adds the product of K' or Q' and an operand to the state.
  __device__ __forceinline__ void add(unsigned keys, unsigned values) {
    product<T, ROWS>(s, InShared<ROWS, DIM, true, HEIGHT>(keys, state_row),
        InShared<ROWS, COLS, true, COLS>(values, 0));
  }

  __device__ __forceinline__ void scale(float by) {
    pairs(s, 0, 0, [=](int, int, float& x, float& y) { x *= by, y *= by; });
  }
};

// delta_forward sets o, the states after segments, or what delta_grads needs of the chain.
template <class T, int DIM> __device__ __forceinline__ void forward(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  using In = Chain<DIM>;
  Part<T, DIM> x(p, shared);
  const unsigned right = x.base + In::E, e = right + In::VALUES, scaled = e + In::VALUES, o = scaled + In::VALUES;
  const bool together = SIZE == 2 && p.flags & PIECES_O; // o goes through shared memory, a step later
  auto put_o = [&](int i) {
    const Chunk c(x.segment, i, x.b);
    copy_out<T, ROWS, COLS>(c.at<Stored>(p.o, x.head, 0, x.col), p.o.seq, o, c.n, x.width);
  };
  x.template begin<false>();
  for (int i = 0; i < x.chunks; i++) {
    const Factors& f = x.template await<false>(i);
    if (together && i > 0) put_o(i - 1);
    const Chunk c(x.segment, i, x.b);
    const unsigned in = x.stage(i), s = x.state_at(i);
    Sum<16, 16> y;
    zero(y);
    product<T, DIM>(y, InShared<ROWS, DIM, false>(in + In::K, x.row), InShared<DIM, COLS, true, 16>(s, x.from_col));
    pairs(y, x.row, x.from_col, [&](int i, int j, float a, float b) {
      unsigned at = Operand<ROWS, COLS>::offset(i, j);
      float2 v = get_shared<T>(in + In::V + at);
      put_shared<T>(right + at, f.beta[i] * (v.x - f.into[i] * a), f.beta[i] * (v.y - f.into[i] * b));
    });
    __syncthreads();
    zero(y);
    product<T, ROWS>(y, InShared<ROWS, ROWS, false>(in + In::T, x.row),
        InShared<ROWS, COLS, true, 16>(right, x.from_col));
    hold<T, ROWS, COLS>(e, y, x.row, x.from_col);
    pairs(y, x.row, x.from_col, [&](int i, int, float& a, float& b) { a *= f.out[i], b *= f.out[i]; });
    hold<T, ROWS, COLS>(scaled, y, x.row, x.from_col);
    __syncthreads();
    if (p.flags & KEEP) {
      const long long to = c.of_head(p, x.head);
      copy_out<T, DIM, COLS>(p.s + to * p.dim * p.wide_v + x.col, p.wide_v, s, p.dim);
      copy_out<T, ROWS, COLS>(p.e + to * ROWS * p.wide_v + x.col, p.wide_v, e, ROWS);
    }
    if (p.o.at) {
      zero(y);
      product<T, DIM>(y, InShared<ROWS, DIM, false>(in + In::Q, x.row), InShared<DIM, COLS, true, 16>(s, x.from_col));
      pairs(y, x.row, 0, [&](int i, int, float& a, float& b) {
        a *= p.scale * f.into[i], b *= p.scale * f.into[i];
      });
      product<T, ROWS>(y, InShared<ROWS, ROWS, false>(in + In::P, x.row),
          InShared<ROWS, COLS, true, 16>(e, x.from_col));
      if (together) hold<T, ROWS, COLS>(o, y, x.row, x.from_col);
      pairs(y, x.row, x.from_col, [&](int i, int j, float a, float b) {
        if (!together) c.put<T>(p.o, p.flags & WIDE_O, x.head, i, x.col + j, p.dim_v, a, b);
      });
    }
    x.scale(f.into[c.n - 1]);
    x.add(in + In::K, scaled);
    x.keep_state(i);
  }
  if (together) {
    __syncthreads();
    put_o(x.chunks - 1);
  }
  x.finish();
}

// delta_reverse goes through the chunks in reverse, with gradients of states:
//
//	dE = D(last, i) k_i dS' + P' do;   X = T' dE
//	dS = D(last, before) dS' + (scale D(i, before) q_i)' do - (beta_i D(i, before) k_i)' X
template <class T, int DIM> __device__ __forceinline__ void reverse(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  using In = Chain<DIM>;
  Part<T, DIM> x(p, shared);
  const unsigned e = x.base + In::E, dout = e + In::VALUES, scaled = dout + In::VALUES;
  x.template begin<true>();
  for (int i = 0; i < x.chunks; i++) {
    const Factors& f = x.template await<true>(i);
    const Chunk c(x.segment, x.chunks - 1 - i, x.b);
    const unsigned in = x.stage(i), s = x.state_at(i), keep = in + In::V; // X replaces dO
    Sum<16, 16> y;
    zero(y);
    product<T, DIM>(y, InShared<ROWS, DIM, false>(in + In::K, x.row), InShared<DIM, COLS, true, 16>(s, x.from_col));
    pairs(y, x.row, 0, [&](int i, int, float& a, float& b) { a *= f.out[i], b *= f.out[i]; });
    product<T, ROWS>(y, InShared<ROWS, ROWS, false>(in + In::P, x.row),
        InShared<ROWS, COLS, true, 16>(in + In::V, x.from_col));
    pairs(y, x.row, x.from_col, [&](int i, int j, float a, float b) {
      unsigned at = Operand<ROWS, COLS>::offset(i, j);
      float2 v = get_shared<T>(in + In::V + at);
      put_shared<T>(e + at, a, b);
      put_shared<T>(dout + at, p.scale * f.into[i] * v.x, p.scale * f.into[i] * v.y);
    });
    __syncthreads();
    const long long to = c.of_head(p, x.head);
    if (p.flags & KEEP) copy_out<T, DIM, COLS>(p.ds + to * p.dim * p.wide_v + x.col, p.wide_v, s, p.dim);
    zero(y);
    product<T, ROWS>(y, InShared<ROWS, ROWS, true, 16>(in + In::T, x.row),
        InShared<ROWS, COLS, true, 16>(e, x.from_col));
    if (p.flags & KEEP) hold<T, ROWS, COLS>(keep, y, x.row, x.from_col);
    pairs(y, x.row, 0, [&](int i, int, float& a, float& b) {
      float by = -f.beta[i] * f.into[i];
      a *= by, b *= by;
    });
    hold<T, ROWS, COLS>(scaled, y, x.row, x.from_col);
    x.scale(f.into[c.n - 1]);
    x.add(in + In::Q, dout);
    __syncthreads();
    if (p.flags & KEEP) copy_out<T, ROWS, COLS>(p.x + to * ROWS * p.wide_v + x.col, p.wide_v, keep, ROWS);
    x.add(in + In::K, scaled);
    x.keep_state(i);
  }
  x.finish();
}

// Grads has the shared memory of delta_grads: tiles of k and q, sums, gradients of P and A, and stages of dO, E, X, S
// and dS'. With one stage, the gradients replace its first operands.
struct Grads {
  static constexpr int KEYS = ROWS * TILE * SIZE, VALUES = ROWS * SLICE * SIZE, STATES = TILE * SLICE * SIZE;
  static constexpr int PAIRS = ROWS * ROWS * SIZE;
  static constexpr int K = 0, Q = KEYS, MORE = 2 * KEYS, STAGE = MORE + 7168;
  static constexpr int STAGE_BYTES = 3 * VALUES + 2 * STATES;
};

struct GradSums {
  Factors f[2];                                       // of a head and the next
  float dots[3][4][ROWS], diagonal[ROWS], whole[8]; // of warps and rows; X E of rows; of warps
};
static_assert(sizeof(GradSums) <= Grads::STAGE - Grads::MORE, "room for the sums");

// dot returns the product of two rows of n elements, to all lanes.
template <class A, class B> __device__ __forceinline__ float dot(const A* x, const B* y, int n) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32) sum += to_float(x[i]) * to_float(y[i]);
  return warp_sum(sum);
}

// dot_shared adds the product of two operands in shared memory, of so many elements.
template <class T, int N> __device__ __forceinline__ void dot_shared(float& sum, unsigned x, unsigned y) {
  for (int i = threadIdx.x * 16; i < N * SIZE; i += THREADS * 16) {
    float a[4], b[4];
    load_shared(x + i, a), load_shared(y + i, b);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (SIZE == 4) {
        sum += a[j] * b[j];
      } else {
        float a0, a1, b0, b1;
        unpack<T>(__float_as_uint(a[j]), a0, a1), unpack<T>(__float_as_uint(b[j]), b0, b1);
        sum += a0 * b0 + a1 * b1;
      }
    }
  }
}

// GradsOf is the work of a block of delta_grads: the gradients of the rows of a chunk, for columns of q and k since d.
// The gradient of the sum of g up to a row is q dq + k dk, except that k has the other sign where the decay begins at
// its row: in (D(last, i) k_i)' E, P, and the second k of A.
template <class T> struct GradsOf {
  const DeltaParams& p;
  const Chunk c;
  const int d, slices, end; // end: the heads of this key head end there
  const unsigned base;
  GradSums& m;

  // A beta above SMALL has the gradient X E / beta, unless E has too few bits.
  static constexpr float SMALL = 1.0f / (1 << 30);

  // fetch starts copies of the i-th slice of a head's columns of v.
  __device__ __forceinline__ void fetch(int head, int i, unsigned to) const {
    if (head < end) {
      const long long from = c.of_head(p, head), values = from * ROWS * p.wide_v, states = from * p.dim * p.wide_v;
      const int v = i * SLICE, left = p.wide_v - v;
      c.load_dout<T, SLICE>(to, p, head, v);
      load<ROWS, SLICE, THREADS>(to + Grads::VALUES, p.e + values + v, p.wide_v, 0, 0, ROWS, left, true);
      load<ROWS, SLICE, THREADS>(to + 2 * Grads::VALUES, p.x + values + v, p.wide_v, 0, 0, ROWS, left, true);
      to += 3 * Grads::VALUES;
      load<TILE, SLICE, THREADS>(to, p.s + states + v, p.wide_v, d, 0, p.dim, left, true);
      load<TILE, SLICE, THREADS>(to + Grads::STATES, p.ds + states + v, p.wide_v, d, 0, p.dim, left, true);
      if (i == 0 && threadIdx.x < sizeof(Factors) / 16) {
        const unsigned at = threadIdx.x * 16;
        copy16(smem_address(&m.f[head % 2]) + at, (const char*)(p.factors + from) + at, true);
      }
    }
    copies_commit();
  }

  // await waits for a slice and starts the copies of the next.
  __device__ __forceinline__ unsigned await(int head, int i, int& stage) const {
    if (p.stages == 1) {
      __syncthreads();
      fetch(head, i, base + Grads::STAGE);
    }
    copies_wait<0>();
    __syncthreads();
    unsigned now = base + Grads::STAGE + stage * Grads::STAGE_BYTES;
    if (p.stages > 1) {
      stage ^= 1;
      bool last = i == slices - 1;
      fetch(last ? head + 1 : head, last ? 0 : i + 1, base + Grads::STAGE + stage * Grads::STAGE_BYTES);
    }
    return now;
  }

  // fold multiplies the rows of y by factors.
  template <class F> __device__ __forceinline__ void fold(Sum<32, 32>& y, int row, F factor) const {
    pairs(y, row, 0, [&](int i, int, float& a, float& b) { a *= factor(i), b *= factor(i); });
  }

  // collect adds y to the gradient to, and sets dots to the products of its rows and those of q or k.
  __device__ __forceinline__ void collect(
      Sum<32, 32>& to, Sum<32, 32>& y, unsigned with, int row, int col, float* dots) const {
#pragma unroll
    for (int i = 0; i < 32; i++) to.x[i / 16][i / 4 % 4][i % 4] += y.x[i / 16][i / 4 % 4][i % 4];
    pairs(y, row, col, [&](int i, int j, float& a, float& b) {
      float2 z = get_shared<T>(with + Operand<ROWS, TILE>::offset(i, j));
      a *= z.x, b *= z.y;
    });
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = 0;
#pragma unroll
      for (int n = 0; n < 4; n++) x += y.x[i / 2][n][i % 2 * 2] + y.x[i / 2][n][i % 2 * 2 + 1];
      x = group_sum(x, 4);
      if (threadIdx.x % 4 == 0) dots[row + i * 8 + threadIdx.x % 32 / 4] = x;
    }
  }

  // small_beta returns the gradient of the beta of row i by its definition: X (v - D(i, before) S' k - A E / beta).
  __device__ __forceinline__ float small_beta(const Factors& f, int head, int i) const {
    const long long from = c.of_head(p, head);
    const T *x = (const T*)p.x + (from * ROWS + i) * p.wide_v, *e = (const T*)p.e + from * ROWS * p.wide_v;
    const T *s = (const T*)p.s + from * p.dim * p.wide_v, *k = c.at<T>(p.k, blockIdx.y, i, 0);
    float sum = dot(x, c.at<T>(p.v, head, i, 0), p.dim_v);
    for (int r = 0; r < p.dim; r++) sum -= f.into[i] * to_float(k[r]) * dot(x, s + (long long)r * p.wide_v, p.dim_v);
    for (int j = 0; j < i; j++) {
      sum -= decay(f, i, j) * dot(k, c.at<T>(p.k, blockIdx.y, j, 0), p.dim) * dot(x, e + j * p.wide_v, p.dim_v);
    }
    return sum;
  }

  // finish sets the gradients of g, from the sums: those of two rows a lane, from the last.
  __device__ __forceinline__ void finish(const Factors& f, int head) const {
    const int lane = threadIdx.x % 32;
    double dg[2];
#pragma unroll
    for (int l = 0; l < 2; l++) {
      const int i = ROWS - 1 - lane * 2 - l;
      auto of = [=](const float (&x)[4][ROWS]) { return x[0][i] + x[1][i] + x[2][i] + x[3][i]; };
      dg[l] = i < c.n ? (double)of(m.dots[0]) - of(m.dots[1]) + of(m.dots[2]) : 0;
    }
    scan(dg[0], dg[1]);
    const float all = warp_sum(lane < 8 ? m.whole[lane] : 0.0f);
#pragma unroll
    for (int l = 0; l < 2; l++) {
      const int i = ROWS - 1 - lane * 2 - l;
      if (i >= c.n) continue;
      float* to = c.at<float>(p.dg, head, i, 0);
      *to = (float)(dg[l] + all) + (d ? *to : 0);
      if (d == 0 && f.beta[i] > SMALL) *c.at<float>(p.dbeta, head, i, 0) = m.diagonal[i] / f.beta[i];
    }
  }

  __device__ __forceinline__ void run() {
    const unsigned k = base + Grads::K, q = base + Grads::Q;
    const unsigned dp_at = base + Grads::STAGE + (p.stages == 1 ? 0 : 2 * Grads::STAGE_BYTES);
    const unsigned da_at = dp_at + Grads::PAIRS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 4 * 32, col = warp % 4 * 32, pair_row = warp / 2 * 16, pair_col = warp % 2 * 32;
    c.load<TILE>(k, p.k, blockIdx.y, d, p.dim, p.flags & ALIGNED_K);
    c.load<TILE>(q, p.q, blockIdx.y, d, p.dim, p.flags & ALIGNED_Q);
    Sum<32, 32> dq, dk;
    zero(dq), zero(dk);
    int stage = 0, head = end - p.heads / p.key_heads;
    if (p.stages > 1) fetch(head, 0, base + Grads::STAGE);
    for (; head < end; head++) {
      const Factors& f = m.f[head % 2];
      Sum<32, 32> by_q, by_k, by_beta; // dO S', E dS'' and X S'
      Sum<16, 32> dp, da;              // E dO' and E X': the gradients of P and A, transposed
      zero(by_q), zero(by_k), zero(by_beta), zero(dp), zero(da);
      float whole = 0; // of S and dS'
#pragma unroll 1
      for (int i = 0; i < slices; i++) {
        const unsigned dout = await(head, i, stage), e = dout + Grads::VALUES, x = e + Grads::VALUES,
                       s = x + Grads::VALUES, ds = s + Grads::STATES;
        using Rows = InShared<ROWS, SLICE, false>;
        using States = InShared<TILE, SLICE, false>;
        product<T, SLICE>(dp, Rows(e, pair_row), Rows(dout, pair_col));
        product<T, SLICE>(da, Rows(e, pair_row), Rows(x, pair_col));
        product<T, SLICE>(by_q, Rows(dout, row), States(s, col));
        product<T, SLICE>(by_k, Rows(e, row), States(ds, col));
        product<T, SLICE>(by_beta, Rows(x, row), States(s, col));
        dot_shared<T, TILE * SLICE>(whole, s, ds);
        for (int j = threadIdx.x; d == 0 && j < ROWS * SLICE / 2; j += THREADS) {
          const int r = j / (SLICE / 2), v = j % (SLICE / 2) * 2;
          float2 y = get_shared<T>(x + Operand<ROWS, SLICE>::offset(r, v));
          c.put<T>(p.dv, p.flags & WIDE_DV, head, r, i * SLICE + v, p.dim_v, f.beta[r] * y.x, f.beta[r] * y.y);
        }
      }
      if (p.stages == 1) __syncthreads();
      // The gradients of the products of rows in P and A.
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int j = pair_row + n % 2 * 8 + lane / 4, i = pair_col + n / 2 * 8 + lane % 4 * 2;
        float a[2], b[2];
#pragma unroll
        for (int l = 0; l < 2; l++) {
          const float x = dp.x[0][n / 2][n % 2 * 2 + l], y = da.x[0][n / 2][n % 2 * 2 + l];
          const bool inside = j <= i + l && i + l < c.n;
          const float by = inside ? decay(f, i + l, j) : 0;
          a[l] = inside ? p.scale * x * by : 0;
          b[l] = inside && j < i + l ? -f.beta[i + l] * y * by : 0;
          if (j == i + l) m.diagonal[j] = y;
        }
        const unsigned at = Operand<ROWS, ROWS>::offset(j, i);
        put_shared<T>(dp_at + at, a[0], a[1]);
        put_shared<T>(da_at + at, b[0], b[1]);
      }
      // Those by way of scale D(i, before) q S, (D(last, i) k_i)' E and beta_i D(i, before) k_i S.
      fold(by_q, row, [&](int i) { return p.scale * f.into[i]; });
      fold(by_beta, row, [&](int i) { return -f.beta[i] * f.into[i]; });
      fold(by_k, row, [&](int i) { return f.out[i]; });
      whole *= f.into[c.n - 1];
      pairs(by_k, row, col, [&](int i, int j, float x, float y) {
        float2 z = get_shared<T>(k + Operand<ROWS, TILE>::offset(i, j));
        whole += i < c.n ? x * z.x + y * z.y : 0;
      });
      whole = warp_sum(whole);
      if (lane == 0) m.whole[warp] = whole;
      __syncthreads();
      InShared<ROWS, TILE, true, 32> keys(k, col);
      product<T, ROWS>(by_q, InShared<ROWS, ROWS, true, 32>(dp_at, row), keys);
      product<T, ROWS>(by_beta, InShared<ROWS, ROWS, true, 32>(da_at, row), keys);
      product<T, ROWS>(by_k, InShared<ROWS, ROWS, false>(dp_at, row), InShared<ROWS, TILE, true, 32>(q, col));
      product<T, ROWS>(by_k, InShared<ROWS, ROWS, false>(da_at, row), keys);
      collect(dq, by_q, q, row, col, m.dots[0][warp % 4]);
      collect(dk, by_k, k, row, col, m.dots[1][warp % 4]);
      collect(dk, by_beta, k, row, col, m.dots[2][warp % 4]);
      __syncthreads();
      if (warp == 0) finish(f, head);
      for (int i = warp; d == 0 && i < c.n; i += 8) {
        if (f.beta[i] > SMALL) continue;
        float x = small_beta(f, head, i);
        if (lane == 0) *c.at<float>(p.dbeta, head, i, 0) = x;
      }
    }
    pairs(dq, row, d + col, [&](int i, int j, float x, float y) {
      c.put<T>(p.dq, p.flags & WIDE_DQ, blockIdx.y, i, j, p.dim, x, y);
    });
    pairs(dk, row, d + col, [&](int i, int j, float x, float y) {
      c.put<T>(p.dk, p.flags & WIDE_DK, blockIdx.y, i, j, p.dim, x, y);
    });
  }
};

template <class T> __device__ __forceinline__ void grads(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const int slices = (p.wide_v + SLICE - 1) / SLICE, end = (blockIdx.y + 1) * (p.heads / p.key_heads);
#pragma unroll 1
  for (int d = 0; d < p.dim; d += TILE) {
    __syncthreads();
    GradsOf<T>{p, Chunk(p, blockIdx.x, blockIdx.z), d, slices, end, smem_address(shared),
        *(GradSums*)(shared + Grads::MORE)}.run();
  }
}

// DeltaMaps are the arguments of delta_compose: batch for maps, head for heads, seq for rows. columns are those of
// earlier, a map or a state.
struct DeltaMaps {
  Strided to, later, earlier;
  int dim, columns, begin, unused; // begin: the first column of later's summand
};

// compose sets to to M2 M1 | M2 R1 + R2, or M2 S + R2. A block has 16 rows, of all columns; if to is earlier, 16
// columns, of all rows. It reads its part of the operand that it overwrites before.
constexpr int PANEL = 16;
template <class T> __device__ __forceinline__ void compose(const DeltaMaps& p) {
  extern __shared__ __align__(1024) char shared[];
  float* panel = (float*)shared; // [dim][PANEL]
  const float *later = head_of<float>(p.later, blockIdx.z, blockIdx.y);
  const float *earlier = head_of<float>(p.earlier, blockIdx.z, blockIdx.y);
  float* to = head_of<float>(p.to, blockIdx.z, blockIdx.y);
  const bool down = to == earlier;
  const int from = blockIdx.x * PANEL, most = down ? p.columns : p.dim, length = down ? p.dim : p.columns;
  for (int i = threadIdx.x; i < PANEL * p.dim; i += THREADS) {
    int j = down ? from + i % PANEL : from + i / p.dim, k = down ? i / PANEL : i % p.dim;
    panel[k * PANEL + j - from] = j >= most ? 0 : down ? earlier[k * p.earlier.seq + j] : later[j * p.later.seq + k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < length; i += THREADS) {
    float sum[PANEL];
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
      int row = down ? i : from + j, col = down ? from + j : i;
      bool more = from + j < most && col >= p.begin;
      sum[j] = more ? later[row * p.later.seq + p.dim + col - p.begin] : 0;
    }
    for (int k = 0; k < p.dim; k++) {
      float x = down ? later[i * p.later.seq + k] : earlier[k * p.earlier.seq + i];
#pragma unroll
      for (int j = 0; j < PANEL; j++) sum[j] += x * panel[k * PANEL + j];
    }
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
      if (from + j < most) to[(down ? i : from + j) * p.to.seq + (down ? from + j : i)] = sum[j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_compose(const __grid_constant__ DeltaMaps p) {
  compose<float>(p);
}

#define KERNEL(NAME, T, BLOCKS, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME##_##T(const __grid_constant__ DeltaParams p) { \
    __VA_ARGS__(p);                                                                                                \
  }
#define ALL(T)                                            \
  KERNEL(delta_prepare, T, 3, prepare<T##_t>)             \
  KERNEL(delta_forward_128, T, 1, forward<T##_t, 128>)    \
  KERNEL(delta_forward_256, T, 1, forward<T##_t, 256>)    \
  KERNEL(delta_reverse_128, T, 1, reverse<T##_t, 128>)    \
  KERNEL(delta_reverse_256, T, 1, reverse<T##_t, 256>)    \
  KERNEL(delta_grads, T, 1, grads<T##_t>)

#ifdef FLOAT32
ALL(fp32)
#else
ALL(bf16)
ALL(fp16)
#endif
