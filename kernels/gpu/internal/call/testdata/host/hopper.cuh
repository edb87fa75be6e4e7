// The instructions of kernels/gpu/internal/source/hopper.cuh as functions on the host.
#pragma once
#include "mma.cuh"

#include "hopper_panels.cuh"

inline void barrier_init(unsigned barrier, unsigned arrivals) { make_barrier(barrier, arrivals); }
inline void barrier_forget(unsigned barrier) { forget_barrier(barrier); }
inline void barriers_ready() { make_known(); }
inline void barrier_arrive(unsigned barrier) { arrive(barrier, 0); }
inline void barrier_expect(unsigned barrier, unsigned bytes) { arrive(barrier, bytes); }
inline void barrier_wait(unsigned barrier, unsigned parity) { wait_phase(barrier, parity); }

inline void copy_box(unsigned dst, const TensorMap& map, unsigned barrier, int element, int row, int head, int batch) {
  start_box(dst, map, barrier, {element, row, head, batch});
}
inline void copy_bytes(unsigned dst, const void* src, unsigned bytes, unsigned barrier) {
  start_bytes(dst, src, bytes, barrier);
}
inline void add_bytes(float* dst, unsigned src, unsigned bytes) { start_add_bytes(dst, src, bytes); }
inline void add_box(const TensorMap& map, unsigned src, int element, int row, int head, int batch) {
  start_add_box(map, src, {element, row, head, batch});
}
inline void adds_commit() { commit_adds(); }
template <int PENDING> void adds_wait() { wait_adds(PENDING); }
inline void adds_finish() { finish_adds(); }
inline void raise(unsigned* at, unsigned to) { raise_number(at, to); }
inline unsigned raised(const unsigned* at) { return *at; }
inline unsigned wait_raised(const unsigned* at, unsigned to, unsigned polls) {
  return polls ? *at : wait_number(at, to);
}
inline void report(int* to, int a, int b, int c, int d) {
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  fail("a block waits for one that no block has taken, or that ends before it came to its turn; keys", a - 1);
}
inline void wait_open(const unsigned long long* at, unsigned long long count) { wait_gate(at, count); }
inline void shared_for_engine() { fence_engine(); }

inline void some_sync(int number, int threads) { named_wait(number, threads, true); }
inline void all_sync(int threads) { named_wait(0, threads, true); }
inline void some_arrive(int number, int threads) { named_wait(number, threads, false); }

template <int COUNT> void wg_registers_fewer() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "registers");
}
template <int COUNT> void wg_registers_more() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "registers");
}

inline void wg_begin() { begin_products(); }
inline void wg_commit() { commit_products(); }
template <int PENDING> void wg_wait() { wait_products(PENDING); }
template <int N> void hold(float (&)[N]) {}
template <int N> void hold(unsigned (&)[N]) {}
template <class T, int N, int M> void hold(T (&)[N][M]) {}

inline constexpr Coding kind(bf16_t) { return BF16; }
inline constexpr Coding kind(fp16_t) { return FP16; }

// there_is checks that kernels/gpu/internal/source/hopper.cuh has a product with this number of floats per thread.
inline constexpr bool there_is(int half) {
  return half == 8 || half == 12 || half == 16 || half == 24 || half == 32 || half == 40 || half == 48 || half == 64 ||
      half == 88 || half == 96 || half == 128;
}
template <class T, bool TRANS_A, bool TRANS_B, int HALF>
void wg_multiply(float (&c)[HALF], unsigned long long a, unsigned long long b, bool keep) {
  static_assert(there_is(HALF), "width");
  start_product({c, HALF, nullptr, a, b, TRANS_A, TRANS_B, keep, kind(T())});
}
template <class T, bool TRANS_B, int HALF>
void wg_multiply(float (&c)[HALF], const unsigned (&a)[4], unsigned long long b, bool keep) {
  static_assert(there_is(HALF), "width");
  start_product({c, HALF, a, 0, b, false, TRANS_B, keep, kind(T())});
}

template <bool TRANS> void store_matrices(unsigned address, const unsigned (&d)[4]) {
  shared_at(address, 16); // checks that there is a row
  const int lane = threadIdx.x % 32;
  exchange(address, [&](auto of) {
    for (int i = 0; i < 4; i++) {
      for (int j = 0; j < 2; j++) {
        int row = lane / 4, col = lane % 4 * 2 + j;
        unsigned short x = d[i] >> j * 16;
        memcpy(stored_at(TRANS ? of(i * 8 + col) + row * 2 : of(i * 8 + row) + col * 2, 2), &x, 2);
      }
    }
    return 0;
  });
}
inline void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  store_matrices<false>(address, {a, b, c, d});
}
inline void stmatrix_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  store_matrices<true>(address, {a, b, c, d});
}

inline void load_shared_pair(unsigned address, float& x, float& y) {
  float z[2];
  memcpy(z, shared_at(address, 8), 8);
  x = z[0], y = z[1];
}
inline void load_shared_words(unsigned address, int& a, int& b, int& c, int& d) {
  int x[4];
  memcpy(x, shared_at(address, 16), 16);
  a = x[0], b = x[1], c = x[2], d = x[3];
}
