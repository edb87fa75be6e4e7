// Keys and values that are on their way when a kernel begins. The thread that loads waits for them.
#pragma once
#include "hopper.cuh"

// Gate is open when the number at an address has come to count; see wait_open. Each has two words, the lower one first,
// as lists are aligned to four bytes. One block reads it, as it may be far away, and many readers would delay the
// copies. The others read asked.
struct Gate { unsigned at[2], count[2], asked, unused; };
constexpr unsigned NOBODY = 0, SOMEBODY = 1, OPEN = 2; // asked

// pass_gates waits for the gates of a block of own rows. needs has a word for each block, with bit i for gate i; NULL:
// all keys are there. passed has the bits that this thread has waited for before.
__device__ __forceinline__ void pass_gates(const unsigned* needs, Gate* gates, int block, unsigned& passed) {
  if (!needs) {
    return;
  }
  for (unsigned left = needs[block] & ~passed; left; left &= left - 1) {
    Gate& g = gates[__ffs(left) - 1];
    if (atomicCAS(&g.asked, NOBODY, SOMEBODY) == NOBODY) {
      const unsigned long long at = (unsigned long long)g.at[1] << 32 | g.at[0],
                               count = (unsigned long long)g.count[1] << 32 | g.count[0];
      wait_open((const unsigned long long*)at, count);
      raise(&g.asked, OPEN);
    } else {
      wait_raised(&g.asked, OPEN, 0);
    }
    passed |= left & -left;
  }
}
