// Quantization to E4M3 with a factor for each row, or for each column of a matrix that it transposes; see
// kernels/scaled.go. And the transpose of codes.
//
// By row alone, a block keeps a row in registers, so that it reads x once. Otherwise quantize_largest finds the largest
// magnitudes of rows and columns, and quantize_cast reads x again: a column is too long for a block.
#include "e4m3.cuh"
#include "ops.cuh"
#include "pairs.cuh"

struct Quantize {
  const void* x;                        // [rows, columns]
  unsigned char *by_row, *by_column;    // [rows, columns] and [columns, stride], or NULL
  float *row_factors, *column_factors;  // not NULL with their codes
  unsigned* largest;                    // bits of magnitudes of rows, then of columns; 0 at first
  const float *by, *least;              // NULL, or factors of columns in by_row; and bounds of row_factors
  int rows, columns, stride, unused;
};

constexpr int OCTET = 8, HELD = 8;    // HELD: octets of a thread
constexpr int WARPS = 8, SIDE = 128;  // SIDE: of a tile; each warp has 16 of its rows
constexpr float LARGEST_E4M3 = 448, LEAST_FACTOR = 0x1p-100f;

__device__ __forceinline__ char* block_memory() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// An Octet is 8 neighbours in a row. Elements outside x are 0.
template <class T> struct Octet {
  static constexpr int PARTS = OCTET / LANES<T>;
  Vec<T> part[PARTS];

  // FAST: 8 divides the columns, and x is aligned to 16 bytes.
  template <bool FAST> __device__ __forceinline__ void load(const Quantize& p, int row, int column) {
    const T* at = (const T*)p.x + (long long)row * p.columns + column;
    int left = row < p.rows ? p.columns - column : 0;
#pragma unroll
    for (int j = 0; j < PARTS; j++, at += LANES<T>, left -= LANES<T>) {
      if constexpr (FAST) {
        part[j].raw = left > 0 ? load_streaming(at) : make_uint4(0, 0, 0, 0);
      } else {
        float x[LANES<T>];
#pragma unroll
        for (int k = 0; k < LANES<T>; k++) x[k] = k < left ? to_float(at[k]) : 0.0f;
        part[j].set(x);
      }
    }
  }

  __device__ __forceinline__ void get(float (&x)[OCTET]) const {
#pragma unroll
    for (int j = 0; j < PARTS; j++) part[j].get((float(&)[LANES<T>])x[j * LANES<T>]);
  }
};

__device__ __forceinline__ unsigned e4m3x4(float a, float b, float c, float d) {
  return e4m3x2(a, b) | e4m3x2(c, d) << 16;
}

// codes_of returns the codes of x with the inverse of a factor.
__device__ __forceinline__ uint2 codes_of(const float (&x)[OCTET], float inverse) {
  return make_uint2(e4m3x4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse),
      e4m3x4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse));
}

// load_by reads the factors of 8 columns.
template <bool FAST> __device__ __forceinline__ void load_by(const Quantize& p, int column, float (&by)[OCTET]) {
#pragma unroll
  for (int k = 0; k < OCTET; k++) by[k] = 1;
  if (!p.by || column >= p.columns) return;
  if constexpr (FAST) {
    *(float4*)by = *(const float4*)(p.by + column), *(float4*)(by + 4) = *(const float4*)(p.by + column + 4);
  } else {
    for (int k = 0; k < OCTET && column + k < p.columns; k++) by[k] = p.by[column + k];
  }
}

__device__ __forceinline__ float factor_of(float largest) { return fmaxf(largest / LARGEST_E4M3, LEAST_FACTOR); }

// quantize_row quantizes a row of x to the block's row of the result. With pairs, that is a place, and by has a part for
// each expert. The block's threads hold the whole row.
template <class T>
__device__ __forceinline__ void quantize_row(const Quantize& p, int from, const Pairs* pairs) {
  int row = blockIdx.x;
  const float* by = p.by;
  Octet<T> held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) held[i].template load<true>(p, from, (i * blockDim.x + threadIdx.x) * OCTET);
  if (pairs) by += (long long)pairs->expert(row) * p.columns;
  float largest = 0, x[OCTET];
  auto get = [&](int i, int column) {
    held[i].get(x);
    if (by && column < p.columns) {
      float y[OCTET];
      cached(y, by + column);
#pragma unroll
      for (int k = 0; k < OCTET; k++) x[k] *= y[k];
    }
  };
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    get(i, (i * blockDim.x + threadIdx.x) * OCTET);
#pragma unroll
    for (int k = 0; k < OCTET; k++) largest = fmaxf(largest, fabsf(x[k]));
  }
  float factor = factor_of(block_max(largest, (float*)block_memory()));
  if (p.least) factor = fmaxf(factor, p.least[row]);
  float inverse = 1 / factor;
  if (threadIdx.x == 0) p.row_factors[row] = factor;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    int column = (i * blockDim.x + threadIdx.x) * OCTET;
    if (column >= p.columns) break;
    get(i, column);
    *(uint2*)(p.by_row + (long long)row * p.columns + column) = codes_of(x, inverse);
  }
}

// quantize_largest finds the largest magnitudes in 128 rows and 256 columns. The order of atomicMax does not matter.
template <bool FAST, class T> __device__ __forceinline__ void quantize_largest(const Quantize& p) {
  constexpr int ROWS = SIDE / WARPS, WIDE = 32 * OCTET;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first = blockIdx.y * SIDE + warp * ROWS, column = blockIdx.x * WIDE + lane * OCTET;
  float columns[OCTET] = {}, by[OCTET];
  load_by<FAST>(p, column, by);
  unsigned mine = 0; // the largest of row first + lane
#pragma unroll 1
  for (int i = 0; i < ROWS; i += HELD) {
    Octet<T> held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) held[j].template load<FAST>(p, first + i + j, column);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      float x[OCTET], largest = 0;
      held[j].get(x);
#pragma unroll
      for (int k = 0; k < OCTET; k++) {
        largest = fmaxf(largest, fabsf(x[k] * by[k]));
        columns[k] = fmaxf(columns[k], fabsf(x[k]));
      }
      unsigned all = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (lane == i + j) mine = all;
    }
  }
  if (lane < ROWS && first + lane < p.rows) atomicMax(p.largest + first + lane, mine);
  float* tops = (float*)block_memory(); // [WARPS][WIDE]
#pragma unroll
  for (int k = 0; k < OCTET; k++) tops[warp * WIDE + lane * OCTET + k] = columns[k];
  __syncthreads();
  float largest = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, tops[w * WIDE + threadIdx.x]);
  column = blockIdx.x * WIDE + threadIdx.x;
  if (column < p.columns) atomicMax(p.largest + p.rows + column, __float_as_uint(largest));
}

// quantize_cast writes the codes of a tile. A thread has 8 columns of 8 rows. Their transposed codes go through shared
// memory in pieces of 16 rows, which are permuted so that a warp's stores and loads meet no bank twice. Half a warp
// has 8 octets of columns and both octets of a piece.
template <bool FAST, class T> __device__ __forceinline__ void quantize_cast(const Quantize& p) {
  char* tile = block_memory();                      // [SIDE columns][SIDE rows]
  float* inverses = (float*)(tile + SIDE * SIDE);  // of rows, then of columns
  int top = blockIdx.y * SIDE, left = blockIdx.x * SIDE;
  int lane = threadIdx.x % 32, piece = threadIdx.x / 32, half = lane / 8 % 2, octet = lane % 8 + lane / 16 * 8;
  int row = piece * 16 + half * OCTET, column = octet * OCTET;
  Octet<T> held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) held[i].template load<FAST>(p, top + row + i, left + column);

  bool of_column = threadIdx.x >= SIDE;
  int at = (of_column ? left : top) + threadIdx.x % SIDE;
  if (at < (of_column ? p.columns : p.rows)) {
    float factor = factor_of(__uint_as_float(p.largest[of_column ? p.rows + at : at]));
    if (!of_column && p.least) factor = fmaxf(factor, p.least[at]);
    float* factors = of_column ? p.column_factors : p.row_factors;
    if (factors && (of_column ? top : left) == 0) factors[at] = factor;
    inverses[threadIdx.x] = 1 / factor;
  }
  __syncthreads();

  uint2 words[OCTET]; // of each column
  float by[OCTET];
  load_by<FAST>(p, left + column, by);
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    float x[4][OCTET];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      held[i + j].get(x[j]);
      if (!p.by_row || top + row + i + j >= p.rows) continue;
      float y[OCTET];
#pragma unroll
      for (int k = 0; k < OCTET; k++) y[k] = x[j][k] * by[k];
      uint2 codes = codes_of(y, inverses[row + i + j]);
      unsigned char* to = p.by_row + (long long)(top + row + i + j) * p.columns + left + column;
      if constexpr (FAST) {
        if (left + column < p.columns) *(uint2*)to = codes;
      } else {
#pragma unroll
        for (int k = 0; k < OCTET; k++) {
          if (left + column + k < p.columns) to[k] = (k < 4 ? codes.x : codes.y) >> k % 4 * 8;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < OCTET; k++) {
      float inverse = inverses[SIDE + column + k];
      unsigned word = e4m3x4(x[0][k] * inverse, x[1][k] * inverse, x[2][k] * inverse, x[3][k] * inverse);
      if (i == 0) words[k].x = word;
      else words[k].y = word;
    }
  }
#pragma unroll
  for (int k = 0; k < OCTET; k++) {
    *(uint2*)(tile + (column + k) * SIDE + (piece ^ octet % 8) * 16 + half * OCTET) = words[k];
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < SIDE * SIDE / 16; i += 32 * WARPS) {
    int column = i / 8, piece = i % 8;
    if (left + column >= p.columns || top + piece * 16 >= p.stride) continue;
    *(uint4*)(p.by_column + (long long)(left + column) * p.stride + top + piece * 16) =
        *(const uint4*)(tile + column * SIDE + (piece ^ column / OCTET % 8) * 16);
  }
}

// transpose sets by_column to the transpose of x, both of bytes. A thread turns words of 4 rows; a gap after 32 columns
// in shared memory lets a warp's stores meet no bank twice.
extern "C" __global__ void __launch_bounds__(32 * WARPS) transpose(Quantize p) {
  constexpr int WORDS = SIDE / 4;
  unsigned* tile = (unsigned*)block_memory(); // [SIDE columns][WORDS + 1]
  int lane = threadIdx.x % 32, top = blockIdx.y * SIDE, left = blockIdx.x * SIDE;
  const char* from = (const char*)p.x + left + 4 * lane;
#pragma unroll
  for (int word = threadIdx.x / 32; word < WORDS; word += WARPS) {
    unsigned x[4] = {};
#pragma unroll
    for (int r = 0, row = top + 4 * word; r < 4; r++, row++) {
      if (row < p.rows && left + 4 * lane < p.columns) x[r] = *(const unsigned*)(from + (long long)row * p.columns);
    }
    unsigned* to = tile + 4 * lane * (WORDS + 1) + lane / 8 + word;
    unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    unsigned c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    to[0] = __byte_perm(a, b, 0x5410), to[WORDS + 1] = __byte_perm(a, b, 0x7632);
    to[2 * (WORDS + 1)] = __byte_perm(c, d, 0x5410), to[3 * (WORDS + 1)] = __byte_perm(c, d, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int column = threadIdx.x / 32; column < SIDE; column += WARPS) {
    if (left + column >= p.columns || top + 4 * lane >= p.rows) continue;
    *(unsigned*)(p.by_column + (long long)(left + column) * p.rows + top + 4 * lane) =
        tile[column * (WORDS + 1) + column / 32 + lane];
  }
}

// The 1 allows more than 64 registers, without which quantize_largest_any_fp16 spills.
#define QUANTIZE(NAME, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(512) quantize_rows_##NAME(Quantize p) {                   \
    quantize_row<T>(p, blockIdx.x, nullptr);                                                             \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(512)                                                      \
      quantize_places_##NAME(Quantize p, Pairs pairs, int by_token) {                                    \
    quantize_row<T>(p, by_token ? __ldg(pairs.tokens + blockIdx.x) : blockIdx.x, &pairs);                \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize_largest_##NAME(Quantize p) {         \
    quantize_largest<true, T>(p);                                                                        \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) quantize_largest_any_##NAME(Quantize p) {  \
    quantize_largest<false, T>(p);                                                                       \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize_cast_##NAME(Quantize p) {            \
    quantize_cast<true, T>(p);                                                                           \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) quantize_cast_any_##NAME(Quantize p) {     \
    quantize_cast<false, T>(p);                                                                          \
  }

QUANTIZE(bf16, bf16_t)
QUANTIZE(fp16, fp16_t)
QUANTIZE(fp32, float)
