// The states and their gradients of delta.cu, followed through the chunks of a segment.
#pragma once
#include "delta.cuh"

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
  int b, head, key_head, chunks;
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
        shared(shared), base(smem_address(shared)) {
    const int warp = threadIdx.x / 32, fronts = p.flags & MAPS ? (p.dim + COLS - 1) / COLS : 0;
    front = int(blockIdx.x) < fronts;
    col = (front ? blockIdx.x : blockIdx.x - fronts) * COLS;
    width = (front ? p.dim : p.dim_v) - col;
    at = col + (front || !(p.flags & MAPS) ? 0 : p.dim);
    state_row = warp * HEIGHT, row = warp / 2 * 16, from_col = warp % 2 * 16;
    pairs(s, state_row, 0, [&](int i, int j, float& x, float& y) { x = first(i, j), y = first(i, j + 1); });
    hold<T, DIM, COLS>(state_at(0), s, state_row, 0);
  }

  __device__ __forceinline__ float* state(const Strided& s, int index, int i, int j) const {
    return (float*)s.at + index * s.batch + head * s.head + i * s.seq + at + j;
  }

  // first returns an element of the state before the first chunk.
  __device__ __forceinline__ float first(int i, int j) const {
    if (i >= p.dim || j >= width) return 0;
    return segment.from < 0 ? front && i == col + j : *state(p.from, segment.from * p.batch + b, i, j);
  }

  __device__ __forceinline__ void finish() {
    if (!p.to.at) return;
    pairs(s, state_row, 0, [&](int i, int j, float x, float y) {
      if (i >= p.dim) return;
      if (j < width) *state(p.to, blockIdx.z, i, j) = x;
      if (j + 1 < width) *state(p.to, blockIdx.z, i, j + 1) = y;
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
