// Runs kernels that were compiled for the host. It maps a file that the test has also mapped, writes the address, and
// then reads launches from its standard input. It writes a byte after each. An error in a kernel ends it with a line on
// its standard error.
#include "machine.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

Index threadIdx, blockIdx, blockDim, gridDim;

constexpr unsigned STACK = 256 << 10;
alignas(1024) char shared[MAX_BLOCKS * WINDOW];

// Params is the largest argument of a kernel, passed by value.
struct Params { alignas(64) char bytes[4096]; };

struct Launch {
  char library[256], kernel[64];
  int grid[3], threads, columns, shared, descending, unused; // columns: of the threads, blockDim.x
};

Thread threads[MAX_THREADS];
unsigned current, threads_of_block, shared_of_block, blocks, threads_of_all;
bool descending;

static Launch launch;
static Params params;
static void (*kernel)(Params);
alignas(64) static char slots[MAX_THREADS][64];
static jmp_buf scheduler;

struct Named { int threads, came; bool lanes[MAX_THREADS]; };
constexpr int NAMED = 16, CLUSTER_WAIT = NAMED * MAX_BLOCKS; // barriers of a block, and that of the cluster
static Named named[CLUSTER_WAIT + 1];
static unsigned first_block; // of the cluster

void fail_of(unsigned thread, const char* what, unsigned long long value) {
  fprintf(stderr, "%s, block (%u, %u, %u), thread %u: %s: %#llx\n", launch.kernel, blockIdx.x, blockIdx.y, blockIdx.z, thread, what, value);
  _exit(1);
}

void fail(const char* what, unsigned long long value) { fail_of(current, what, value); }

unsigned rank_in_cluster() { return current / threads_of_block; }
unsigned address_in(unsigned address, unsigned rank) { return (address - SHARED_BASE) % WINDOW + SHARED_BASE + rank * WINDOW; }
unsigned shared_address(const void* p) { return address_in((const char*)p - shared + SHARED_BASE, rank_in_cluster()); }

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
      memcpy(stored_at(c.dst, c.bytes), c.src, c.bytes);
    } else {
      memset(stored_at(c.dst, c.bytes), 0, c.bytes);
    }
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + done);
  t.groups.erase(t.groups.begin(), t.groups.begin() + groups);
  for (size_t& n : t.groups) {
    n -= done;
  }
}

// A thread that waits for the barrier calls fence_engine.
void arrive_after_copies(unsigned barrier) {
  commit_copies();
  wait_copies(0);
  fence_engine();
  arrive(barrier, 0);
}

void suspend(State s, unsigned where, long until) {
  Thread& t = threads[current];
  t.state = s;
  t.where = where;
  t.until = until;
  if (!_setjmp(t.at)) {
    _longjmp(scheduler, 1);
  }
}

void warp_wait() { suspend(AT_WARP); }
void poll_again() { suspend(POLLING); }
void* lane_slot(unsigned lane) { return slots[current / 32 * 32 + lane]; }

void block_wait() {
  suspend(AT_BLOCK);
  threads[current].syncs++;
}

// open_named releases the waiters at a named barrier. A GPU counts warps.
static void open_named(unsigned number) {
  Named& b = named[number];
  for (unsigned i = 0; i < threads_of_all; i++) {
    if (b.lanes[i] != b.lanes[i / 32 * 32]) {
      fail_of(i, "a part of a warp came to the barrier", number);
    }
  }
  wake(AT_NAMED, [=](const Thread& t) { return t.where == number; });
  b = {};
}

static void wait_or_arrive(int number, int count, bool waits) {
  Named& b = named[number];
  if (b.came && b.threads != count) {
    fail("threads do not agree how many are to come to the barrier", number);
  }
  b.threads = count;
  b.lanes[current] = true;
  const bool last = ++b.came == count;
  if (last) {
    open_named(number);
  }
  if (waits) {
    if (!last) {
      suspend(AT_NAMED, number);
    }
    threads[current].syncs += count >= (int)threads_of_block;
  }
}

void named_wait(int number, int count, bool waits) {
  if (number < 0 || number >= NAMED || count <= 0 || count % 32 || count > (int)threads_of_block) {
    fail("a barrier or a number of threads that there is not", number < 0 || number >= NAMED ? number : count);
  }
  wait_or_arrive(NAMED * rank_in_cluster() + number, count, waits);
}

void cluster_wait() { wait_or_arrive(CLUSTER_WAIT, threads_of_all, true); }

static void body() {
  kernel(params);
  suspend(DONE);
}

// resume runs a thread until it waits.
static void resume(unsigned i) {
  Thread& t = threads[i];
  current = i;
  threadIdx = {i % threads_of_block % blockDim.x, i % threads_of_block / blockDim.x, 0};
  blockIdx.x = first_block + rank_in_cluster();
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

void check_there(unsigned address) {
  const int from = (address - SHARED_BASE) / WINDOW * threads_of_block, to = from + threads_of_block;
  if (!threads[current].syncs || all(from, to, DONE)) {
    fail("a block of the cluster that may not have started, or has ended", address);
  }
}

// run_warp runs a warp until all its threads wait for more than the warp, or are done. Lanes run one after the other,
// and the next launch reverses the order, which reveals results that depend on it. It returns whether any ran.
static bool run_warp(int warp) {
  const int from = warp * 32, to = from + 32;
  bool any = false;
  for (bool more = true; more; any |= more) {
    more = all(from, to, AT_WARP);
    if (more) {
      release(from, to);
    }
    for (int i = 0; i < 32; i++) {
      int lane = descending ? to - 1 - i : from + i;
      if (threads[lane].state == READY) {
        resume(lane);
        more = true;
      }
    }
  }
  return any;
}

static bool run_warps() {
  const int warps = threads_of_all / 32;
  bool any = false;
  for (int i = 0; i < warps; i++) {
    any |= run_warp(descending ? warps - 1 - i : i);
  }
  return any;
}

static std::string waits_for(const Thread& t) {
  switch (t.state) {
    case AT_WARP: return "waits for its warp";
    case AT_BLOCK: return "waits for the block";
    case AT_NAMED: {
      const Named& b = named[t.where];
      return "waits at barrier " + std::to_string(t.where) + ", to which " + std::to_string(b.came) + " threads of " + std::to_string(b.threads) + " came";
    }
    case AT_PHASE: return "waits for a phase of parity " + std::to_string(t.until) + " of " + barrier_says(t.where);
    case AT_PRODUCTS: return "waits for products, with the rest of its warpgroup";
    case POLLING: return "asks again and again";
    default: return "is done";
  }
}

// stuck ends the process if no thread can run.
[[noreturn]] static void stuck() {
  std::string text;
  for (int i = 0, from = 0, end = threads_of_all; i < end; i++) {
    std::string here = waits_for(threads[i]);
    if (i + 1 == end || waits_for(threads[i + 1]) != here) {
      text += "\n  " + (from < i ? std::to_string(from) + " to " : "") + std::to_string(i) + ": " + here;
      from = i + 1;
    }
  }
  fail(("threads wait at different barriers, or for what never comes:" + text + "\nof a block of").c_str(), launch.threads);
}

// step performs pending operations when no thread can run. Operations without a waiter come last; polling threads run
// after those.
static bool step(int& polls) {
  constexpr int PATIENCE = 1000; // rounds in which threads only poll
  if (all(0, threads_of_all, DONE)) {
    return false;
  }
  for (int i = 0; i < (int)threads_of_all; i += launch.threads) {
    if (all(i, i + launch.threads, AT_BLOCK)) {
      release(i, i + launch.threads);
      return true;
    }
  }
  if ((descending ? products_step() || engine_step(false) : engine_step(false) || products_step()) || engine_step(true)) {
    polls = 0;
    return true;
  }
  if (++polls <= PATIENCE) {
    wake(POLLING, [](const Thread&) { return true; });
    return true;
  }
  return false;
}

static void run_cluster() {
  memory_begin();
  memset(named, 0, sizeof named);
  engine_begin();
  products_begin();
  for (unsigned i = 0; i < threads_of_all; i++) {
    Thread& t = threads[i];
    t = {.stack = t.stack};
    getcontext(&t.first);
    t.first.uc_stack.ss_sp = t.stack;
    t.first.uc_stack.ss_size = STACK;
    t.first.uc_link = nullptr;
    makecontext(&t.first, body, 0);
  }
  int polls = 0;
  while (run_warps() || step(polls)) {
  }
  if (!all(0, threads_of_all, DONE)) {
    stuck();
  }
  products_end();
  engine_end();
}

static void run() {
  void* library = dlopen(launch.library, RTLD_NOW | RTLD_LOCAL);
  if (!library || !(kernel = (void (*)(Params))dlsym(library, launch.kernel))) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
  const void* size = dlsym(library, "cluster_blocks");
  blocks = size ? *(const unsigned*)size : 1, threads_of_all = blocks * launch.threads;
  threads_of_block = launch.threads, shared_of_block = launch.shared, descending = launch.descending;
  if (threads_of_all > MAX_THREADS || launch.threads % 32 || launch.shared > (int)MAX_SHARED || blocks > MAX_BLOCKS || launch.grid[0] % blocks) {
    fail("a launch that no GPU takes; threads", launch.threads);
  }
  gridDim = {(unsigned)launch.grid[0], (unsigned)launch.grid[1], (unsigned)launch.grid[2]};
  blockDim = {(unsigned)launch.columns, (unsigned)(launch.threads / launch.columns), 1};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
      for (unsigned i = 0; i < gridDim.x; i += blocks) { // a GPU starts blocks in any order
        first_block = descending ? gridDim.x - blocks - i : i;
        run_cluster();
      }
    }
  }
}

// on_fault is called if a thread causes a processor fault.
static void on_fault(int signal, siginfo_t* info, void*) {
  const char* what = signal == SIGFPE ? "a division by 0, by the instruction" : signal == SIGILL ? "no instruction" : "an address where there is no memory";
  fail(what, (uintptr_t)info->si_addr);
}

static void watch_faults() {
  static char stack[64 << 10];
  stack_t other = {};
  other.ss_sp = stack, other.ss_size = sizeof stack;
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    sigaction(signal, &action, nullptr);
  }
}

static void answer(const void* p, size_t bytes) {
  if (write(1, p, bytes) != (ssize_t)bytes) {
    _exit(1);
  }
}

int main(int, char** args) {
  watch_faults();
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
  while (fread(&launch, sizeof launch, 1, stdin) == 1 && fread(&params, sizeof params, 1, stdin) == 1) {
    run();
    answer("", 1);
  }
  return 0;
}
