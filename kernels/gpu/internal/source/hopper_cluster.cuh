// Clusters of blocks, which access each other's shared memory; functions as in hopper.cuh. Tests run kernels without a
// GPU, with other definitions of these functions.
#pragma once
#include "hopper.cuh"

// cluster_rank returns the number of the block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// cluster_sync does what __syncthreads does, for all threads of the cluster; lanes of a warp may diverge.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// in_block returns the address at which the cluster sees an address of the shared memory of a block. It must have
// started, and not ended, when others access it.
__device__ __forceinline__ unsigned in_block(unsigned address, unsigned rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// send_word stores a word to another block. send starts a store of four floats, whose 16 bytes count for a barrier of
// that block. send_arrive arrives at one.
__device__ __forceinline__ void send_word(unsigned there, unsigned x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
}
__device__ __forceinline__ void send(unsigned there, unsigned barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(there),
      "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}
__device__ __forceinline__ void send_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
