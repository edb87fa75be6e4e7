// What VDPBF16PS, which multiplies pairs of bfloat16 and adds them to float32, makes beside float32's VFMADD231PS, and
// VPDPBUSD for comparison: 24 independent sums of 512 bits, the best of many runs by processor time.
//
//	cc -O2 -o /tmp/bf16 scripts/peer/bf16.c && /tmp/bf16
#include <stdio.h>
#include <time.h>

enum { RUNS = 2000, TURNS = 1000, SUMS = 24 };

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

#define ONE(op, n) op " %%zmm30, %%zmm31, %%zmm" #n "\n"
#define EIGHT(op, a, b, c, d, e, f, g, h)                                                                              \
	ONE(op, a) ONE(op, b) ONE(op, c) ONE(op, d) ONE(op, e) ONE(op, f) ONE(op, g) ONE(op, h)
#define ALL(op)                                                                                                        \
	EIGHT(op, 0, 1, 2, 3, 4, 5, 6, 7) EIGHT(op, 8, 9, 10, 11, 12, 13, 14, 15) EIGHT(op, 16, 17, 18, 19, 20, 21, 22, 23)

// RATE defines a function that returns instructions per nanosecond. The registers are named in the text alone: nothing
// else here uses them.
#define RATE(name, op)                                                                                 \
	static double name(void) {                                                                         \
		double best = 0;                                                                               \
		for (int run = 0; run < RUNS; run++) {                                                         \
			long turns = TURNS;                                                                        \
			double start = now();                                                                      \
			__asm__ volatile("1:\n" ALL(op) "dec %0\njnz 1b\n" : "+r"(turns) : : "cc");                \
			double rate = (double)TURNS * SUMS / (now() - start);                                      \
			best = rate > best ? rate : best;                                                          \
		}                                                                                              \
		return best;                                                                                   \
	}

RATE(singles, "vfmadd231ps")
RATE(pairs, "vdpbf16ps")
RATE(bytes, "vpdpbusd")

int main(void) {
	if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) {
		fprintf(stderr, "bf16: this processor has no AVX512_BF16 or no AVX512_VNNI\n");
		return 1;
	}
	__asm__ volatile("vpxord %zmm30, %zmm30, %zmm30\nvpxord %zmm31, %zmm31, %zmm31\n");
	double f = singles(), p = pairs(), b = bytes();
	printf("instructions/ns: VFMADD231PS %.2f, VDPBF16PS %.2f, VPDPBUSD %.2f\n", f, p, b);
	printf("GFLOP/s: float32 %.0f, bfloat16 %.0f, ratio %.2f\n", 32 * f, 64 * p, 2 * p / f);
	return 0;
}
