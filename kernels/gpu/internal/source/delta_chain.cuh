// The states and their gradients of delta.cu, followed through the chunks of a segment.
#pragma once
#include "delta.cuh"

// Chain has the shared memory of delta_forward and delta_reverse, for a dim up to DIM and COLS columns of a state.
template <int DIM, int COLS> struct Chain {
  static constexpr int KEYS = ROWS * DIM * SIZE, PAIRS = ROWS * ROWS * SIZE, VALUES = ROWS * COLS * SIZE;
  static constexpr int K = 0, Q = KEYS, T = 2 * KEYS, P = T + PAIRS, V = P + PAIRS, F = V + VALUES;
  static constexpr int STATE = DIM * COLS * SIZE, STATES = SIZE == 2 ? 2 : 1; // of a chunk and the next
  static constexpr int S = 0, E = STATES * STATE, STAGE = E + (SIZE == 2 ? 4 : 3) * VALUES, STAGE_BYTES = F + 2048;
  static_assert(sizeof(Factors) <= 2048, "room for the factors");
};

// A Feed copies 64 rows of WIDTH columns, of one chunk after another. It keeps addresses, since a chain has few threads
// to compute them.
template <int WIDTH> struct Feed {
  using To = Operand<ROWS, WIDTH>;
  static constexpr int PIECES = WIDTH / To::PIECE, PASS = HALF / PIECES;
  const Stored* at;
  long long pass, step; // to this thread's next row, and to the next chunk
  int row, col, left;   // left: columns since col
  bool aligned;

  __device__ __forceinline__ void set(const Stored* from, long long stride, long long step, int cols, bool aligned) {
    row = threadIdx.x % HALF / PIECES, col = threadIdx.x % PIECES * To::PIECE;
    at = from + row * stride + col, pass = PASS * stride, left = cols - col;
    this->step = step, this->aligned = aligned;
  }

  // copy starts copies of the first n rows, and of zeros for the others, and moves on.
  __device__ __forceinline__ void copy(unsigned to, int n) {
    const unsigned first = to + To::offset(row, col);
    const Stored* from = at;
    at += step;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < ROWS; i += PASS, from += pass) {
        // In 16 bits, the permutation of pieces repeats after 8 rows.
        copy16(SIZE == 2 && PASS % 8 == 0 ? first + To::offset(i, 0) : to + To::offset(row + i, col), from,
            row + i < n && left > 0);
      }
      return;
    }
#pragma unroll 1
    for (int i = row; i < ROWS; i += PASS, from += pass) {
      store_shared(to + To::offset(i, col), word(from, 0, 0, left, i < n), word(from, 0, 1, left, i < n),
          word(from, 0, 2, left, i < n), word(from, 0, 3, left, i < n));
    }
  }
};

// A Part is what a block of a chain has: COLS columns of one head's state, for a segment and batch element. Each warp
// has 16 of 128 rows of the state. The leading four warps compute E or X; the others copy, and compute o.
template <class T, int DIM, int COLS, bool REVERSE> struct Part {
  using In = Chain<DIM, COLS>;
  using Values = Sum<16, COLS>;
  static constexpr int PARTS = DIM / 128; // of a warp's rows
  const DeltaParams& p;
  const Segment& segment;
  int b, head, key_head, chunks;
  int col, width, at;   // columns since col of M or R, and the first one's number in a state
  bool front, leads;    // columns of M; this warp is a leading one
  int state_row, row;   // this warp's first row of the state, and of 64
  const char* shared;
  unsigned base;
  int stage, filled, fetched; // the buffers of the current and of the next copied chunk, and the number of the latter
  Feed<DIM> k, q;
  Feed<COLS> v; // or dO
  const Stored *t, *pairs_of;
  const Factors* factors;
  long long products;      // from a chunk to the next
  Stored *states, *values; // of the current chunk, for delta_grads
  Values s[PARTS];

  __device__ __forceinline__ Part(const DeltaParams& p, const char* shared)
      : p(p), segment(p.segments[blockIdx.z / p.batch]), b(blockIdx.z % p.batch), head(blockIdx.y),
        key_head(head / (p.heads / p.key_heads)), chunks((segment.hi - segment.lo + ROWS - 1) / ROWS), shared(shared),
        base(smem_address(shared)), stage(0), filled(0), fetched(0) {
    const int warp = threadIdx.x / 32, fronts = p.flags & MAPS ? (p.dim + COLS - 1) / COLS : 0;
    front = int(blockIdx.x) < fronts;
    col = (front ? blockIdx.x : blockIdx.x - fronts) * COLS;
    width = (front ? p.dim : p.dim_v) - col;
    at = col + (front || !(p.flags & MAPS) ? 0 : p.dim);
    leads = warp < 4, state_row = warp * 16, row = warp % 4 * 16;
    of_state([&](int i, int j, float& x, float& y) { x = first(i, j), y = first(i, j + 1); });
    put_state(0);

    const Chunk c(segment, REVERSE ? chunks - 1 : 0, b);
    const long long from = c.of_head(p, head), next = (REVERSE ? -1 : 1) * ROWS;
    const Strided& values = REVERSE ? p.dout : p.v;
    k.set(c.at<Stored>(p.k, key_head, 0, 0), p.k.seq, next * p.k.seq, p.dim, p.flags & ALIGNED_K);
    q.set(c.at<Stored>(p.q, key_head, 0, 0), p.q.seq, next * p.q.seq, p.dim, p.flags & ALIGNED_Q);
    t = p.t + from * ROWS * ROWS, pairs_of = p.p + from * ROWS * ROWS, factors = p.factors + from;
    products = (REVERSE ? -1 : 1) * p.batch * p.heads;
    if (front) {
      v.set(p.t, 0, 0, 0, true);
    } else {
      v.set(c.at<Stored>(values, head, 0, col), values.seq, next * values.seq, p.dim_v - col,
          p.flags & (REVERSE ? ALIGNED_DOUT : ALIGNED_V));
    }
    states = (REVERSE ? p.ds : p.s) + from * DIM * p.wide_v;
    this->values = (REVERSE ? p.x : p.e) + from * ROWS * p.wide_v;
    for (int i = 0; i < p.stages - 1; i++) fetch();
  }

  // of_state calls f(row, column, x, y) for this thread's neighbours in the state.
  template <class F> __device__ __forceinline__ void of_state(F f) {
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
      const int r = state_row + n * 128 + lane_row();
      pairs(s[n], [&](int i, int j, float& x, float& y) { f(r + i, lane_col() + j, x, y); });
    }
  }

  __device__ __forceinline__ float* state(const Strided& s, int index, int i, int j) const {
    return (float*)s.at + index * s.batch + head * s.head + i * s.seq + at + j;
  }

  // first returns an element of the state before the first chunk.
  __device__ __forceinline__ float first(int i, int j) const {
    if (i >= p.dim || j >= width) return 0;
    return segment.from < 0 ? front && i == col + j : *state(p.from, segment.from * p.batch + b, i, j);
  }

  __device__ __forceinline__ void end() {
    if (!p.to.at) return;
    of_state([&](int i, int j, float x, float y) {
      if (i >= p.dim) return;
      if (j < width) *state(p.to, blockIdx.z, i, j) = x;
      if (j + 1 < width) *state(p.to, blockIdx.z, i, j + 1) = y;
    });
  }

  // rows returns the number of rows of the i-th chunk of the chain.
  __device__ __forceinline__ int rows(int i) const {
    return min(ROWS, segment.hi - segment.lo - (REVERSE ? chunks - 1 - i : i) * ROWS);
  }

  __device__ __forceinline__ unsigned buffer(int i) const { return base + In::STAGE + i * In::STAGE_BYTES; }

  // fetch starts copies of the next chunk, and of its columns of v or dO. M has zeros for them. The warps that do not lead
  // copy.
  __device__ __forceinline__ void fetch() {
    if (!leads && fetched < chunks) {
      const int n = rows(fetched);
      const unsigned to = buffer(filled);
      k.copy(to + In::K, n);
      copy_in<In::PAIRS, HALF>(to + In::T, t);
      if (REVERSE || p.o.at) {
        q.copy(to + In::Q, n);
        copy_in<In::PAIRS, HALF>(to + In::P, pairs_of);
      }
      if (REVERSE && p.flags & WIDE_DOUT && !front) {
        const Chunk c(segment, chunks - 1 - fetched, b);
        c.load_wide<T, COLS, HALF>(to + In::V, p, head, col);
      } else {
        v.copy(to + In::V, n);
      }
      copy_in<sizeof(Factors), HALF>(to + In::F, factors);
      t += products * ROWS * ROWS, pairs_of += products * ROWS * ROWS, factors += products;
      fetched++, filled = filled + 1 == p.stages ? 0 : filled + 1;
    }
    copies_commit();
  }

  // await waits for the next chunk, and for all warps, and returns its buffer.
  __device__ __forceinline__ unsigned await() {
    if (p.stages == 1) {
      __syncthreads();
      fetch();
    }
    if (p.stages < 3) {
      copies_wait<0>();
    } else {
      copies_wait<1>();
    }
    block_sync();
    const unsigned now = buffer(stage);
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    return now;
  }
  __device__ __forceinline__ const Factors& factors_at(unsigned in) const {
    return *(const Factors*)(shared + (in - base) + In::F);
  }

  // state_at returns the address of the state before the i-th chunk, put_state stores it there, and keep_state stores
  // the one after the chunk.
  __device__ __forceinline__ unsigned state_at(int i) const { return base + In::S + i % In::STATES * In::STATE; }
  __device__ __forceinline__ void put_state(int i) {
#pragma unroll
    for (int n = 0; n < PARTS; n++) hold<T, DIM, COLS>(state_at(i), s[n], state_row + n * 128, 0);
  }
  __device__ __forceinline__ void keep_state(int i) {
    if (In::STATES == 1) __syncthreads();
    put_state(i + 1);
  }

  // times_state starts the product of K or Q and the state before the i-th chunk.
  __device__ __forceinline__ void times_state(Values& y, unsigned keys, int i) const {
    product<T, DIM>(y, Matrix<ROWS, DIM, false>{keys, row}, Matrix<DIM, COLS, true>{state_at(i), 0});
  }

  // times starts adding the product of T or P, or its transpose, and an operand.
  template <bool TURNED> __device__ __forceinline__ void times(Values& y, unsigned left, unsigned right) const {
    product<T, ROWS>(y, Matrix<ROWS, ROWS, TURNED>{left, row}, Matrix<ROWS, COLS, true>{right, 0});
  }

  // add starts adding the product of K' or Q' and an operand to the state, and added waits for it.
  __device__ __forceinline__ void add(unsigned keys, unsigned values) {
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
      product<T, ROWS>(s[n], Matrix<ROWS, DIM, true>{keys, state_row + n * 128}, Matrix<ROWS, COLS, true>{values, 0});
    }
  }
  __device__ __forceinline__ void added() {
#pragma unroll
    for (int n = 0; n < PARTS; n++) complete(s[n]);
  }

  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (int n = 0; n < PARTS; n++) scale_rows(s[n], 0, [=](int) { return by; });
  }

  __device__ __forceinline__ void put(unsigned to, Values& y) const { hold<T, ROWS, COLS>(to, y, row, 0); }

  // copy_state stores the state before the i-th chunk for delta_grads, and copy_values E or X. Then they move on.
  __device__ __forceinline__ void copy_state(int i) {
    copy_tiles<DIM, COLS>(states, (long long)TILE * p.wide_v, state_at(i), col);
    states += products * DIM * p.wide_v;
  }
  __device__ __forceinline__ void copy_values(unsigned from) {
    copy_tiles<ROWS, COLS>(values, 0, from, col);
    values += products * ROWS * p.wide_v;
  }
};

// delta_forward sets o, the states after segments, or what delta_grads needs of the chain.
template <class T, int DIM, int COLS> __device__ __forceinline__ void forward(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  using In = Chain<DIM, COLS>;
  Part<T, DIM, COLS, false> x(p, shared);
  const unsigned right = x.base + In::E, e = right + In::VALUES, scaled = e + In::VALUES, o = scaled + In::VALUES;
  const bool together = SIZE == 2 && p.flags & PIECES_O; // o goes through shared memory, a step later
  Stored* to = (Stored*)p.o.at + x.b * p.o.batch + x.head * p.o.head + x.segment.lo * p.o.seq + x.col;
  auto put_o = [&](int n) {
    copy_out<ROWS, COLS>(to, p.o.seq, o, n, x.width);
    to += ROWS * p.o.seq;
  };
  for (int i = 0; i < x.chunks; i++) {
    const unsigned in = x.await();
    const Factors& f = x.factors_at(in);
    const int n = x.rows(i), r = x.row + lane_row();
    Sum<16, COLS> y;
    zero(y);
    if (x.leads) {
      x.times_state(y, in + In::K, i);
      float2 v[COLS / 4];
      read<T, ROWS, COLS>(v, in + In::V, x.row);
      const float beta[] = {f.beta[r], f.beta[r + 8]}, into[] = {f.into[r], f.into[r + 8]};
      complete(y);
      pairs(y, [&](int i, int j, float& a, float& b) {
        const int l = i / 8;
        const float2 z = v[j / 4 + l];
        a = beta[l] * (z.x - into[l] * a), b = beta[l] * (z.y - into[l] * b);
      });
      x.put(right, y);
    } else {
      if (p.o.at) x.times_state(y, in + In::Q, i);
      if (p.stages > 1) x.fetch();
      if (p.flags & KEEP) x.copy_state(i);
      complete(y);
      scale_rows(y, x.row, [&](int i) { return p.scale * f.into[i]; });
    }
    block_sync();
    if (x.leads) {
      zero(y);
      x.template times<false>(y, in + In::T, right);
      complete(y);
      x.put(e, y);
      scale_rows(y, x.row, [&](int i) { return f.out[i]; });
      x.put(scaled, y);
    } else if (together && i > 0) {
      put_o(ROWS);
    }
    x.scale(f.into[n - 1]);
    block_sync();
    x.add(in + In::K, scaled);
    if (!x.leads) {
      if (p.o.at) x.template times<false>(y, in + In::P, e);
      if (p.flags & KEEP) x.copy_values(e);
    }
    x.added();
    x.keep_state(i);
    if (!x.leads && p.o.at) {
      complete(y);
      if (together) {
        x.put(o, y);
      } else {
        const Chunk c(x.segment, i, x.b);
        pairs(y, [&](int i, int j, float a, float b) {
          c.put<T>(p.o, p.flags & WIDE_O, x.head, r + i, x.col + lane_col() + j, p.dim_v, a, b);
        });
      }
    }
  }
  __syncthreads();
  if (together && !x.leads) put_o(x.rows(x.chunks - 1));
  x.end();
}

// delta_reverse goes through the chunks in reverse, with gradients of states:
//
//	dE = D(last, i) k_i dS' + P' do;   X = T' dE
//	dS = D(last, before) dS' + (scale D(i, before) q_i)' do - (beta_i D(i, before) k_i)' X
template <class T, int DIM, int COLS> __device__ __forceinline__ void reverse(const DeltaParams& p) {
  extern __shared__ __align__(1024) char shared[];
  using In = Chain<DIM, COLS>;
  Part<T, DIM, COLS, true> x(p, shared);
  const unsigned e = x.base + In::E, dout = e + In::VALUES, scaled = dout + In::VALUES;
  for (int i = 0; i < x.chunks; i++) {
    const unsigned in = x.await(), keep = in + In::V; // X replaces dO
    const Factors& f = x.factors_at(in);
    Sum<16, COLS> y;
    zero(y);
    if (x.leads) {
      x.times_state(y, in + In::K, i);
      complete(y);
      scale_rows(y, x.row, [&](int i) { return f.out[i]; });
      x.template times<true>(y, in + In::P, in + In::V);
      complete(y);
      x.put(e, y);
    } else {
      float2 v[COLS / 4];
      read<T, ROWS, COLS>(v, in + In::V, x.row);
      if (p.stages > 1) x.fetch();
      pairs(y, [&](int i, int j, float& a, float& b) { a = v[j / 4 + i / 8].x, b = v[j / 4 + i / 8].y; });
      scale_rows(y, x.row, [&](int i) { return p.scale * f.into[i]; });
      x.put(dout, y);
      if (p.flags & KEEP) x.copy_state(i);
    }
    x.scale(f.into[x.rows(i) - 1]);
    block_sync();
    zero(y);
    if (x.leads) {
      x.template times<true>(y, in + In::T, e);
      x.add(in + In::Q, dout);
      complete<Part<T, DIM, COLS, true>::PARTS>(y);
      if (p.flags & KEEP) x.put(keep, y);
      scale_rows(y, x.row, [&](int i) { return -f.beta[i] * f.into[i]; });
      x.put(scaled, y);
    } else {
      x.add(in + In::Q, dout);
    }
    block_sync();
    x.add(in + In::K, scaled);
    if (!x.leads && p.flags & KEEP) x.copy_values(keep);
    x.added();
    x.keep_state(i);
  }
  x.end();
}
