// What the files of the runner have in common: the threads of a block, and what is known of
// its shared memory beside its bytes.
#pragma once
#include "host.h"

#include <setjmp.h>
#include <ucontext.h>

#include <string>
#include <vector>

constexpr unsigned MAX_SHARED = 227 << 10, MAX_THREADS = 1024;
constexpr unsigned SHARED_BASE = 1024; // address of the first byte: addresses are offsets nowhere

enum State { READY, AT_WARP, AT_BLOCK, AT_NAMED, AT_PHASE, AT_PRODUCTS, POLLING, DONE };

struct Copy {
  unsigned dst;
  const void* src;
  unsigned bytes;
  bool valid;
};

// Add is a box or, with no map, bytes that are added to global memory.
struct Add {
  bool box;
  TensorMap map;
  int at[4];
  float* dst;
  unsigned src, bytes;
};

struct Thread {
  State state;
  unsigned where; // the barrier, or its number
  long until;     // the parity of the phase; how many products are to be done
  bool started;
  jmp_buf at;
  ucontext_t first;
  char* stack;
  unsigned syncs;  // barriers of the whole block that it came through
  unsigned fenced; // when it last called shared_for_engine

  // What it started and has not waited for, and how many there were at each commit.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
  std::vector<Add> adds;
  std::vector<size_t> add_groups;
  size_t started_adds, finished; // finished: of those, when all before were last in global memory
  long products; // that it ever started
  std::vector<long> product_groups;
  bool begun; // wg_begin came after all that it did with registers of products
};

extern Thread threads[MAX_THREADS];
extern unsigned current; // the thread that runs
extern unsigned threads_of_block, shared_of_block;
extern bool descending;

// suspend has the present thread wait. wake makes those ready that wait in a state, for what f says.
void suspend(State s, unsigned where = 0, long until = 0);
template <class F> void wake(State s, F f) {
  for (unsigned i = 0; i < threads_of_block; i++) {
    if (threads[i].state == s && f(threads[i])) {
      threads[i].state = READY;
    }
  }
}

// fail_of is fail of another thread than the one that runs.
[[noreturn]] void fail_of(unsigned thread, const char* what, unsigned long long value);

// The engine is what reads and writes shared memory beside the threads: copies, adds and products. It
// looks at 16 bytes at a time. An address is checked to be of the block's shared memory.
//
// engine_reads is called when a read begins, and engine_has_read when it is over; likewise for writes, whose
// place holds no number in between. engine_at is where bytes lie, for the engine.
void engine_reads(unsigned address);
void engine_has_read(unsigned address);
void engine_writes(unsigned address);
void engine_has_written(unsigned address);
char* engine_at(unsigned address, unsigned bytes);

// The parts of the machine, memory.cpp and so on. begin is called before a block; step does a piece of what is under way, the
// later the better, and returns false where there is none; end is called after it.
void memory_begin();
void engine_begin();
bool engine_step(bool any);
void engine_end();
void products_begin();
bool products_step();
void products_end();

// barrier_says tells how it stands about a barrier.
std::string barrier_says(unsigned barrier);
