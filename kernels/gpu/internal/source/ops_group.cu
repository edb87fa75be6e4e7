// Products of stacked matrices [experts * out, in] with the rows of pairs, which are sorted by expert: LINEAR sets
// y = x w^T and DX sets dx = dy w, both with a row for each place, and DW sets each expert's rows of dw = dy^T x. The
// rows of an operand are those of places, or of tokens, read by an index. The grid covers the most tiles that any
// split of the places among the experts can have. A block finds its tile, and returns if there is none.
#include "mma.cuh"
#include "ops.cuh"
#include "pairs.cuh"

enum Kind { LINEAR, DX, DW };

// A Part is a tile of an expert's product: rows from m and columns from n of the result, and the steps of k.
struct Part {
  int expert, m, m_end, n, n_end, k, k_end;
};

// find_part sets the tile of this block, of SIDE rows and columns.
template <Kind KIND, int SIDE> __device__ __forceinline__ bool find_part(Part& t, const Pairs& p, int out, int in) {
  t.n_end = KIND == LINEAR ? out : in;
  int across = (t.n_end + SIDE - 1) / SIDE, tile = blockIdx.x / across;
  t.n = blockIdx.x % across * SIDE;
  if constexpr (KIND == DW) {
    t.expert = blockIdx.y, t.m = tile * SIDE, t.m_end = out;
    t.k = p.starts[t.expert], t.k_end = p.starts[t.expert + 1];
    return true;
  }
  // An expert's tiles begin at number starts/SIDE + expert. These numbers leave room for the tiles of every expert,
  // since n places have at most one tile more than they cross multiples of SIDE.
  int lo = 0, hi = p.experts;
  while (hi - lo > 1) {
    int middle = (lo + hi) / 2;
    if (__ldg(p.starts + middle) / SIDE + middle <= tile) {
      lo = middle;
    } else {
      hi = middle;
    }
  }
  int start = __ldg(p.starts + lo);
  t.expert = lo, t.m = start + (tile - start / SIDE - lo) * SIDE, t.m_end = __ldg(p.starts + lo + 1);
  t.k = 0, t.k_end = KIND == LINEAR ? in : out;
  return t.m < t.m_end;
}

template <class C> __device__ __forceinline__ void put(C* p, float x, bool accumulate) {
  *p = from_float<C>(accumulate ? to_float(*p) + x : x);
}

// put2 stores two neighbours.
template <class C> __device__ __forceinline__ void put2(C* p, float x, float y, bool accumulate) {
  if constexpr (sizeof(C) == 4) {
    float2 old = accumulate ? *(float2*)p : make_float2(0, 0);
    *(float2*)p = make_float2(old.x + x, old.y + y);
  } else {
    float a = 0, b = 0;
    if (accumulate) unpack<C>(*(unsigned*)p, a, b);
    *(unsigned*)p = pack<C>(a + x, b + y);
  }
}

// The tensor cores' kernels: a block of 8 warps computes TILE by TILE, a warp 64 by 32, in steps of DEPTH along k.
// cp.async copies the operands of the next steps. Rows of operands have a multiple of 8 elements.
constexpr int TILE = 128, DEPTH = 32, STAGES = 3, THREADS = 256;
constexpr int TILE_BYTES = TILE * DEPTH * 2, STAGE_BYTES = 2 * TILE_BYTES;

// An Operand copies its tiles. Its lines in memory run along k, or ACROSS it. In shared memory, the 16-byte pieces of
// lines are permuted such that ldmatrix reads them without conflicts of banks.
template <class T, bool ACROSS> struct Operand {
  static constexpr int PIECES = ACROSS ? TILE / 8 : DEPTH / 8, STEP = THREADS / PIECES; // of a line; of lines
  const T* at;
  const int* index; // of lines; NULL: their numbers
  int width, line, end, column;
  int from[2]; // this thread's lines of the next tile; -1: none

  __device__ __forceinline__ void find() {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int i = line + int(threadIdx.x) / PIECES + j * STEP;
      from[j] = i >= end ? -1 : index ? __ldg(index + i) : i;
    }
  }

  __device__ __forceinline__ static unsigned place(int line, int piece) {
    return ACROSS ? line * TILE * 2 + ((piece ^ (line & 7)) << 4) : line * DEPTH * 2 + ((piece ^ (line >> 1 & 3)) << 4);
  }

  // copy starts the copies of a tile, and moves on along k.
  __device__ __forceinline__ void copy(unsigned to) {
    int piece = threadIdx.x % PIECES, c = column + piece * 8;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bool inside = from[j] >= 0 && c < width;
      copy16(to + place(threadIdx.x / PIECES + j * STEP, piece),
          at + (inside ? (long long)from[j] * width + c : 0), inside);
    }
    if constexpr (ACROSS) {
      line += DEPTH;
      find();
    } else {
      column += DEPTH;
    }
  }

  // read loads four 8x8 matrices for mma, from element i and step k of 16. Lanes give halves of 8 of both.
  __device__ __forceinline__ static void read(unsigned (&d)[4], unsigned from, int i, int k, int half_i, int half_k) {
    int row = threadIdx.x % 8;
    if constexpr (ACROSS) {
      ldmatrix_trans(d, from + place(k * 16 + half_k * 8 + row, i / 8 + half_i));
    } else {
      ldmatrix(d, from + place(i + half_i * 8 + row, k * 2 + half_k));
    }
  }
};

template <class T, class C, Kind KIND> __device__ __forceinline__ void group(C* c, const T* a, const int* a_index,
    const T* b, const int* b_index, const Pairs& p, int out, int in, bool accumulate) {
  extern __shared__ __align__(1024) char shared[];
  Part t;
  if (!find_part<KIND, TILE>(t, p, out, in)) return;
  long long matrix = (long long)t.expert * out * in;
  Operand<T, KIND == DW> left{a, a_index};
  Operand<T, KIND != LINEAR> right{KIND == DW ? b : b + matrix, b_index};
  if constexpr (KIND == DW) {
    c += matrix;
    left.width = out, left.line = t.k, left.end = t.k_end, left.column = t.m;
  } else {
    left.width = KIND == LINEAR ? in : out, left.line = t.m, left.end = t.m_end, left.column = 0;
  }
  right.width = in, right.line = KIND == LINEAR ? t.n : t.k, right.end = KIND == LINEAR ? t.n_end : t.k_end;
  right.column = KIND == LINEAR ? 0 : t.n;
  left.find(), right.find();

  unsigned memory = smem_address(shared);
  int steps = (t.k_end - t.k + DEPTH - 1) / DEPTH, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int i = warp / 4 * 64, j = warp % 4 * 32, half1 = lane / 8 % 2, half2 = lane / 16;
  auto fetch = [&](int step) {
    if (step < steps) {
      unsigned to = memory + step % STAGES * STAGE_BYTES;
      left.copy(to), right.copy(to + TILE_BYTES);
    }
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s);
  float sum[4][4][4] = {};
  for (int step = 0; step < steps; step++) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    fetch(step + STAGES - 1); // into the stage that all warps have left
    unsigned from = memory + step % STAGES * STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
      unsigned x[4][4], y[2][4];
#pragma unroll
      for (int r = 0; r < 4; r++) left.read(x[r], from, i + r * 16, k, half1, half2);
#pragma unroll
      for (int s = 0; s < 2; s++) right.read(y[s], from + TILE_BYTES, j + s * 16, k, half2, half1);
#pragma unroll
      for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int s = 0; s < 4; s++) mma<T>(sum[r][s], x[r], y[s / 2][s % 2 * 2], y[s / 2][s % 2 * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 8; r++) {
    int row = t.m + i + r * 8 + lane / 4;
    if (row >= t.m_end) continue;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      int column = t.n + j + s * 8 + lane % 4 * 2;
      if (column >= t.n_end) continue;
      put2(c + (long long)row * t.n_end + column, sum[r / 2][s][r % 2 * 2], sum[r / 2][s][r % 2 * 2 + 1], accumulate);
    }
  }
}

// The kernels for float32, and for any size and alignment: as in gemm_simple.cu, a block of SIDE by SIDE threads
// computes EACH by EACH elements a thread.
constexpr int SMALL = 64, STEP = 16, SIDE = 16, EACH = SMALL / SIDE;
using Lines = float[STEP][SMALL + 1];

template <bool ACROSS, class T> __device__ __forceinline__ void stage(Lines& tile, const T* at,
    const int* index, int width, int i, int end, int k, int k_end) {
  int thread = threadIdx.y * SIDE + threadIdx.x;
#pragma unroll
  for (int first = 0; first < SMALL * STEP; first += SIDE * SIDE) {
    int n = first + thread, r = ACROSS ? n % SMALL : n / STEP, d = ACROSS ? n / SMALL : n % STEP;
    int line = ACROSS ? k + d : i + r, column = ACROSS ? i + r : k + d;
    bool inside = i + r < end && k + d < k_end;
    if (inside && index) line = __ldg(index + line);
    tile[d][r] = inside ? to_float(at[(long long)line * width + column]) : 0.0f;
  }
}

template <class T, class C, Kind KIND> __device__ __forceinline__ void group_any(C* c, const T* a, const int* a_index,
    const T* b, const int* b_index, const Pairs& p, int out, int in, bool accumulate) {
  extern __shared__ __align__(1024) char shared[];
  auto &as = *(Lines*)shared, &bs = *((Lines*)shared + 1);
  Part t;
  if (!find_part<KIND, SMALL>(t, p, out, in)) return;
  long long matrix = (long long)t.expert * out * in;
  if (KIND == DW) {
    c += matrix;
  } else {
    b += matrix;
  }
  float sum[EACH][EACH] = {};
  for (int k = t.k; k < t.k_end; k += STEP) {
    stage<KIND == DW>(as, a, a_index, KIND == LINEAR ? in : out, t.m, t.m_end, k, t.k_end);
    stage<KIND != LINEAR>(bs, b, b_index, in, t.n, t.n_end, k, t.k_end);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < STEP; e++) {
      float x[EACH], y[EACH];
#pragma unroll
      for (int r = 0; r < EACH; r++) {
        x[r] = as[e][threadIdx.y + r * SIDE];
        y[r] = bs[e][threadIdx.x + r * SIDE];
      }
#pragma unroll
      for (int r = 0; r < EACH; r++) {
#pragma unroll
        for (int s = 0; s < EACH; s++) sum[r][s] = fmaf(x[r], y[s], sum[r][s]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < EACH; r++) {
#pragma unroll
    for (int s = 0; s < EACH; s++) {
      int row = t.m + threadIdx.y + r * SIDE, column = t.n + threadIdx.x + s * SIDE;
      if (row < t.m_end && column < t.n_end) put(c + (long long)row * t.n_end + column, sum[r][s], accumulate);
    }
  }
}

#define PRODUCT(NAME, FUNCTION, T, C, KIND, BLOCKS)                                                             \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME##_##T(C* c, const T##_t* a, const int* a_index, \
      const T##_t* b, const int* b_index, Pairs p, int out, int in, int accumulate) {                           \
    FUNCTION<T##_t, C, KIND>(c, a, a_index, b, b_index, p, out, in, accumulate);                                \
  }

#define FAST(T)                                            \
  PRODUCT(group_linear, group, T, T##_t, LINEAR, 2)        \
  PRODUCT(group_linear_dx, group, T, T##_t, DX, 2)         \
  PRODUCT(group_linear_dw, group, T, float, DW, 2)

#define ANY(T)                                             \
  PRODUCT(group_linear_any, group_any, T, T##_t, LINEAR, 1) \
  PRODUCT(group_linear_dx_any, group_any, T, T##_t, DX, 1) \
  PRODUCT(group_linear_dw_any, group_any, T, float, DW, 1)

using fp32_t = float;
FAST(bf16)
FAST(fp16)
ANY(bf16)
ANY(fp16)
ANY(fp32)
