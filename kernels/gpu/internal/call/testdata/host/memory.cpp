// The state of shared memory besides its bytes: writers, and pending operations of the engine. The engine sees a
// thread's stores after the thread called shared_for_engine.
#include "machine.h"

struct Piece { unsigned short writes, reads; }; // of 16 bytes: pending operations of the engine
struct Word { unsigned writer, when; };         // of 4 bytes: the last writer, and its time; when 0: none
static Piece pieces[MAX_BLOCKS * WINDOW / 16];
static Word words[MAX_BLOCKS * WINDOW / 4];
static unsigned clock_now;

void memory_begin() {
  for (unsigned at = 0; at < blocks * WINDOW; at += WINDOW) {
    memset(shared + at, 0xff, shared_of_block); // NaN of every type
    memset(pieces + at / 16, 0, (shared_of_block + 15) / 16 * sizeof *pieces);
    memset(words + at / 4, 0, (shared_of_block + 3) / 4 * sizeof *words);
  }
  clock_now = 0;
}

char* engine_at(unsigned address, unsigned bytes) {
  unsigned at = address - SHARED_BASE;
  if (at / WINDOW >= blocks || at % WINDOW + bytes > shared_of_block) {
    fail("an address outside the block's shared memory", at);
  }
  return shared + at;
}

static Piece& piece_at(unsigned address) { return pieces[(engine_at(address, 16) - shared) / 16]; }

char* shared_at(unsigned address, unsigned bytes) {
  char* p = engine_at(address, bytes);
  if ((p - shared) % bytes) {
    fail("an address in shared memory that is not aligned", p - shared);
  }
  if (pieces[(p - shared) / 16].writes) {
    fail("shared memory that a copy is under way to", p - shared);
  }
  return p;
}

char* stored_at(unsigned address, unsigned bytes) {
  char* p = shared_at(address, bytes);
  if (pieces[(p - shared) / 16].reads) {
    fail("a store to shared memory that a product or an add has yet to read", p - shared);
  }
  for (unsigned i = 0; i < bytes; i += 4) {
    words[(p - shared + i) / 4] = {current, ++clock_now};
  }
  return p;
}

void fence_engine() { threads[current].fenced = ++clock_now; }

// made_known fails if a thread's store is not visible to the engine.
static void made_known(unsigned address) {
  for (int i = 0; i < 4; i++) {
    const Word& w = words[(address - SHARED_BASE) / 4 + i];
    if (w.when && threads[w.writer].fenced < w.when) {
      const std::string what = "thread " + std::to_string(w.writer) + " has not called shared_for_engine since it stored to shared memory that the engine uses";
      fail(what.c_str(), address - SHARED_BASE + 4 * i);
    }
  }
}

void engine_reads(unsigned address) {
  Piece& p = piece_at(address);
  if (p.writes) {
    fail("a product or an add of shared memory that a copy is under way to", address - SHARED_BASE);
  }
  made_known(address);
  p.reads++;
}

void engine_has_read(unsigned address) { piece_at(address).reads--; }

void engine_writes(unsigned address) {
  Piece& p = piece_at(address);
  if (p.writes || p.reads) {
    fail("a copy to shared memory that a copy, a product or an add under way uses", address - SHARED_BASE);
  }
  made_known(address);
  memset(engine_at(address, 16), 0xff, 16);
  p.writes++;
}

void engine_has_written(unsigned address) {
  piece_at(address).writes--;
  memset(&words[(address - SHARED_BASE) / 4], 0, 4 * sizeof *words);
}
