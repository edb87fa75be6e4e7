// Gates of keys and values that arrive while a kernel runs. The loading thread waits for them.
#pragma once
#include "hopper.cuh"

// A Gate is open when the number at an address has reached count; see wait_open. Both are two words, the lower one
// first, since lists are aligned to four bytes. One block polls the number, which may be far away: many readers would
// delay the copies. The others poll asked.
struct Gate { unsigned at[2], count[2], asked, unused; };
constexpr unsigned NOBODY = 0, SOMEBODY = 1, OPEN = 2; // asked

// pass_gates waits for the gates of a block of own rows. needs has a word for each block, with bit i for gate i; NULL:
// all keys have arrived. passed has the bits of the gates for which this thread has already waited.
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
