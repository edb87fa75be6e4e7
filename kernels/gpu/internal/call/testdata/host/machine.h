// Common parts of the runner's files: the threads of a block, and the state of its shared memory besides its bytes.
#pragma once
#include "host.h"

#include <setjmp.h>
#include <ucontext.h>

#include <string>
#include <vector>

constexpr unsigned MAX_SHARED = 227 << 10, MAX_THREADS = 1024;
constexpr unsigned SHARED_BASE = 1024; // address of the first byte, so that addresses differ from offsets
constexpr unsigned WINDOW = 256 << 10; // addresses of a block of a cluster
constexpr unsigned MAX_BLOCKS = 2;     // of a cluster

enum State { READY, AT_WARP, AT_BLOCK, AT_NAMED, AT_PHASE, AT_PRODUCTS, POLLING, DONE };

struct Copy {
  unsigned dst;
  const void* src;
  unsigned bytes;
  bool valid;
};

// Add is a box or, without a map, bytes that are added to global memory.
struct Add {
  bool box;
  TensorMap map;
  int at[4];
  float* dst;
  unsigned src, bytes;
  bool sets; // instead of adding
};

struct Thread {
  State state;
  unsigned where; // the barrier, or its number
  long until;     // the parity of the phase, or the number of products that must be done
  bool started;
  jmp_buf at;
  ucontext_t first;
  char* stack;
  unsigned syncs;  // number of block barriers that it has passed
  unsigned fenced; // its last call of shared_for_engine

  // Operations that it started and has not waited for, and their number at each commit.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
  std::vector<Add> adds;
  std::vector<size_t> add_groups;
  size_t started_adds, finished; // finished: number of these in global memory, with all earlier ones
  long products; // number of products that it ever started
  std::vector<long> product_groups;
  bool begun; // wg_begin followed its last use of a product's registers
};

extern Thread threads[MAX_THREADS];
extern unsigned current; // the running thread
extern unsigned threads_of_block, shared_of_block;
extern unsigned blocks, threads_of_all; // of the cluster
extern bool descending;

// suspend makes the current thread wait. wake makes the threads in a state ready for which f returns true.
void suspend(State s, unsigned where = 0, long until = 0);
template <class F> void wake(State s, F f) {
  for (unsigned i = 0; i < threads_of_all; i++) {
    if (threads[i].state == s && f(threads[i])) {
      threads[i].state = READY;
    }
  }
}

// fail_of does what fail does, for another thread than the running one.
[[noreturn]] void fail_of(unsigned thread, const char* what, unsigned long long value);

// The engine reads and writes shared memory besides the threads: copies, adds and products. It works on pieces of 16
// bytes. It checks that addresses belong to the block's shared memory. engine_reads is called when a read begins, and
// engine_has_read when it ends; likewise for writes, whose bytes are NaN in between. engine_at returns the host address
// of bytes, for the engine.
void engine_reads(unsigned address);
void engine_has_read(unsigned address);
void engine_writes(unsigned address);
void engine_has_written(unsigned address);
char* engine_at(unsigned address, unsigned bytes);

// The parts of the machine: memory.cpp and so on. begin is called before a block, and end after it. step performs one
// started operation, preferably a late one, and returns false if there is none.
void memory_begin();
void engine_begin();
bool engine_step(bool any);
void engine_end();
void products_begin();
bool products_step();
void products_end();

// barrier_says describes the state of a barrier.
std::string barrier_says(unsigned barrier);
