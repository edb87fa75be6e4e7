// What a kernel compiled for the host asks of run.cpp, in place of a GPU. A thread of a block is a fiber:
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
#define __grid_constant__

struct Index { unsigned x, y, z; };
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct float2 { float x, y; };

// fail ends the process with what a kernel did wrong, and where.
[[noreturn]] void fail(const char* what, unsigned long long value);

// shared_at is where an address in shared memory lies. Its bytes must be the block's, and aligned.
extern char shared[];
unsigned shared_address(const void* p);
char* shared_at(unsigned address, unsigned bytes);

// A copy to shared memory is made when its thread waits for it, and not before.
void start_copy(unsigned dst, const void* src, unsigned bytes, bool valid);
void commit_copies();
void wait_copies(int pending);

// warp_wait and block_wait return when all threads have called them. lane_slot is memory by which the
// lanes of a warp exchange values.
void warp_wait();
void block_wait();
void* lane_slot(unsigned lane);

inline void __syncthreads() { block_wait(); }
inline void __syncwarp() { warp_wait(); }

// exchange is f of what all lanes of the warp have; f gets a function that tells a lane's.
template <class X, class F> auto exchange(const X& mine, F f) {
  static_assert(sizeof(X) <= 64, "a slot has 64 bytes");
  *(X*)lane_slot(threadIdx.x % 32) = mine;
  warp_wait();
  auto y = f([](unsigned lane) -> const X& { return *(const X*)lane_slot(lane); });
  warp_wait();
  return y;
}

inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return exchange(x, [=](auto of) { return of(threadIdx.x % 32 ^ mask); });
}
inline double __shfl_xor_sync(unsigned, double x, int mask) {
  return exchange(x, [=](auto of) { return of(threadIdx.x % 32 ^ mask); });
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

inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __log2f(float x) { return log2f(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
