// Products of rows that are sorted by expert, for Hopper. Places starts[e] to starts[e + 1] belong to expert e, whose
// weights are rows of a stacked matrix. With PRODUCT
//   FORWARD: out[i] = a[i] W_e', b = W with columns rows of each expert,
//   DX:      out[i] = a[i] W_e, b = W with depth rows of each expert,
//   DW:      out_e = the sum of a[i]' b[i] over the places i of the expert, in float32, or the transpose,
//   GLU:     FORWARD, and gated = silu(gate) * up of the halves of the columns of out,
//   GLU_DX:  DX without storing its result da. With y = silu(gate) * up and its gradient w * da, the gradients replace
//            gates and ups in out, and gated = w * y.
// With tokens, a[i] or b[i] is the row of the token at place i.
//
// The grid is as large as the GPU. Its blocks take tiles of BM by BN from a counter, and find them from starts, expert
// by expert; of an expert, bands of BAND rows of tiles, column by column, so that concurrent blocks share rows and
// weights in the L2. A block has two consumer warpgroups, which take 64 rows of a tile each and skip them if there are
// none, and a warpgroup that loads steps of BK of the sum, up to STAGES ahead: with TMA or, for rows of tokens, with
// copies of 16 bytes that put pieces where TMA would.
//
// Other experts' rows are never added, since 0 times NaN is NaN: maps of W have an axis of experts, beyond whose rows
// TMA copies zeros, and DW loads the last places of an expert as rows of tokens. The map of gates and ups has an axis
// of two for the same reason.
//
// A tile of GLU has the gates and ups of BN / 2 columns. GLU_DX loads the gates and ups of a tile as further steps, so
// they arrive before its products end.
//
// With SCALED, a and W are in E4M3, with the sum along rows of both: GLU_DX takes transposed matrices, and FORWARD with
// these is DX. A word of 16 bits has two codes, and depth, a_columns and b_columns count words. Results are multiplied
// by the factors of their rows of a and, unless there are none, of W.
//
// Compiled with PRODUCT, SCALED, BN and STAGES.
#include "hopper_group.cuh"

// products starts the products of a step.
template <class T>
__device__ __forceinline__ void products(float (&c)[HALF], unsigned base, const Stage& stage, int row, bool keep) {
  const unsigned a = base + Shared::A + stage.at * ATile::BYTES, b = base + Shared::B + stage.at * BTile::BYTES;
#pragma unroll
  for (int i = 0; i < BK; i += 16) {
    const unsigned long long x = TURNED_A ? ATile::across(a, i, row) : ATile::along(a, row, i),
                             y = TURNED_B ? BTile::across(b, i) : BTile::along(b, 0, i);
    if constexpr (SCALED) {
      wg_multiply_e4m3(c, x, y, keep || i > 0);
    } else {
      wg_multiply<T, TURNED_A, TURNED_B>(c, x, y, keep || i > 0);
    }
  }
  wg_commit();
}

// A Block of a matrix in memory has 16 rows of a warp since a place, and 64 columns. Each lane copies pieces of four.
struct Block {
  Stored* at;
  long long columns;
  int first, end; // rows

  __device__ __forceinline__ Block(
      const HopperGroup& x, Stored* matrix, int columns, const Tile& t, int first, int col)
      : columns(columns), first(first + threadIdx.x % 32 / 8) {
    col += threadIdx.x % 8 * 8;
    at = matrix + this->first * this->columns + col;
    end = col < x.columns ? t.hi : 0;
  }

  // load copies it to a panel in shared memory, with 0 outside of the matrix; store copies it from there.
  __device__ __forceinline__ void load(unsigned panel) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 x = first + 4 * i < end ? *(const uint4*)(at + 4 * i * columns) : uint4{0, 0, 0, 0};
      store_shared(panel + piece(i), x.x, x.y, x.z, x.w);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void store(unsigned panel) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int4 x;
      load_shared_words(panel + piece(i), x.x, x.y, x.z, x.w);
      if (first + 4 * i < end) {
        *(int4*)(at + 4 * i * columns) = x;
      }
    }
    __syncwarp();
  }
  static __device__ __forceinline__ unsigned piece(int i) {
    return OutTile::offset(threadIdx.x % 32 / 8 + 4 * i, threadIdx.x % 8 * 8);
  }
};

// fragment returns a lane's address of a warp's matrices in a panel.
__device__ __forceinline__ unsigned fragment(unsigned panel) {
  return panel + OutTile::offset(threadIdx.x % 16, threadIdx.x % 32 / 16 * 8);
}

// store_panel writes 64 columns of c in 16 bits.
template <class T> __device__ __forceinline__ void store_panel(unsigned panel, const float* c, const Block& to) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float* y = c + 8 * j;
    stmatrix(fragment(panel) ^ 32 * j, pack<T>(y[0], y[1]), pack<T>(y[2], y[3]), pack<T>(y[4], y[5]),
        pack<T>(y[6], y[7]));
  }
  to.store(panel);
}

// rounded rounds two products as if they were stored, so that an activation has the bits that it has in its own kernel.
template <class T> __device__ __forceinline__ void rounded(const float* c, float (&x)[2]) {
  unpack<T>(pack<T>(c[0], c[1]), x[0], x[1]);
}

// store writes a warp's rows of a tile. c of GLU has gates, then ups.
template <class T>
__device__ __forceinline__ void store(
    const HopperGroup& x, unsigned panel, float (&c)[HALF], const Tile& t, int first) {
#pragma unroll
  for (int p = 0; p < BN / 64; p++) {
    const bool up = PRODUCT == GLU && p >= BN / 128;
    const int col = t.col + 64 * (up ? p - BN / 128 : p);
    if (col >= x.columns) {
      continue;
    }
    const Block to(x, x.out + (up ? x.columns : 0), PRODUCT == GLU ? 2 * x.columns : x.columns, t, first, col);
    if (x.accumulate) {
      to.load(panel);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned old[4];
        ldmatrix(old, fragment(panel) ^ 32 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float lo, hi;
          unpack<T>(old[i], lo, hi);
          c[32 * p + 8 * j + 2 * i] += lo, c[32 * p + 8 * j + 2 * i + 1] += hi;
        }
      }
    }
    store_panel<T>(panel, c + 32 * p, to);
    if (up) {
      float* y = c + 32 * (p - BN / 128);
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        float g[2], u[2];
        rounded<T>(y + i, g), rounded<T>(c + 32 * p + i, u);
        y[i] = SiLU<T>::at(g[0]).value * u[0], y[i + 1] = SiLU<T>::at(g[1]).value * u[1];
      }
      store_panel<T>(panel, y, Block(x, x.gated, x.columns, t, first, col));
    }
  }
}

// store_floats writes a warp's rows of a tile in float32.
__device__ __forceinline__ void store_floats(const HopperGroup& x, const float (&c)[HALF], const Tile& t, int first) {
#pragma unroll
  for (int i = 0; i < HALF; i += 2) {
    const int row = first + threadIdx.x % 32 / 4 + i / 2 % 2 * 8, col = t.col + i / 4 * 8 + threadIdx.x % 4 * 2;
    if (row < t.hi && col < x.columns) {
      *(float2*)((float*)x.out + (long long)row * x.columns + col) = float2{c[i], c[i + 1]};
    }
  }
}

// store_gradients writes a warp's rows of GLU_DX, given da in c. Results replace gates and ups in shared memory first.
template <class T>
__device__ __forceinline__ void store_gradients(
    const HopperGroup& x, unsigned base, unsigned panel, float (&c)[HALF], const Tile& t, int row, Stage& stage) {
  const int place = t.row + row + threadIdx.x % 32 / 4;
  const float w[2] = {place < t.hi ? x.weights[place] : 0, place + 8 < t.hi ? x.weights[place + 8] : 0};
  float sums[2] = {};
#pragma unroll
  for (int p = 0; p < BN / 64; p++, stage.next()) {
    const unsigned gates = base + Shared::A + stage.at * ATile::BYTES + row * 128,
                   ups = base + Shared::B + stage.at * BTile::BYTES + row * 128;
    const int col = t.col + 64 * p;
    barrier_wait(base + Shared::FULL + 8 * stage.at, stage.parity);
    if (col < x.columns) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned gate[4], up[4], y[4];
        ldmatrix(gate, fragment(gates) ^ 32 * j);
        ldmatrix(up, fragment(ups) ^ 32 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float d[2], g[2], u[2], z[2];
          rounded<T>(c + 32 * p + 8 * j + 2 * i, d);
          unpack<T>(gate[i], g[0], g[1]), unpack<T>(up[i], u[0], u[1]);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            z[k] = SiLU<T>::at(g[k]).value * u[k];
            sums[i % 2] = fmaf(d[k], z[k], sums[i % 2]);
            d[k] *= w[i % 2], z[k] *= w[i % 2];
          }
          gradient<SiLU<T>>(d, g, u);
          gate[i] = pack<T>(g[0], g[1]), up[i] = pack<T>(u[0], u[1]), y[i] = pack<T>(z[0], z[1]);
        }
        stmatrix(fragment(gates) ^ 32 * j, gate[0], gate[1], gate[2], gate[3]);
        stmatrix(fragment(ups) ^ 32 * j, up[0], up[1], up[2], up[3]);
        stmatrix(fragment(panel) ^ 32 * j, y[0], y[1], y[2], y[3]);
      }
      const int first = t.row + row;
      Block(x, x.out, 2 * x.columns, t, first, col).store(gates);
      Block(x, x.out + x.columns, 2 * x.columns, t, first, col).store(ups);
      Block(x, x.gated, x.columns, t, first, col).store(panel);
      shared_for_engine(); // TMA writes there next
    }
    leave(base + Shared::EMPTY + 8 * stage.at);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float sum = group_sum(sums[i], 4);
    if (threadIdx.x % 4 == 0 && place + 8 * i < t.hi) {
      x.sums[(long long)(t.col / BN) * x.places + place + 8 * i] = sum;
    }
  }
}

// store_weights writes or adds 16 rows of a warp of an expert's dw with TMA, by two panels of 32 columns in turn. A
// panel has 16 rows of 128 bytes or, turned, 32 of 64, with pieces where TMA looks for them.
__device__ __forceinline__ void store_weights(
    const HopperGroup& x, unsigned panels, const float (&c)[HALF], const Tile& t, int first) {
  const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
#pragma unroll
  for (int p = 0; p < BN / 32; p++) {
    const int col = t.col + 32 * p;
    if (col >= x.columns || first >= x.rows) {
      break;
    }
    const unsigned panel = panels + p % 2 * OutTile::BYTES;
    if (lane == 0) {
      p == 0 ? adds_wait<0>() : adds_wait<1>(); // the last tile may have ended with either panel
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* y = c + 16 * p + 4 * j;
      if (x.turned) {
        const unsigned at = panel + (8 * j + 2 * pair) * 64 + row % 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          store_shared(at + i % 2 * 64 + ((row / 4 + i / 2 * 2 ^ pair) << 4), __float_as_uint(y[i]));
        }
      } else {
        const unsigned at = panel + row * 128 + ((2 * j + pair / 2 ^ row) << 4) + pair % 2 * 8;
        store_shared(at, __float_as_uint(y[0]), __float_as_uint(y[1]));
        store_shared(at + 1024, __float_as_uint(y[2]), __float_as_uint(y[3]));
      }
    }
    shared_for_engine();
    __syncwarp();
    if (lane == 0) {
      if (x.accumulate) {
        add_box(x.c, panel, x.turned ? first : col, x.turned ? col : first, 0, t.expert);
      } else {
        store_box(x.c, panel, x.turned ? first : col, x.turned ? col : first, 0, t.expert);
      }
      adds_commit();
    }
  }
}

// clear_weights sets them to 0.
__device__ __forceinline__ void clear_weights(const HopperGroup& x, const Tile& t, int first) {
  const int rows = min(16, x.rows - first), columns = min(BN, x.columns - t.col);
  float* dw = (float*)x.out + (long long)t.expert * x.rows * x.columns;
  for (int i = threadIdx.x % 32; i < rows * columns; i += 32) {
    x.turned ? dw[(long long)(t.col + i / rows) * x.rows + first + i % rows] = 0
             : dw[(long long)(first + i / columns) * x.columns + t.col + i % columns] = 0;
  }
}

// scale multiplies a warp's products by their factors.
__device__ __forceinline__ void scale(float (&c)[HALF], const float (&rows)[2], unsigned columns) {
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    c[i] *= rows[i / 2 % 2];
  }
  if (columns) {
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
      float x, y;
      load_shared_pair(columns + 8 * i + threadIdx.x % 4 * 8, x, y);
      c[i] *= x, c[i + 1] *= y, c[i + 2] *= x, c[i + 3] *= y;
    }
  }
}

// consume computes and stores a warpgroup's rows of a tile.
template <class T>
__device__ __forceinline__ void consume(
    const HopperGroup& x, unsigned base, const Tile& t, Stage& stage, unsigned factors) {
  const int warp = threadIdx.x / 32 - 4, row = warp / 4 * 64, steps = steps_of(x, t);
  if (t.row + row >= (PRODUCT == DW ? x.rows : t.hi)) {
    for (int step = PRODUCT == GLU_DX ? -BN / 64 : 0; step < steps; step++, stage.next()) {
      barrier_wait(base + Shared::FULL + 8 * stage.at, stage.parity);
      leave(base + Shared::EMPTY + 8 * stage.at);
    }
    return;
  }
  if (PRODUCT == DW && steps == 0) { // an expert without places
    if (!x.accumulate) {
      clear_weights(x, t, t.row + warp * 16);
    }
    return;
  }
  float c[HALF], rows[2] = {};
  if (SCALED) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int place = t.row + warp * 16 + threadIdx.x % 32 / 4 + 8 * i;
      if (place < t.hi) {
        rows[i] = __ldg(x.a_factors + (x.a_tokens ? __ldg(x.a_tokens + place) : place));
      }
    }
  }
  Stage before = stage;
  barrier_wait(base + Shared::FULL + 8 * stage.at, stage.parity);
  shared_for_engine(); // the copies of other threads have arrived
  wg_begin();
  products<T>(c, base, stage, row, false);
  stage.next();
  for (int step = 1; step < steps; step++, stage.next()) {
    barrier_wait(base + Shared::FULL + 8 * stage.at, stage.parity);
    shared_for_engine();
    wg_begin();
    products<T>(c, base, stage, row, true);
    wg_wait<1>();
    leave(base + Shared::EMPTY + 8 * before.at);
    before = stage;
  }
  wg_wait<0>();
  leave(base + Shared::EMPTY + 8 * before.at);
  hold(c);
  if (SCALED) {
    scale(c, rows, factors);
  }
  if constexpr (sizeof(T) == 4) {
    store_floats(x, c, t, t.row + warp * 16);
  } else if constexpr (PRODUCT == DW) {
    store_weights(x, base + Shared::OUT + warp * 2 * OutTile::BYTES, c, t, t.row + warp * 16);
  } else if constexpr (PRODUCT == GLU_DX) {
    store_gradients<T>(x, base, base + Shared::OUT + warp * OutTile::BYTES, c, t, warp * 16, stage);
  } else {
    store<T>(x, base + Shared::OUT + warp * OutTile::BYTES, c, t, t.row + warp * 16);
  }
}

template <class T> __device__ __forceinline__ void group(const HopperGroup& x) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = smem_address(shared);
  int* starts = (int*)(shared + Shared::STARTS);
  for (int i = threadIdx.x; i <= x.experts; i += THREADS) {
    starts[i] = x.starts[i];
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + Shared::FULL + 8 * i, PRODUCT == DW || x.a_tokens ? 129 : 1); // that of the bytes, and copies
      barrier_init(base + Shared::EMPTY + 8 * i, 4 * GROUPS);
    }
    for (int i = 0; i < TILES; i++) {
      barrier_init(base + Shared::TOLD + 8 * i, 1);
      barrier_init(base + Shared::READ + 8 * i, 4 * (GROUPS + 1));
    }
    barriers_ready();
  }
  __syncthreads();
  Turn<TILES> turn;
  if (threadIdx.x < 128) {
    wg_registers_fewer<88>();
    Finder finder{x, starts, base, 0, 0, {0, starts[0], starts[1]}};
    if (threadIdx.x == 0) {
      finder.tell(blockIdx.x);
    }
    for (Loader loader{x, base};;) {
      const Tile t = take(base, turn);
      pass(base, turn);
      if (t.expert < 0) {
        return;
      }
      if (threadIdx.x == 0) {
        finder.tell(gridDim.x + finder.next);
      }
      __syncwarp();
      loader.load(t);
    }
  }
  wg_registers_more<208>();
  for (Stage stage;;) {
    const unsigned factors = x.b_factors ? base + Shared::FOUND + TILE_BYTES * turn.at + 32 : 0;
    const Tile t = take(base, turn);
    if (!SCALED) {
      pass(base, turn);
    }
    if (t.expert < 0) {
      break;
    }
    consume<T>(x, base, t, stage, factors);
    if (SCALED) {
      pass(base, turn);
    }
  }
  if (PRODUCT == DW && threadIdx.x % 32 == 0) {
    adds_finish();
  }
}

#define ENTRY(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) \
      hopper_group_##name(const __grid_constant__ HopperGroup x) { \
    group<T>(x); \
  }
ENTRY(bf16, bf16_t)
ENTRY(fp16, fp16_t)
#if SCALED && PRODUCT == 0 // FORWARD
ENTRY(fp32, float)
#endif
