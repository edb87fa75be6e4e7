// The instructions of kernels/gpu/internal/source/hopper_cluster.cuh as functions on the host.
#pragma once
#include "hopper.cuh"

extern "C" const unsigned cluster_blocks = CLUSTER;

inline unsigned cluster_rank() { return rank_in_cluster(); }
inline void cluster_sync() { cluster_wait(); }
inline unsigned in_block(unsigned address, unsigned rank) { return address_in(address, rank); }
inline void send_word(unsigned there, unsigned x) {
  check_there(there);
  store_shared(there, x);
}
inline void send(unsigned there, unsigned barrier, float a, float b, float c, float d) {
  check_there(there);
  start_floats(there, barrier, {a, b, c, d});
}
inline void send_arrive(unsigned barrier) {
  check_there(barrier);
  arrive(barrier, 0);
}
