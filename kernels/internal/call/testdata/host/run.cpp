// Runs kernels that were compiled for the host. It maps a file that the test has mapped too, says where,
// and then takes launches from its standard input, each answered by a byte when it is done. What a
// kernel does wrong ends it, with a line on its standard error.
#include "host.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;

constexpr unsigned MAX_SHARED = 227 << 10, MAX_THREADS = 1024, STACK = 256 << 10;
constexpr unsigned SHARED_BASE = 1024; // address of the first byte: addresses are offsets nowhere
alignas(1024) char shared[MAX_SHARED];

// Params is the argument of a kernel, FlashParams of flash.cuh: passed by value, whatever is in it.
struct Params { alignas(8) char bytes[768]; };

struct Launch {
  char library[256], kernel[64];
  int grid[3], threads, columns, shared, descending, unused; // columns: of the threads, blockDim.x
  Params params;
};

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Copy {
  unsigned dst;
  const void* src;
  unsigned bytes;
  bool valid;
};

struct Thread {
  State state;
  bool started;
  jmp_buf at;
  ucontext_t first;
  char* stack;
  std::vector<Copy> copies;
  std::vector<size_t> groups; // how many copies there were at each commit
};

static Launch launch;
static void (*kernel)(Params);
static Thread threads[MAX_THREADS];
static unsigned current; // the thread that runs
alignas(64) static char slots[MAX_THREADS][64];
static jmp_buf scheduler;

void fail(const char* what, unsigned long long value) {
  fprintf(stderr, "%s, block (%u, %u, %u), thread %u: %s: %#llx\n", launch.kernel, blockIdx.x, blockIdx.y, blockIdx.z, current, what, value);
  _exit(1);
}

unsigned shared_address(const void* p) { return (const char*)p - shared + SHARED_BASE; }

char* shared_at(unsigned address, unsigned bytes) {
  unsigned at = address - SHARED_BASE;
  if (address < SHARED_BASE || at + bytes > (unsigned)launch.shared) {
    fail("an address outside the block's shared memory", at);
  }
  if (at % bytes) {
    fail("an address in shared memory that is not aligned", at);
  }
  return shared + at;
}

void start_copy(unsigned dst, const void* src, unsigned bytes, bool valid) {
  shared_at(dst, bytes);
  if (valid && (uintptr_t)src % bytes) {
    fail("a copy from an address that is not aligned", (uintptr_t)src);
  }
  threads[current].copies.push_back({dst, src, bytes, valid});
}

void commit_copies() {
  Thread& t = threads[current];
  t.groups.push_back(t.copies.size());
}

void wait_copies(int pending) {
  Thread& t = threads[current];
  if ((int)t.groups.size() <= pending) {
    return;
  }
  size_t groups = t.groups.size() - pending, done = t.groups[groups - 1];
  for (size_t i = 0; i < done; i++) {
    const Copy& c = t.copies[i];
    if (c.valid) {
      memcpy(shared_at(c.dst, c.bytes), c.src, c.bytes);
    } else {
      memset(shared_at(c.dst, c.bytes), 0, c.bytes);
    }
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + done);
  t.groups.erase(t.groups.begin(), t.groups.begin() + groups);
  for (size_t& n : t.groups) {
    n -= done;
  }
}

static void yield(State s) {
  Thread& t = threads[current];
  t.state = s;
  if (!_setjmp(t.at)) {
    _longjmp(scheduler, 1);
  }
}

void warp_wait() { yield(AT_WARP); }
void block_wait() { yield(AT_BLOCK); }
void* lane_slot(unsigned lane) { return slots[current / 32 * 32 + lane]; }

static void body() {
  kernel(launch.params);
  yield(DONE);
}

// resume runs a thread until it waits.
static void resume(unsigned i) {
  Thread& t = threads[i];
  current = i;
  threadIdx = {i % blockDim.x, i / blockDim.x, 0};
  if (_setjmp(scheduler)) {
    return;
  }
  if (t.started) {
    _longjmp(t.at, 1);
  }
  t.started = true;
  setcontext(&t.first);
}

static bool all(int from, int to, State s) {
  for (int i = from; i < to; i++) {
    if (threads[i].state != s) {
      return false;
    }
  }
  return true;
}

static void release(int from, int to) {
  for (int i = from; i < to; i++) {
    threads[i].state = READY;
  }
}

// run_warp runs a warp until all its threads wait for the block or are done. Lanes run one after the
// other in a certain order, which the next launch turns round: a result that depends on it shows.
static void run_warp(int warp) {
  const int from = warp * 32, to = from + 32;
  do {
    release(from, to);
    for (int i = 0; i < 32; i++) {
      resume(launch.descending ? to - 1 - i : from + i);
    }
  } while (all(from, to, AT_WARP));
}

static void run_block() {
  memset(shared, 0xff, launch.shared); // NaN of every type
  for (int i = 0; i < launch.threads; i++) {
    Thread& t = threads[i];
    t.state = READY;
    t.started = false;
    t.copies.clear();
    t.groups.clear();
    getcontext(&t.first);
    t.first.uc_stack.ss_sp = t.stack;
    t.first.uc_stack.ss_size = STACK;
    t.first.uc_link = nullptr;
    makecontext(&t.first, body, 0);
  }
  const int warps = launch.threads / 32;
  do {
    for (int i = 0; i < warps; i++) {
      run_warp(launch.descending ? warps - 1 - i : i);
    }
  } while (all(0, launch.threads, AT_BLOCK));
  if (!all(0, launch.threads, DONE)) {
    fail("threads wait at different barriers; block size", launch.threads);
  }
}

static void run() {
  void* library = dlopen(launch.library, RTLD_NOW | RTLD_LOCAL);
  if (!library || !(kernel = (void (*)(Params))dlsym(library, launch.kernel))) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
  if (launch.threads > (int)MAX_THREADS || launch.threads % 32 || launch.shared > (int)MAX_SHARED) {
    fail("a launch that no GPU takes; threads", launch.threads);
  }
  gridDim = {(unsigned)launch.grid[0], (unsigned)launch.grid[1], (unsigned)launch.grid[2]};
  blockDim = {(unsigned)launch.columns, (unsigned)(launch.threads / launch.columns), 1};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        run_block();
      }
    }
  }
}

static void answer(const void* p, size_t bytes) {
  if (write(1, p, bytes) != (ssize_t)bytes) {
    _exit(1);
  }
}

int main(int, char** args) {
  int file = open(args[1], O_RDWR);
  void* base = mmap(nullptr, strtoull(args[2], nullptr, 10), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) {
    perror(args[1]);
    return 1;
  }
  for (Thread& t : threads) {
    t.stack = (char*)malloc(STACK);
  }
  unsigned long long at = (unsigned long long)base;
  answer(&at, sizeof at);
  while (fread(&launch, sizeof launch, 1, stdin) == 1) {
    run();
    answer("", 1);
  }
  return 0;
}
