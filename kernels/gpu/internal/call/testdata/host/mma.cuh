// The instructions of kernels/gpu/internal/source/mma.cuh as functions on the host.
#pragma once
#include "element.cuh"

inline void hide_value(unsigned&) {}

// mma distributes elements over lanes and registers as in kernels/gpu/internal/source/mma.cuh.
template <class T> void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Held { float a[8], b[4]; } held;
  for (int i = 0; i < 8; i++) {
    held.a[i] = value_of(T{(unsigned short)(a[i / 2] >> i % 2 * 16)});
  }
  for (int i = 0; i < 4; i++) {
    held.b[i] = value_of(T{(unsigned short)((i / 2 ? b1 : b0) >> i % 2 * 16)});
  }
  const int lane = threadIdx.x % 32;
  exchange(held, [&](auto of) {
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2, at = k / 8 * 4 + k % 2;
      const Held &top = of(lane / 4 * 4 + from);
      for (int i = 0; i < 4; i++) {
        c[i] += top.a[at + i / 2 * 2] * of((lane % 4 * 2 + i % 2) * 4 + from).b[k / 8 * 2 + k % 2];
      }
    }
    return 0;
  });
}

inline unsigned smem_address(const void* p) { return shared_address(p); }

inline unsigned short element(unsigned address) {
  unsigned short x;
  memcpy(&x, shared_at(address, 2), 2);
  return x;
}

template <bool TRANS> void load_matrices(unsigned (&d)[4], unsigned address) {
  shared_at(address, 16); // checks that there is a row
  const int lane = threadIdx.x % 32;
  exchange(address, [&](auto of) {
    for (int i = 0; i < 4; i++) {
      unsigned short x[2];
      for (int j = 0; j < 2; j++) {
        int row = lane / 4, col = lane % 4 * 2 + j;
        x[j] = TRANS ? element(of(i * 8 + col) + row * 2) : element(of(i * 8 + row) + col * 2);
      }
      d[i] = x[0] | (unsigned)x[1] << 16;
    }
    return 0;
  });
}
inline void ldmatrix(unsigned (&d)[4], unsigned address) { load_matrices<false>(d, address); }
inline void ldmatrix_trans(unsigned (&d)[4], unsigned address) { load_matrices<true>(d, address); }

inline void store_shared(unsigned address, unsigned x) { memcpy(stored_at(address, 4), &x, 4); }
inline void store_shared(unsigned address, unsigned a, unsigned b) {
  unsigned x[2] = {a, b};
  memcpy(stored_at(address, 8), x, 8);
}
inline void store_shared(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned x[4] = {a, b, c, d};
  memcpy(stored_at(address, 16), x, 16);
}
inline float load_shared(unsigned address) {
  float x;
  memcpy(&x, shared_at(address, 4), 4);
  return x;
}
inline void load_shared(unsigned address, float (&x)[4]) { memcpy(x, shared_at(address, 16), 16); }

inline void copy16(unsigned dst, const void* src, bool valid) { start_copy(dst, src, 16, valid); }
inline void copy4(unsigned dst, const void* src, bool valid) { start_copy(dst, src, 4, valid); }
inline void copies_commit() { commit_copies(); }
template <int PENDING> void copies_wait() { wait_copies(PENDING); }

inline void add_global(float* p, float a) { *p += a; }
inline void add_global4(float* p, float a, float b, float c, float d) {
  if ((uintptr_t)p % 16) {
    fail("four floats are added to an address that is no multiple of 16", (uintptr_t)p);
  }
  p[0] += a, p[1] += b, p[2] += c, p[3] += d;
}
