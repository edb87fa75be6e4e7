// How warps of the kernels for Hopper say that they have done with something.
//
// Compiled with EVERY_LANE.
#pragma once

// LANES is how many lanes of a warp arrive where it has done with something: one for all, after __syncwarp. With
// EVERY_LANE all do, for tests: compute-sanitizer's racecheck takes an arrival to be of the thread's own accesses
// alone.
constexpr int LANES = EVERY_LANE ? 32 : 1;
__device__ __forceinline__ bool arrives_for_warp() { return EVERY_LANE || threadIdx.x % 32 == 0; }
