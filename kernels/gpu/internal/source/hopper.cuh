// The instructions of sm_90a that attention on Hopper uses, one function each: barriers in shared memory, the
// copy engine (TMA), and products by warpgroups (wgmma). The kernels themselves are ordinary C++. Tests run
// them without a GPU, with other definitions of these functions.
//
// A warpgroup is four warps; the number of its first is a multiple of four. All its threads must call the functions
// that begin with wg_.
#pragma once
#include "hopper_panels.cuh"
#include "mma.cuh"

// A TensorMap describes a tensor in memory to TMA. The host makes it.
struct alignas(64) TensorMap { unsigned long long words[16]; };

// A barrier is 8 bytes of shared memory. Its phase ends after the initialised number of arrivals and all
// expected bytes; then the next phase begins. The phases have parities 0, 1, 0...

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// barrier_forget ends a barrier, so that another can use its memory. No thread may wait for it.
__device__ __forceinline__ void barrier_forget(unsigned barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// barriers_ready makes this thread's new barriers visible to TMA. A barrier of the block must
// follow it.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// barrier_expect arrives, and makes the phase wait for this number of bytes from TMA.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// barrier_wait returns when the phase of that parity has ended. For a new barrier, the phase
// of parity 1 has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n" // not bra.uni: lanes may see different phases
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// copy_box starts a TMA copy of a box of a tensor to shared memory, and adds its bytes to the barrier. The box begins
// at an element of the innermost axis, a row, a head and a batch. Elements outside the tensor are 0.
__device__ __forceinline__ void copy_box(
    unsigned dst, const TensorMap& map, unsigned barrier, int element, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(element), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// copy_bytes starts a copy of bytes, a multiple of 16 between such addresses, to shared memory.
__device__ __forceinline__ void copy_bytes(unsigned dst, const void* src, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// add_bytes starts adding floats in shared memory to those in global memory, each with an atomic.
// adds_commit ends a group of them. adds_wait waits until all groups except the last PENDING have been read
// from shared memory.
__device__ __forceinline__ void add_bytes(float* dst, unsigned src, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
      : "memory");
}
// add_box does the same for a box, and skips elements outside the tensor.
__device__ __forceinline__ void add_box(const TensorMap& map, unsigned src, int element, int row, int head, int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(src), "r"(element), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void adds_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void adds_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// adds_finish waits until all are in global memory.
__device__ __forceinline__ void adds_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// raise sets a number in global memory, by which a block publishes its progress. After raised or wait_raised returns
// the number, another thread sees all earlier writes of this thread, its finished adds included.
__device__ __forceinline__ void raise(unsigned* at, unsigned to) {
  asm volatile("fence.proxy.async.global;\nst.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(to) : "memory");
}
__device__ __forceinline__ unsigned poll(const unsigned* at) {
  unsigned now; // an acquire would empty the L1 each time
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
  return now;
}
__device__ __forceinline__ void acquire() { // TMA may act next
  asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ unsigned raised(const unsigned* at) {
  const unsigned now = poll(at);
  acquire();
  return now;
}
// wait_raised gives up after the given number of polls, unless polls is 0, and then returns less than to. A poll
// takes 0.5 to 1 us.
__device__ __forceinline__ unsigned wait_raised(const unsigned* at, unsigned to, unsigned polls) {
  for (;;) {
    const unsigned now = poll(at);
    if (now >= to) {
      acquire();
      return now;
    }
    if (polls && --polls == 0) {
      return now;
    }
    asm volatile("nanosleep.u32 100;");
  }
}

// report stores words to the host's memory, for its error message, and ends the kernel with an error.
__device__ __forceinline__ void report(int* to, int a, int b, int c, int d) {
  asm volatile("st.volatile.global.v4.s32 [%0], {%1, %2, %3, %4};\nfence.acq_rel.sys;\ntrap;" ::"l"(to), "r"(a), "r"(b),
      "r"(c), "r"(d)
      : "memory");
}

// wait_open waits until a number reaches count, modulo 2^64. The host or another GPU increments it, possibly in host
// memory. Their earlier writes are then visible, to TMA also.
__device__ __forceinline__ void wait_open(const unsigned long long* at, unsigned long long count) {
  for (;;) {
    unsigned long long now;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(now) : "l"(at) : "memory");
    if ((long long)(now - count) >= 0) {
      break;
    }
    asm volatile("nanosleep.u32 200;"); // the memory may be far away
  }
  asm volatile("fence.acq_rel.sys;\nfence.proxy.async.global;" ::: "memory");
}

// shared_for_engine makes this thread's stores to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void shared_for_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// some_sync waits until the given number of threads has reached a barrier of the block; some_arrive does not wait.
// __syncthreads uses number 0.
__device__ __forceinline__ void some_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void some_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// all_sync does what __syncthreads does, for all threads of the block; lanes of a warp may diverge.
__device__ __forceinline__ void all_sync(int threads) { asm volatile("barrier.sync 0, %0;" ::"r"(threads) : "memory"); }

// wg_registers sets the number of registers of each thread of the warpgroup, lower or higher than before.
template <int COUNT> __device__ __forceinline__ void wg_registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void wg_registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// wg_begin must precede the first product that uses registers written since the last one.
// wg_commit ends a group of products, and wg_wait waits for all groups except the last PENDING. Until
// then, the operands and results of a product must not be accessed.
__device__ __forceinline__ void wg_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// hold keeps the compiler from moving a product's registers across it.
template <int N> __device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+f"(c[i])::"memory");
  }
}
template <int N> __device__ __forceinline__ void hold(unsigned (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+r"(a[i])::"memory");
  }
}
template <class T, int N, int M> __device__ __forceinline__ void hold(T (&x)[N][M]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    hold(x[i]);
  }
}

// The parts of wg_multiply: the lists of a product's registers, as text and as operands.
#define P0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define P1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define P2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define P3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define P4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define P5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define P6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define P7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define P8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define P9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define P10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define P11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define P12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define P13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define P14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define P15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define F8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define P_8 P0
#define P_12 P0 ",%8,%9,%10,%11"
#define P_16 P0 "," P1
#define P_24 P_16 "," P2
#define P_32 P_24 "," P3
#define P_40 P_32 "," P4
#define P_48 P_40 "," P5
#define P_64 P_48 "," P6 "," P7
#define P_88 P_64 "," P8 "," P9 "," P10
#define P_96 P_88 "," P11
#define P_128 P_96 "," P12 "," P13 "," P14 "," P15
#define F_8 F8(0)
#define F_12 F8(0), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11])
#define F_16 F8(0), F8(8)
#define F_24 F_16, F8(16)
#define F_32 F_24, F8(24)
#define F_40 F_32, F8(32)
#define F_48 F_40, F8(40)
#define F_64 F_48, F8(48), F8(56)
#define F_88 F_64, F8(64), F8(72), F8(80)
#define F_96 F_88, F8(88)
#define F_128 F_96, F8(96), F8(104), F8(112), F8(120)

#define TEXT(...) #__VA_ARGS__
// A product of width N: a thread holds HALF = N / 2 floats. The next operand has number HALF.
#define WG_SHARED(N, HALF, TYPE, T, I0, I1, I2, I3, I4) \
  template <bool TRANS_A, bool TRANS_B> \
  __device__ __forceinline__ void wg_shared( \
      T, float (&c)[HALF], unsigned long long a, unsigned long long b, int keep) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" TEXT( \
        I2) ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" TEXT(N) "k16.f32." TYPE "." TYPE " {" P_##HALF \
        "}, %" TEXT(I0) ", %" TEXT(I1) ", p, 1, 1, %" TEXT(I3) ", %" TEXT(I4) ";\n}" \
        : F_##HALF \
        : "l"(a), "l"(b), "r"(keep), "n"(TRANS_A), "n"(TRANS_B)); \
  }
#define WG_REGISTERS(N, HALF, TYPE, T, I0, I1, I2, I3, I4, I5, I6) \
  template <bool TRANS_B> \
  __device__ __forceinline__ void wg_registers( \
      T, float (&c)[HALF], const unsigned (&a)[4], unsigned long long b, int keep) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" TEXT( \
        I5) ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" TEXT(N) "k16.f32." TYPE "." TYPE " {" P_##HALF \
        "}, {%" TEXT(I0) ",%" TEXT(I1) ",%" TEXT(I2) ",%" TEXT(I3) "}, %" TEXT(I4) ", p, 1, 1, %" TEXT(I6) ";\n}" \
        : F_##HALF \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANS_B)); \
  }
#define WG_TYPE(N, HALF, TYPE, T, I0, I1, I2, I3, I4, I5, I6) \
  WG_SHARED(N, HALF, TYPE, T, I0, I1, I2, I3, I4) WG_REGISTERS(N, HALF, TYPE, T, I0, I1, I2, I3, I4, I5, I6)
#define WG(N, HALF, ...) WG_TYPE(N, HALF, "bf16", bf16_t, __VA_ARGS__) WG_TYPE(N, HALF, "f16", fp16_t, __VA_ARGS__)
WG(16, 8, 8, 9, 10, 11, 12, 13, 14)
WG(24, 12, 12, 13, 14, 15, 16, 17, 18)
WG(32, 16, 16, 17, 18, 19, 20, 21, 22)
WG(48, 24, 24, 25, 26, 27, 28, 29, 30)
WG(64, 32, 32, 33, 34, 35, 36, 37, 38)
WG(80, 40, 40, 41, 42, 43, 44, 45, 46)
WG(96, 48, 48, 49, 50, 51, 52, 53, 54)
WG(128, 64, 64, 65, 66, 67, 68, 69, 70)
WG(176, 88, 88, 89, 90, 91, 92, 93, 94)
WG(192, 96, 96, 97, 98, 99, 100, 101, 102)
WG(256, 128, 128, 129, 130, 131, 132, 133, 134)

// wg_multiply<T, TRANS_A, TRANS_B> starts c = A B, or c += A B with keep: 64 by N, over 16. A and B are matrices in
// shared memory, A as [m][k] or, with TRANS_A, [k][m], B as [n][k] or, with TRANS_B, [k][n]. A may be in registers
// instead. Warp w of the group has the 16 rows of c and A since 16 w. In floats 4 j to 4 j + 3, lane l holds columns
// 8 j + 2 (l % 4) and the next of rows l / 4 and l / 4 + 8 of c; of A the same as for mma.
template <class T, bool TRANS_A, bool TRANS_B, int HALF>
__device__ __forceinline__ void wg_multiply(float (&c)[HALF], unsigned long long a, unsigned long long b, bool keep) {
  wg_shared<TRANS_A, TRANS_B>(T(), c, a, b, keep);
}
template <class T, bool TRANS_B, int HALF>
__device__ __forceinline__ void wg_multiply(float (&c)[HALF], const unsigned (&a)[4], unsigned long long b, bool keep) {
  wg_registers<TRANS_B>(T(), c, a, b, keep);
}

// stmatrix stores four 8x8 matrices, laid out over lanes as by ldmatrix; lane l gives the address of
// row l % 8 of matrix l / 8. stmatrix_trans stores each transposed.
__device__ __forceinline__ void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ __forceinline__ void stmatrix_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
      "r"(c), "r"(d)
      : "memory");
}

// load_shared_pair loads two floats, and load_shared_words four integers.
__device__ __forceinline__ void load_shared_pair(unsigned address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared_words(unsigned address, int& a, int& b, int& c, int& d) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}
