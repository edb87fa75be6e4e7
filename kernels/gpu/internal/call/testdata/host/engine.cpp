// The copy engine of a block, and the barriers in shared memory by which it reports completion.
#include "machine.h"

#include <deque>
#include <map>
#include <unistd.h>

// Barrier is the state of one. Its 8 bytes in shared memory only detect stores by others.
struct Barrier {
  unsigned arrivals, maker, made; // made: the number of block barriers that the maker had passed
  bool known;                     // to the engine
  unsigned phase, missing;
  long long bytes; // still expected in this phase
};
static std::map<unsigned, Barrier> barriers;
constexpr unsigned long long MARK = 0xba221e2ba221e2ffull;

static Barrier& barrier_at(unsigned at) {
  const char* p = shared_at(at, 8);
  auto found = barriers.find(at);
  if (found == barriers.end() || memcmp(p, &MARK, 8)) {
    fail("this is no barrier, or was stored over", at - SHARED_BASE);
  }
  const Barrier& b = found->second;
  if (b.maker != current && threads[current].syncs <= b.made) {
    fail("a barrier that another thread makes, with no barrier of the block in between", at - SHARED_BASE);
  }
  return found->second;
}

void make_barrier(unsigned at, unsigned arrivals) {
  memcpy(shared_at(at, 8), &MARK, 8);
  if (!arrivals || arrivals >= 1 << 20) {
    fail("a barrier for so many arrivals", arrivals);
  }
  barriers[at] = {arrivals, current, threads[current].syncs, false, 0, arrivals, 0};
}

void forget_barrier(unsigned at) {
  const Barrier& b = barrier_at(at);
  if (b.bytes) {
    fail("a barrier is forgotten that waits for bytes", b.bytes);
  }
  for (unsigned i = 0; i < threads_of_all; i++) {
    if (threads[i].state == AT_PHASE && threads[i].where == at) {
      fail("a barrier is forgotten for which a thread waits", at - SHARED_BASE);
    }
  }
  barriers.erase(at);
}

void make_known() {
  for (auto& b : barriers) {
    b.second.known |= b.second.maker == current;
  }
}

// settle ends a phase that is complete.
static void settle(unsigned at, Barrier& b) {
  if (b.missing || b.bytes) {
    return;
  }
  b.phase++;
  b.missing = b.arrivals;
  wake(AT_PHASE, [=](const Thread& t) { return t.where == at; });
}

void arrive(unsigned at, long long bytes) {
  Barrier& b = barrier_at(at);
  if (!b.missing) {
    fail("more arrivals in a phase than the barrier was made for", at - SHARED_BASE);
  }
  b.missing--;
  b.bytes += bytes;
  settle(at, b);
}

void wait_phase(unsigned at, unsigned parity) {
  if (parity > 1) {
    fail("a parity that is neither 0 nor 1", parity);
  }
  while (barrier_at(at).phase % 2 == parity) {
    suspend(AT_PHASE, at, parity);
  }
}

std::string barrier_says(unsigned at) {
  const Barrier& b = barriers[at];
  char text[160];
  snprintf(text, sizeof text, "the barrier at %#x, whose phase %u lacks %u arrivals of %u, and %lld bytes", at - SHARED_BASE, b.phase, b.missing, b.arrivals, b.bytes);
  return text;
}

// Box is a part of a tensor and its place in shared memory: rows of bytes, without gaps, in pieces of 16, which may be
// permuted.
struct Box {
  char* base;
  long long extents[4], strides[3], at[4];
  unsigned shared, elements, rows, size, permuted;

  Box(const TensorMap& map, unsigned shared, const int (&at)[4]) : shared(shared) {
    const unsigned long long* w = map.words;
    base = (char*)w[0];
    for (int i = 0; i < 4; i++) {
      extents[i] = w[1 + i], this->at[i] = at[i];
    }
    for (int i = 0; i < 3; i++) {
      strides[i] = w[5 + i];
    }
    elements = w[8], rows = w[9], size = w[10], permuted = w[11];
    check(map);
  }

  void check(const TensorMap& map) const {
    bool fits = (uintptr_t)base % 16 == 0 && rows && rows <= 256 && elements && elements <= 256 && elements * size % 16 == 0;
    for (int i = 0; i < 4; i++) {
      fits &= extents[i] > 0 && extents[i] <= 1ll << 32 && (i == 0 || strides[i - 1] % 16 == 0) && (i == 0 || (strides[i - 1] >= 0 && strides[i - 1] < 1ll << 40));
    }
    fits &= size == 2 || size == 4;
    if (!fits || (permuted && ((permuted != 128 && permuted != 64) || elements * size != permuted))) {
      fail("a tensor map that no GPU takes", (uintptr_t)base);
    }
    if ((uintptr_t)&map % 64) {
      fail("a tensor map that is not aligned", (uintptr_t)&map);
    }
    if (shared % 128) {
      fail("a box at an address in shared memory that is not aligned", shared - SHARED_BASE);
    }
  }

  unsigned bytes() const { return rows * elements * size; }

  // place returns the position of bytes of a row that begin at a multiple of an element.
  unsigned place(unsigned row, unsigned byte) const {
    unsigned linear = shared + row * elements * size + byte;
    return permuted ? linear ^ (linear / 128 % (permuted / 16)) << 4 : linear;
  }

  // element returns the address of an element in global memory, or NULL outside of the tensor.
  char* element(unsigned row, unsigned i) const {
    const long long x[4] = {at[0] + i, at[1] + row, at[2], at[3]};
    char* p = base + x[0] * size;
    for (int a = 0; a < 4; a++) {
      if (x[a] < 0 || x[a] >= extents[a]) {
        return nullptr;
      }
      p += a ? x[a] * strides[a - 1] : 0;
    }
    return p;
  }

  // each calls f with the addresses of all elements, in shared and in global memory.
  template <class F> void each(F f) const {
    for (unsigned row = 0; row < rows; row++) {
      for (unsigned i = 0; i < elements; i++) {
        f(place(row, i * size), element(row, i));
      }
    }
  }
};

struct Transfer {
  bool box;
  TensorMap map;
  int at[4];
  unsigned dst;
  const char* src;
  unsigned bytes, barrier, thread;
  float sent[4]; // if it is neither a box nor from src
};
static std::deque<Transfer> transfers;

static void start(const Transfer& t) {
  if (!barrier_at(t.barrier).known) {
    fail("a copy with a barrier that barriers_ready has not made known", t.barrier - SHARED_BASE);
  }
  for (unsigned i = 0; i < t.bytes; i += 16) {
    engine_writes(t.dst + i);
  }
  transfers.push_back(t);
}

void start_box(unsigned dst, const TensorMap& map, unsigned barrier, const int (&at)[4]) {
  start({true, map, {at[0], at[1], at[2], at[3]}, dst, nullptr, Box(map, dst, at).bytes(), barrier, current});
}

static void check_bytes(const void* global, unsigned address, unsigned bytes) {
  if ((uintptr_t)global % 16 || address % 16 || bytes % 16) {
    fail("bytes of the engine that are no pieces of 16", (uintptr_t)global % 16 ? (uintptr_t)global : address % 16 ? address - SHARED_BASE : bytes);
  }
}

void start_bytes(unsigned dst, const void* src, unsigned bytes, unsigned barrier) {
  check_bytes(src, dst, bytes);
  start({false, {}, {}, dst, (const char*)src, bytes, barrier, current});
}

void start_floats(unsigned dst, unsigned barrier, const float (&x)[4]) {
  shared_at(dst, 16);
  start({false, {}, {}, dst, nullptr, 16, barrier, current, {x[0], x[1], x[2], x[3]}});
}

// finish performs a copy.
static void finish(const Transfer& t) {
  current = t.thread;
  for (unsigned i = 0; i < t.bytes; i += 16) {
    engine_has_written(t.dst + i);
  }
  if (t.box) {
    alignas(64) TensorMap map = t.map;
    const Box box(map, t.dst, t.at);
    box.each([&](unsigned to, const char* from) { from ? memcpy(engine_at(to, box.size), from, box.size) : memset(engine_at(to, box.size), 0, box.size); });
  } else {
    memcpy(engine_at(t.dst, t.bytes), t.src ? (const void*)t.src : t.sent, t.bytes);
  }
  Barrier& b = barriers[t.barrier];
  b.bytes -= t.bytes;
  settle(t.barrier, b);
}

static bool is_waited_for(const Transfer& t) {
  for (unsigned i = 0; i < threads_of_all; i++) {
    if (threads[i].state == AT_PHASE && threads[i].where == t.barrier) {
      return true;
    }
  }
  return false;
}

// engine_step performs one copy, preferably one that a thread waits for: the first that was started or, in the other
// order of threads, the last.
bool engine_step(bool any) {
  for (size_t i = 0; i < transfers.size(); i++) {
    const size_t at = descending ? transfers.size() - 1 - i : i;
    if (any || is_waited_for(transfers[at])) {
      const Transfer t = transfers[at];
      transfers.erase(transfers.begin() + at);
      finish(t);
      return true;
    }
  }
  return false;
}

static void start_add(const Add& a) {
  for (unsigned i = 0; i < a.bytes; i += 16) {
    engine_reads(a.src + i);
  }
  threads[current].adds.push_back(a);
  threads[current].started_adds++;
}

static void start_tile(const TensorMap& map, unsigned src, const int (&at)[4], bool sets) {
  const Box box(map, src, at);
  if (box.size != 4) {
    fail("adds of elements that are no floats, of bytes", box.size);
  }
  start_add({true, map, {at[0], at[1], at[2], at[3]}, nullptr, src, box.bytes(), sets});
}

void start_add_box(const TensorMap& map, unsigned src, const int (&at)[4]) { start_tile(map, src, at, false); }
void start_store_box(const TensorMap& map, unsigned src, const int (&at)[4]) { start_tile(map, src, at, true); }

void start_add_bytes(float* dst, unsigned src, unsigned bytes) {
  check_bytes(dst, src, bytes);
  start_add({false, {}, {}, dst, src, bytes});
}

void commit_adds() { threads[current].add_groups.push_back(threads[current].adds.size()); }

// Values that were read and must be added.
struct Sum { float* to; float by; bool sets; };
static std::vector<Sum> sums;

static void read_add(const Add& a) {
  auto one = [&](unsigned from, char* to) {
    float x;
    memcpy(&x, engine_at(from, 4), 4);
    if (to) {
      sums.push_back({(float*)to, x, a.sets});
    }
  };
  if (a.box) {
    alignas(64) TensorMap map = a.map;
    Box(map, a.src, a.at).each(one);
  }
  for (unsigned i = 0; i < a.bytes; i += 4) {
    if (!a.box) {
      one(a.src + i, (char*)a.dst + i);
    }
    if (i % 16 == 0) {
      engine_has_read(a.src + i);
    }
  }
}

void wait_adds(int pending) {
  Thread& t = threads[current];
  if ((int)t.add_groups.size() <= pending) {
    return;
  }
  size_t groups = t.add_groups.size() - pending, done = t.add_groups[groups - 1];
  for (size_t i = 0; i < done; i++) {
    read_add(t.adds[i]);
  }
  t.adds.erase(t.adds.begin(), t.adds.begin() + done);
  t.add_groups.erase(t.add_groups.begin(), t.add_groups.begin() + groups);
  for (size_t& n : t.add_groups) {
    n -= done;
  }
}

void finish_adds() {
  wait_adds(0);
  Thread& t = threads[current];
  t.finished = t.started_adds;
}

void raise_number(unsigned* at, unsigned to) {
  const Thread& t = threads[current];
  if (t.finished != t.started_adds) {
    fail("a block tells how far it is before all its adds are in global memory, up to", to);
  }
  if (to < *at) {
    fail("a block is less far than it was, at", to);
  }
  *at = to;
}

// Blocks run one after the other, so a missing value never comes.
unsigned wait_number(const unsigned* at, unsigned to) {
  if (*at < to) {
    fail("a block waits for one that starts after it, or ends before, to come to", to);
  }
  return *at;
}

// The test opens a gate when the word after it shows a waiter.
void wait_gate(const unsigned long long* at, unsigned long long count) {
  __atomic_fetch_add(const_cast<unsigned long long*>(at) + 1, 1, __ATOMIC_RELEASE);
  for (int tries = 0; (long long)(__atomic_load_n(at, __ATOMIC_ACQUIRE) - count) < 0; tries++) {
    if (tries == 20000) {
      fail("nobody opens the gate that comes to", count);
    }
    usleep(1000);
  }
}

void engine_begin() {
  barriers.clear();
  sums.clear();
}

// engine_end adds the values that were read, in one of the two orders.
void engine_end() {
  if (!transfers.empty()) {
    fail_of(transfers[0].thread, "a copy is under way when the block is over, to", transfers[0].dst - SHARED_BASE);
  }
  for (unsigned i = 0; i < threads_of_all; i++) {
    if (!threads[i].adds.empty()) {
      fail_of(i, "the block is over, and has not waited for adds of", threads[i].adds[0].src - SHARED_BASE);
    }
  }
  for (size_t i = 0; i < sums.size(); i++) {
    const Sum& s = sums[descending ? sums.size() - 1 - i : i];
    *s.to = s.sets ? s.by : *s.to + s.by;
  }
}
