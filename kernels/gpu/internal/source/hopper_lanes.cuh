// Arrivals of the warps of the kernels for Hopper at barriers.
//
// Compiled with EVERY_LANE.
#pragma once

// LANES is the number of lanes of a warp that arrive when the warp has finished: one for all, after __syncwarp. With
// EVERY_LANE, all arrive, for tests: compute-sanitizer's racecheck attributes an arrival only to the thread's own
// accesses.
constexpr int LANES = EVERY_LANE ? 32 : 1;
__device__ __forceinline__ bool arrives_for_warp() { return EVERY_LANE || threadIdx.x % 32 == 0; }
