// The interface of a kernel, compiled for the host, to run.cpp, which replaces a GPU. A thread of a block is a fiber:
// it runs alone until it waits for others.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct Index { unsigned x, y, z; };
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };

// fail ends the process with a kernel's error and its place.
[[noreturn]] void fail(const char* what, unsigned long long value);

// shared_at returns the host address of an address in shared memory. Its bytes must belong to the block and be aligned.
extern char shared[];
// A thread gets bytes to store to from stored_at, which records the writer.
unsigned shared_address(const void* p);
char* shared_at(unsigned address, unsigned bytes);
char* stored_at(unsigned address, unsigned bytes);

// A cluster of blocks, which store to each other's shared memory. check_there fails if the block of an address may not
// have started, or has ended. start_floats starts a copy of four floats.
unsigned rank_in_cluster();
void cluster_wait();
unsigned address_in(unsigned address, unsigned rank);
void check_there(unsigned address);
void start_floats(unsigned dst, unsigned barrier, const float (&x)[4]);

// A copy to shared memory is performed when its thread waits for it, not earlier.
void start_copy(unsigned dst, const void* src, unsigned bytes, bool valid);
void commit_copies();
void wait_copies(int pending);
void arrive_after_copies(unsigned barrier);

// warp_wait and block_wait return when all threads have called them. Lanes of a warp exchange values through lane_slot.
void warp_wait();
void block_wait();
void* lane_slot(unsigned lane);

inline void __syncthreads() { block_wait(); }
inline void __syncwarp(unsigned = ~0u) { warp_wait(); }

// poll_again lets all others run. A thread that waits for writes of others to global memory calls it through
// __nanosleep, since the others would otherwise wait forever.
void poll_again();
inline void __nanosleep(unsigned) { poll_again(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// A barrier in shared memory; see kernels/gpu/internal/source/hopper.cuh. barrier_wait and other functions that are
// missing here are used from there.
void make_barrier(unsigned barrier, unsigned arrivals);
void make_known();
void forget_barrier(unsigned at);
void arrive(unsigned barrier, long long bytes);
void wait_phase(unsigned barrier, unsigned parity);
void named_wait(int number, int threads, bool waits);

// TensorMap has these words: the address; the sizes of the innermost axis, rows, heads and batch; the strides of rows,
// heads and batch in bytes; the elements and the rows of a box; the size of an element in bytes, and the bytes over
// which its pieces are permuted: 128, 64, or 0 for none. The rest is 0.
struct alignas(64) TensorMap { unsigned long long words[16]; };

// Copies and adds of the engine. A copy occupies its place at once, and is performed when no thread can run without it.
// An add is read when its thread waits for it, and added at the end of the block.
void start_box(unsigned dst, const TensorMap& map, unsigned barrier, const int (&at)[4]);
void start_bytes(unsigned dst, const void* src, unsigned bytes, unsigned barrier);
void start_add_box(const TensorMap& map, unsigned src, const int (&at)[4]);
void start_store_box(const TensorMap& map, unsigned src, const int (&at)[4]);
void start_add_bytes(float* dst, unsigned src, unsigned bytes);
void commit_adds();
void wait_adds(int pending);
void finish_adds();
void raise_number(unsigned* at, unsigned to);
void wait_gate(const unsigned long long* at, unsigned long long count);
unsigned wait_number(const unsigned* at, unsigned to);
void fence_engine();

// Multiplication is a product of a warpgroup. Its operands are matrices as in hopper_panels.cuh; left is A in
// registers, or NULL. It reads shared memory when a thread waits for it. Until then, its sums are NaN.
enum Coding { FP16, BF16, LOW_E4M3, HIGH_E4M3 }; // of a word of an operand; E4M3: its first or second code
struct Multiplication {
  float* sums;
  int count; // number of sums of a thread
  const unsigned* left;
  unsigned long long a, b;
  bool trans_a, trans_b, keep;
  Coding kind; // LOW_E4M3: both codes
};
void begin_products();
void start_product(const Multiplication& m);
void commit_products();
void wait_products(int pending);

// __byte_perm returns the bytes of y:x that the nibbles of select name.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; i++) z |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return z;
}

// exchange returns f over the values of all lanes of the warp. f gets a function that returns a lane's value.
template <class X, class F> auto exchange(const X& mine, F f) {
  static_assert(sizeof(X) <= 64, "a slot has 64 bytes");
  *(X*)lane_slot(threadIdx.x % 32) = mine;
  warp_wait();
  auto y = f([](unsigned lane) -> const X& { return *(const X*)lane_slot(lane); });
  warp_wait();
  return y;
}

template <class X> X __shfl_xor_sync(unsigned, X x, int mask) {
  return exchange(x, [=](auto of) { return of(threadIdx.x % 32 ^ mask); });
}
template <class X> X __shfl_sync(unsigned, X x, int lane) {
  return exchange(x, [=](auto of) { return of(lane % 32); });
}
template <class X> X __shfl_up_sync(unsigned, X x, unsigned by) {
  return exchange(x, [=](auto of) { return of(threadIdx.x % 32 < by ? threadIdx.x % 32 : threadIdx.x % 32 - by); });
}
inline unsigned __match_any_sync(unsigned, int x) {
  return exchange(x, [=](auto of) {
    unsigned same = 0;
    for (int i = 0; i < 32; i++) {
      same |= (unsigned)(of(i) == x) << i;
    }
    return same;
  });
}
template <class X> X __reduce_max_sync(unsigned, X x) {
  return exchange(x, [=](auto of) {
    X y = x;
    for (int i = 0; i < 32; i++) {
      y = y < of(i) ? of(i) : y;
    }
    return y;
  });
}
template <class X> X __reduce_min_sync(unsigned, X x) {
  return exchange(x, [=](auto of) {
    X y = x;
    for (int i = 0; i < 32; i++) {
      y = of(i) < y ? of(i) : y;
    }
    return y;
  });
}
inline bool __any_sync(unsigned, bool x) {
  return exchange(x, [](auto of) {
    bool any = false;
    for (int i = 0; i < 32; i++) {
      any |= of(i);
    }
    return any;
  });
}

inline bool __all_sync(unsigned all, bool x) { return !__any_sync(all, !x); }

// A thread runs alone, so all its operations are atomic.
template <class X, class Y> X atomicAdd(X* p, Y by) {
  X old = *p;
  *p += by;
  return old;
}
inline unsigned atomicMax(unsigned* p, unsigned x) {
  unsigned old = *p;
  *p = old < x ? x : old;
  return old;
}
inline unsigned atomicInc(unsigned* p, unsigned most) {
  unsigned old = *p;
  *p = old >= most ? 0 : old + 1;
  return old;
}
inline unsigned atomicCAS(unsigned* p, unsigned is, unsigned to) {
  unsigned old = *p;
  *p = old == is ? to : old;
  return old;
}
template <class X> X __ldg(const X* p) { return *p; }

inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline float __fdividef(float x, float y) { return x / y; }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float __log2f(float x) { return log2f(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
