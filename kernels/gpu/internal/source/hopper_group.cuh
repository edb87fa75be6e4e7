// The shared memory of hopper_group.cu, its tiles, and the work of the threads that find and load them.
#pragma once
#include "glu.cuh"
#include "hopper_copies.cuh"

enum { FORWARD, DX, DW, GLU, GLU_DX };
constexpr int BM = 128, BK = 64, GROUPS = 2, THREADS = 128 * (GROUPS + 1), BAND = 16;
constexpr int HALF = BN / 2; // floats of a thread
constexpr int WIDTH = PRODUCT == GLU ? BN / 2 : BN; // x.columns of a tile

typedef unsigned short Stored;

struct HopperGroup {
  TensorMap a, b, c; // c: dw, or gates and ups
  const Stored *a_rows, *b_rows;
  const int *a_tokens, *b_tokens; // of places; NULL: rows are in the order of places
  const int* starts;
  Stored* out;
  unsigned* next; // the number of tiles that blocks have taken, except each block's first, and that of blocks that are
                  // done; 0 before and after
  Stored* gated;
  const float* weights;     // w of each place
  float* sums;              // of da * y over a tile's columns: [tiles, places]
  const float *a_factors, *b_factors; // of SCALED
  int experts, depth;       // depth: of the sum, except DW
  int rows, columns;        // of the output, or of gated; rows: of an expert's dw
  int a_columns, b_columns; // of rows of a and b
  int accumulate;           // the output is added to
  int turned;               // dw is transposed: columns by rows
  int places;
  int unused[15];
};
static_assert(sizeof(HopperGroup) == 576, "HopperGroup of params.go is laid out so");

// A step of the sum: operands in order [outer][k] or, if TURNED, [k][outer].
constexpr bool TURNED_A = PRODUCT == DW, TURNED_B = !SCALED && PRODUCT != FORWARD && PRODUCT != GLU;
constexpr int A_ROWS = TURNED_A ? BK : BM, A_COLS = TURNED_A ? BM : BK, B_ROWS = TURNED_B ? BK : BN,
              B_COLS = TURNED_B ? BN : BK;
using ATile = Panels<A_ROWS, A_COLS>;
using BTile = Panels<B_ROWS, B_COLS>;
using OutTile = Panels<16, 64>; // of a warp: in float32, 32 columns

// A Tile of the output, of an expert's places. row is a place, or a row of its dw.
struct Tile { int expert, lo, hi, row, col; }; // expert -1: there are no more
constexpr int TILES = 4, TILE_BYTES = 32 + SCALED * 4 * BN; // found ahead; with the factors of their columns

struct Shared {
  static constexpr int A = 0, B = A + STAGES * ATile::BYTES, OUT = B + STAGES * BTile::BYTES;
  static constexpr int FOUND = OUT + (PRODUCT == DW ? 2 : 1) * 4 * GROUPS * OutTile::BYTES;
  static constexpr int FULL = FOUND + TILES * TILE_BYTES, EMPTY = FULL + 8 * STAGES, TOLD = EMPTY + 8 * STAGES,
                       READ = TOLD + 8 * TILES, STARTS = READ + 8 * TILES;
};

// A Turn cycles through N buffers. parity names the phase in which the current one is filled.
template <int N> struct Turn {
  int at = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++at == N) {
      at = 0;
      parity ^= 1;
    }
  }
};
using Stage = Turn<STAGES>;

// leave arrives at a barrier for a warp that has read what the barrier guards.
__device__ __forceinline__ void leave(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(barrier);
  }
}

__device__ __forceinline__ int steps_of(const HopperGroup& x, const Tile& t) {
  return ((PRODUCT == DW ? t.hi - t.lo : x.depth) + BK - 1) / BK;
}

// Finder finds a block's tiles, and tells all warps.
struct Finder {
  const HopperGroup& x;
  const int* starts; // in shared memory
  unsigned base, next;
  int before = 0; // tiles of earlier experts
  Tile t;
  Turn<TILES> turn;

  // find finds the tile of that number, which is no less than before.
  __device__ __forceinline__ void find(int number) {
    const int columns = (x.columns + WIDTH - 1) / WIDTH;
    for (;;) {
      const int high = ((PRODUCT == DW ? x.rows : t.hi - t.lo) + BM - 1) / BM, rest = number - before;
      if (rest < high * columns) {
        const int first = rest / (BAND * columns) * BAND, band = min(BAND, high - first), in = rest - first * columns;
        t.row = (PRODUCT == DW ? 0 : t.lo) + (first + in % band) * BM;
        t.col = in / band * WIDTH;
        return;
      }
      if (++t.expert == x.experts) {
        t.expert = -1;
        return;
      }
      before += high * columns;
      t.lo = t.hi;
      t.hi = starts[t.expert + 1];
    }
  }

  // tell finds a tile and, unless there is none, takes the number of the next, which it does not wait for.
  __device__ __forceinline__ void tell(int number) {
    find(number);
    barrier_wait(base + Shared::READ + 8 * turn.at, turn.parity ^ 1);
    const unsigned at = base + Shared::FOUND + TILE_BYTES * turn.at;
    store_shared(at, (unsigned)t.expert, (unsigned)t.lo, (unsigned)t.hi, (unsigned)t.row);
    store_shared(at + 16, (unsigned)t.col);
    const unsigned told = base + Shared::TOLD + 8 * turn.at;
    if (SCALED && x.b_factors && t.expert >= 0) {
      constexpr int PARTS = PRODUCT == GLU ? 2 : 1;
      const int bytes = 4 * min(WIDTH, x.columns - t.col);
      barrier_expect(told, PARTS * bytes);
      for (int i = 0; i < PARTS; i++) {
        copy_bytes(at + 32 + 4 * i * WIDTH, x.b_factors + (long long)(PARTS * t.expert + i) * x.columns + t.col, bytes,
            told);
      }
    } else {
      barrier_arrive(told);
    }
    turn.next();
    if (t.expert >= 0) {
      next = atomicAdd(x.next, 1);
    } else if (atomicAdd(x.next + 1, 1) == gridDim.x - 1) {
      x.next[0] = x.next[1] = 0;
    }
  }
};

// take returns the next tile, and pass makes room for another.
__device__ __forceinline__ Tile take(unsigned base, const Turn<TILES>& turn) {
  Tile t;
  const unsigned at = base + Shared::FOUND + TILE_BYTES * turn.at;
  barrier_wait(base + Shared::TOLD + 8 * turn.at, turn.parity);
  load_shared_words(at, t.expert, t.lo, t.hi, t.row);
  t.col = __float_as_int(load_shared(at + 16));
  return t;
}
__device__ __forceinline__ void pass(unsigned base, Turn<TILES>& turn) {
  leave(base + Shared::READ + 8 * turn.at);
  turn.next();
}

// Loader is a thread of the warpgroup that loads.
struct Loader {
  const HopperGroup& x;
  unsigned base;
  Stage stage;

  // list fills a thread's list of rows, of every 16th place since its first; beyond end, -1.
  template <int N> __device__ __forceinline__ void list(int (&row)[N], const int* tokens, int first, int end) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int place = first + (int)threadIdx.x / 8 + 16 * i;
      row[i] = place >= end ? -1 : tokens ? __ldg(tokens + place) : place;
    }
  }

  // lists fills those of a step of DW, if it will not load all rows with TMA.
  template <int N, int M>
  __device__ __forceinline__ void lists(int (&a_row)[N], int (&b_row)[M], int first, int end) {
    if (x.a_tokens || first + BK > end) {
      list(a_row, x.a_tokens, first, end);
    }
    if (x.b_tokens || first + BK > end) {
      list(b_row, x.b_tokens, first, end);
    }
  }

  // copy copies the rows of all threads' lists, since a column. Eight threads copy 128 bytes of a row.
  template <class Tile, int N>
  __device__ __forceinline__ void copy(unsigned to, const Stored* from, const int (&row)[N], int col, int columns) {
    const int piece = threadIdx.x % 8 * 8;
    to += Tile::offset(threadIdx.x / 8, piece);
#pragma unroll
    for (int p = 0; p < Tile::COUNT; p++) {
      const bool in = col + 64 * p + piece < columns;
#pragma unroll
      for (int i = 0; i < N; i++) {
        copy16_line(to + p * Tile::PANEL + i * 16 * 128,
            from + (long long)max(row[i], 0) * columns + (in ? col + 64 * p + piece : 0), in && row[i] >= 0);
      }
    }
  }

  // box starts the copy of a box of rows; turned operands have a box for each panel.
  template <class Tile>
  __device__ __forceinline__ void box(unsigned to, const TensorMap& map, int element, int row, int expert) {
#pragma unroll
    for (int i = 0; i < Tile::COUNT; i++) {
      copy_box(to + i * Tile::PANEL, map, base + Shared::FULL + 8 * stage.at, element + 64 * i, row, 0, expert);
    }
  }

  // load loads the steps of a tile. Rows of a step of DW are known one step ahead.
  __device__ __forceinline__ void load(const Tile& t) {
    int a_list[A_ROWS / 16], b_list[BK / 16];
    if constexpr (PRODUCT == DW) {
      lists(a_list, b_list, t.lo, t.hi);
    } else if (x.a_tokens) {
      list(a_list, x.a_tokens, t.row, t.hi);
    }
    for (int step = 0, steps = steps_of(x, t); step < steps; step++) {
      const int k = step * BK + (PRODUCT == DW ? t.lo : 0);
      const bool last = PRODUCT == DW && k + BK > t.hi, by_a = x.a_tokens || last,
                 by_b = PRODUCT == DW && (x.b_tokens || last);
      const unsigned full = base + Shared::FULL + 8 * stage.at, a = base + Shared::A + stage.at * ATile::BYTES,
                     b = base + Shared::B + stage.at * BTile::BYTES;
      barrier_wait(base + Shared::EMPTY + 8 * stage.at, stage.parity ^ 1);
      if (threadIdx.x == 0) {
        barrier_expect(full, (by_a ? 0 : ATile::BYTES) + (by_b ? 0 : BTile::BYTES));
        if (!by_a) {
          box<ATile>(a, x.a, TURNED_A ? t.row : k, TURNED_A ? k : t.row, 0);
        }
        if (!by_b) {
          box<BTile>(b, x.b, TURNED_B ? t.col : k, TURNED_B ? k : t.col, PRODUCT == DW ? 0 : t.expert);
          if (PRODUCT == GLU) {
            box<BTile>(b + BTile::BYTES / 2, x.b, k, x.columns + t.col, t.expert);
          }
        }
      }
      if (by_a) {
        copy<ATile>(a, x.a_rows, a_list, TURNED_A ? t.row : k, x.a_columns);
      }
      if constexpr (PRODUCT == DW) {
        if (by_b) {
          copy<BTile>(b, x.b_rows, b_list, t.col, x.b_columns);
        }
        lists(a_list, b_list, k + BK, t.hi);
      }
      if (PRODUCT == DW || by_a) {
        copies_arrive(full);
      }
      stage.next();
    }
    if (PRODUCT == GLU_DX) {
      load_pairs(t);
    }
  }

  // load_pairs loads steps of gates and ups, in place of a and b.
  __device__ __forceinline__ void load_pairs(const Tile& t) {
    for (int col = t.col; col < t.col + BN; col += 64, stage.next()) {
      const unsigned full = base + Shared::FULL + 8 * stage.at;
      barrier_wait(base + Shared::EMPTY + 8 * stage.at, stage.parity ^ 1);
      if (threadIdx.x == 0) {
        barrier_expect(full, 2 * ATile::BYTES);
        copy_box(base + Shared::A + stage.at * ATile::BYTES, x.c, full, col, t.row, 0, 0);
        copy_box(base + Shared::B + stage.at * BTile::BYTES, x.c, full, col, t.row, 1, 0);
      }
      if (x.a_tokens) {
        copies_arrive(full);
      }
    }
  }
};
