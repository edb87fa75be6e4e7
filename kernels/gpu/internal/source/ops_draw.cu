// Random numbers of a normal distribution, the same as of the host: math/rand/v2 with a PCG, see kernels.Normals.
//
// PCG-DXSM (O'Neill, pcg-random.org) is linear in its state, so a warp computes the next 32 words at once. The ziggurat
// (Marsaglia and Tsang, doi:10.18637/jss.v005.i08) makes a number of a word in 98.8 % of cases. The first lane where it
// does not takes further words, and the warp goes on after those.
#include "ops.cuh"

// Strips holds the tables of the ziggurat, and Normals the sequence.
struct Strips {
  unsigned k[128];
  float w[128], f[128];
};
struct Normals {
  long long seed, stream, step; // a block begins with the state seed, stream + block * step, modulo 2^64
  long long lo, n;              // the first element, and their number
  double std;
};

constexpr int BLOCK = 1 << 16;         // elements of a generator
constexpr double EDGE = 3.442619855899; // where the tail begins

// A Wide is an integer of 128 bits.
struct Wide { unsigned long long hi, lo; };

__device__ __forceinline__ Wide times(Wide a, Wide b) {
  return {__umul64hi(a.lo, b.lo) + a.hi * b.lo + a.lo * b.hi, a.lo * b.lo};
}
__device__ __forceinline__ Wide plus(Wide a, Wide b) {
  const unsigned long long lo = a.lo + b.lo;
  return {a.hi + b.hi + (lo < a.lo), lo};
}
__device__ __forceinline__ Wide of_lane(Wide a, int lane) {
  return {__shfl_sync(~0u, a.hi, lane), __shfl_sync(~0u, a.lo, lane)};
}

// The state goes from s to s * FACTOR + SUMMAND, and word is its output.
constexpr Wide FACTOR = {0x2360ed051fc65da4, 0x4385df649fccf645},
               SUMMAND = {0x5851f42d4c957f2d, 0x14057b7ef767814f};
__device__ __forceinline__ unsigned long long word(Wide s) {
  s.hi = (s.hi ^ s.hi >> 32) * 0xda942042e4dd58b5;
  return (s.hi ^ s.hi >> 48) * (s.lo | 1);
}
__device__ __forceinline__ double uniform(Wide& s) {
  s = plus(times(s, FACTOR), SUMMAND);
  return (double)(word(s) & (1ull << 53) - 1) * 0x1p-53;
}

// beyond takes further words for a number that a strip does not decide. It returns false if there is none. As on the
// host, no product is fused with a sum.
__device__ __forceinline__ bool beyond(Wide& s, const Strips& t, int j, int i, double& x) {
  if (i > 0) {
    const float y = __fadd_rn(t.f[i], __fmul_rn((float)uniform(s), __fsub_rn(t.f[i - 1], t.f[i])));
    return y < (float)exp(__dmul_rn(__dmul_rn(-0.5, x), x));
  }
  double y;
  do {
    x = __dmul_rn(-log(uniform(s)), 1 / EDGE);
    y = -log(uniform(s));
  } while (y + y < __dmul_rn(x, x));
  x = j > 0 ? EDGE + x : -EDGE - x;
  return true;
}

// draw sets elements lo to lo + n of the sequence. A warp draws a block.
template <class T> __device__ __forceinline__ void draw(T* to, const Strips& strips, const Normals& a) {
  __shared__ Strips t;
  for (int i = threadIdx.x; i < 128; i += blockDim.x) t.k[i] = strips.k[i], t.w[i] = strips.w[i], t.f[i] = strips.f[i];
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const long long block = a.lo / BLOCK + (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const long long first = block * BLOCK - a.lo, end = min(a.n - first, (long long)BLOCK); // from the first one of to
  Wide factor = FACTOR, summand = SUMMAND; // from the state before the first lane to that of this lane
  for (int i = 0; i < lane; i++) factor = times(factor, FACTOR), summand = plus(times(summand, FACTOR), SUMMAND);
  Wide s = {(unsigned long long)a.seed, a.stream + (unsigned long long)block * a.step};
  for (long long at = 0; at < end;) {
    Wide own = plus(times(s, factor), summand);
    const unsigned long long u = word(own);
    const int j = (int)(unsigned)u, i = u >> 32 & 127;
    double x = __dmul_rn((double)j, (double)t.w[i]);
    const bool quick = (j < 0 ? 0u - j : (unsigned)j) < t.k[i];
    const unsigned others = __ballot_sync(~0u, !quick);
    const int count = others ? __ffs(others) - 1 : 32; // lanes before the first that needs more words
    bool made = lane < count;
    if (lane == count) made = beyond(own, t, j, i, x);
    if (made && at + lane < end && first + at + lane >= 0) to[first + at + lane] = from_float<T>((float)(x * a.std));
    s = of_lane(own, min(count, 31));
    at += count + (others && __shfl_sync(~0u, made, count & 31));
  }
}

#define DRAW(NAME, T)                                                                                     \
  extern "C" __global__ void __launch_bounds__(128) draw_##NAME(T* to, Strips strips, Normals a) {        \
    draw<T>(to, strips, a);                                                                               \
  }

DRAW(fp32, float)
DRAW(bf16, bf16_t)
DRAW(fp16, fp16_t)
