// Pairs of tokens and experts.
#pragma once

// Pairs has the arguments of kernels.Pairs: count pairs of a token and one of its chosen experts, sorted by expert.
struct Pairs {
  const int *tokens, *places, *starts; // the token of a place; the place of a pair; an expert's first place
  int count, chosen, experts, unused;

  // expert returns the expert of a place: the last one that starts at or before it.
  __device__ __forceinline__ int expert(int place) const {
    int lo = 0, hi = experts;
    while (hi - lo > 1) {
      int middle = (lo + hi) / 2;
      if (__ldg(starts + middle) <= place) {
        lo = middle;
      } else {
        hi = middle;
      }
    }
    return lo;
  }

  // pair returns the pair at a place.
  __device__ __forceinline__ int pair(int place) const {
    int i = __ldg(tokens + place) * chosen;
    while (__ldg(places + i) != place) i++;
    return i;
  }
};
