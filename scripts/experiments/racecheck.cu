// Which handovers through an mbarrier compute-sanitizer's racecheck knows. None of them is a race.
//
//     nvcc -arch=sm_90a -lineinfo -o racecheck racecheck.cu
//     for m in 0 1 2 3 4 5; do compute-sanitizer --tool racecheck ./racecheck $m; done
#include <cstdio>
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(unsigned b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ void arrive(unsigned b) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory");
}
__device__ void expect(unsigned b, int n) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(b), "r"(n) : "memory");
}
__device__ void wait(unsigned b, int parity) {
  asm volatile(
      "{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L;}" ::"r"(b), "r"(parity)
      : "memory");
}
__device__ void bulk(unsigned to, const void* from, int n, unsigned b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(n), "r"(b)
      : "memory");
}
// mode 0: one thread writes and arrives. 1: a warp writes, a lane arrives. 2: a warp writes, all lanes arrive. 3: one
// thread writes, and expects a copy. 4: mode 0, then readers free it, a lane a warp, and it is written again. 5: the
// same, all lanes arrive.
template <int MODE> __global__ void hand(const float* in, float* out) {
  __shared__ alignas(128) float copied[32];
  __shared__ alignas(16) float x[32];
  __shared__ alignas(8) unsigned long long full, empty;
  if (threadIdx.x == 0) {
    init(at(&full), MODE == 2 ? 32 : 1);
    init(at(&empty), MODE == 5 ? 32 : 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (int i = 0; i < (MODE >= 4 ? 2 : 1); i++) {
      if (i) wait(at(&empty), 0);
      if (MODE == 1 || MODE == 2) {
        x[lane] = in[lane];
        __syncwarp();
        if (MODE == 2 || lane == 0) arrive(at(&full));
      } else if (lane == 0) {
        for (int k = 0; k < 32; k++) x[k] = in[k] + i;
        if (MODE == 3) {
          bulk(at(copied), in, 128, at(&full));
          expect(at(&full), 128);
        } else {
          arrive(at(&full));
        }
      }
    }
  } else {
    for (int i = 0; i < (MODE >= 4 ? 2 : 1); i++) {
      wait(at(&full), i);
      out[lane] = x[31 - lane];
      __syncwarp();
      if (MODE == 5 || MODE == 4 && lane == 0) arrive(at(&empty));
    }
  }
}
int main(int n, char** a) {
  float *in, *out;
  cudaMalloc(&in, 128), cudaMalloc(&out, 128), cudaMemset(in, 0, 128);
  switch (a[1][0] - '0') {
    case 0: hand<0><<<1, 64>>>(in, out); break;
    case 1: hand<1><<<1, 64>>>(in, out); break;
    case 2: hand<2><<<1, 64>>>(in, out); break;
    case 3: hand<3><<<1, 64>>>(in, out); break;
    case 4: hand<4><<<1, 64>>>(in, out); break;
    case 5: hand<5><<<1, 64>>>(in, out); break;
  }
  printf("mode %s: %s\n", a[1], cudaGetErrorString(cudaDeviceSynchronize()));
}
