// More instructions of Hopper, beside those of hopper.cuh, one function each. Tests run kernels without a GPU, with
// other definitions of these functions.
#pragma once
#include "hopper.cuh"

// copy16_line does what copy16 of mma.cuh does, and the L2 reads the whole line of 128 bytes.
__device__ __forceinline__ void copy16_line(unsigned dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
      : "memory");
}

// copies_arrive arrives once the earlier copies of 16 bytes of this thread have ended. A thread that has waited for the
// barrier must call shared_for_engine before wgmma reads them.
__device__ __forceinline__ void copies_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// store_box stores a box, as one of the adds of add_box.
__device__ __forceinline__ void store_box(
    const TensorMap& map, unsigned src, int element, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(src),
      "r"(element), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

#define WG_E4M3(N, HALF, I0, I1, I2) \
  __device__ __forceinline__ void wg_multiply_e4m3( \
      float (&c)[HALF], unsigned long long a, unsigned long long b, bool keep) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" TEXT( \
        I2) ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" TEXT(N) "k32.f32.e4m3.e4m3 {" P_##HALF "}, %" TEXT(I0) ", %" TEXT( \
                I1) ", p, 1, 1;\n}" \
        : F_##HALF \
        : "l"(a), "l"(b), "r"((int)keep)); \
  }
// wg_multiply_e4m3 starts c = A B, or c += A B with keep, of matrices in E4M3: 64 by N, over 32. In shared memory, A is
// [m][k] and B [n][k].
WG_E4M3(64, 32, 32, 33, 34)
WG_E4M3(192, 96, 96, 97, 98)
WG_E4M3(256, 128, 128, 129, 130)
