// The products of warpgroups. They are computed when all threads of the group wait for them and no other thread can
// run. Until then, their sums are NaN.
#pragma GCC optimize("O3")
#include "machine.h"

#include <deque>
#include <list>

constexpr int GROUP = 128, HEIGHT = 64, DEPTH = 16, MAX_WIDTH = 256;
constexpr unsigned POISON = 0x7fc0dead; // NaN

// Sums holds the sums of products, 64 by width, of all threads of a group.
struct Sums {
  int width;
  float* at[GROUP];  // the thread's sums; NULL: the thread has not arrived
  long last;         // the number of the last product into them
  std::vector<float> x;

  // place returns the position of a thread's sum i.
  size_t place(int thread, int i) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    return row * width + col;
  }
};

struct Product {
  Multiplication what; // from the first thread to arrive, with its pointers
  Sums* sums;
  unsigned left[GROUP][4];
};

struct Warpgroup {
  std::list<Sums> sums;
  std::deque<Product> products;
  long done; // number of earlier products
};
static Warpgroup warpgroups[MAX_THREADS / GROUP];

// Matrix is an operand in shared memory, as in hopper_panels.cuh: outer by 16, or transposed. line is the bytes of a row
// of a panel.
struct Matrix {
  unsigned start, wide, deep, line;
  bool turned;
  int outer;

  Matrix(unsigned long long x, bool turned, int outer)
      : start(((x & 0x3fff) << 4) + current / threads_of_block * WINDOW), wide((x >> 16 & 0x3fff) << 4), deep((x >> 32 & 0x3fff) << 4), line(x >> 62 == 1 ? 128 : 64), turned(turned), outer(outer) {
    if (x >> 62 == 0 || x >> 62 == 3 || start / line % 8 || start % (turned ? line : 32) || deep % (line * 8) || (turned && outer > (int)line / 2 && wide % (line * 8))) {
      fail("a matrix that does not begin where one may, or is not made as one", start - SHARED_BASE);
    }
  }

  unsigned place(int i, int k) const {
    const int width = line / 2;
    unsigned at = turned ? start + i / width * wide + i % width * 2 + k / 8 * deep + k % 8 * line : start + i / 8 * deep + i % 8 * line + k * 2;
    return at ^ (at / 128 % (line / 16)) << 4;
  }

  // pieces calls f with the address of each piece of 16 bytes, and the position of its first element.
  template <class F> void pieces(F f) const {
    for (int i = 0; i < outer; i += turned ? 8 : 1) {
      for (int k = 0; k < DEPTH; k += turned ? 1 : 8) {
        f(place(i, k), i, k);
      }
    }
  }
};

static float number(unsigned short bits, Coding kind) {
  if (kind == BF16) {
    return __uint_as_float((unsigned)bits << 16);
  }
  if (kind != FP16) {
    const int code = bits >> 8 * (kind == HIGH_E4M3) & 0x7f, exponent = code >> 3;
    const float x = code == 0x7f ? NAN : exponent ? ldexpf(8 + code % 8, exponent - 10) : ldexpf(code, -9);
    return bits >> (kind == HIGH_E4M3 ? 15 : 7) & 1 ? -x : x;
  }
  _Float16 h;
  memcpy(&h, &bits, 2);
  return h;
}

template <class F> static void matrices(const Product& p, F f) {
  const Multiplication& m = p.what;
  if (!m.left) {
    f(Matrix(m.a, m.trans_a, HEIGHT));
  }
  f(Matrix(m.b, m.trans_b, p.sums->width));
}

void begin_products() { threads[current].begun = true; }

// sums_of finds the sums of a started product, or makes them.
static Sums* sums_of(Warpgroup& g, const Multiplication& m) {
  for (Sums& s : g.sums) {
    if (s.at[current % GROUP] == m.sums) {
      return &s;
    }
  }
  g.sums.push_back({m.count * 2, {}, 0, std::vector<float>(HEIGHT * m.count * 2)});
  return &g.sums.back();
}

static bool same(const Multiplication& x, const Multiplication& y) {
  return x.count == y.count && !x.left == !y.left && x.a == y.a && x.b == y.b && x.trans_a == y.trans_a && x.trans_b == y.trans_b && x.keep == y.keep &&
         x.kind == y.kind;
}

// join adds this thread's sums to those of the engine. A wg_begin must have preceded its registers.
static void join(Sums& s, const Multiplication& m) {
  float*& mine = s.at[current % GROUP];
  if (mine && mine != m.sums) {
    fail("threads of a warpgroup do not agree what they multiply; sums", s.width);
  }
  if (!threads[current].begun && (!mine || m.left)) {
    fail("a product of registers that were used since wg_begin; product", threads[current].products);
  }
  if (mine) {
    return;
  }
  mine = m.sums;
  for (int i = 0; i < m.count; i++) {
    s.x[s.place(current % GROUP, i)] = mine[i];
    memcpy(&mine[i], &POISON, 4);
  }
}

void start_product(const Multiplication& m) {
  if (threads_of_all < current / GROUP * GROUP + GROUP) {
    fail("a product of less than a warpgroup; threads", threads_of_block);
  }
  Warpgroup& g = warpgroups[current / GROUP];
  long& number = threads[current].products;
  if (number == g.done + (long)g.products.size()) { // the first thread to arrive
    g.products.push_back({m, sums_of(g, m)});
    matrices(g.products.back(), [](const Matrix& x) { x.pieces([](unsigned at, int, int) { engine_reads(at); }); });
  }
  Product& p = g.products[number - g.done];
  if (!same(p.what, m)) {
    fail("threads of a warpgroup do not agree what they multiply; product", number);
  }
  join(*p.sums, m);
  p.sums->last = number++;
  if (m.left) {
    memcpy(p.left[current % GROUP], m.left, sizeof *p.left);
  }
}

void commit_products() { threads[current].product_groups.push_back(threads[current].products); }

void wait_products(int pending) {
  Thread& t = threads[current];
  if ((int)t.product_groups.size() <= pending) {
    return;
  }
  const size_t groups = t.product_groups.size() - pending;
  const long until = t.product_groups[groups - 1];
  t.product_groups.erase(t.product_groups.begin(), t.product_groups.begin() + groups);
  if (until > warpgroups[current / GROUP].done) {
    suspend(AT_PRODUCTS, 0, until);
    t.begun = false;
  }
}

// read_left fills A from the threads' registers.
static void read_left(const Product& p, float (&a)[HEIGHT][2 * DEPTH]) {
  for (int t = 0; t < GROUP; t++) {
    const int lane = t % 32, row = t / 32 * 16 + lane / 4;
    for (int i = 0; i < 8; i++) {
      a[row + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = number(p.left[t][i / 2] >> i % 2 * 16, p.what.kind);
    }
  }
}

// read fills an array, indexed by place(outer, k), from a matrix in shared memory. Second codes of words follow all first
// ones.
template <class F> static void read(const Matrix& x, Coding kind, F place) {
  x.pieces([&](unsigned at, int i, int k) {
    unsigned short bits[8];
    memcpy(bits, engine_at(at, 16), 16);
    for (int j = 0; j < 8; j++) {
      place(x.turned ? i + j : i, x.turned ? k : k + j) = number(bits[j], kind);
      if (kind == LOW_E4M3) {
        place(i, DEPTH + k + j) = number(bits[j], HIGH_E4M3);
      }
    }
    engine_has_read(at);
  });
}

static void make(Product& p) {
  const Multiplication& m = p.what;
  const int depth = m.kind == LOW_E4M3 ? 2 * DEPTH : DEPTH, width = p.sums->width;
  static float a[HEIGHT][2 * DEPTH], b[2 * DEPTH][MAX_WIDTH];
  if (m.left) {
    read_left(p, a);
  } else {
    read(Matrix(m.a, m.trans_a, HEIGHT), m.kind, [](int i, int k) -> float& { return a[i][k]; });
  }
  read(Matrix(m.b, m.trans_b, width), m.kind, [](int i, int k) -> float& { return b[k][i]; });
  for (int i = 0; i < HEIGHT; i++) {
    float* x = &p.sums->x[i * width];
    if (!m.keep) {
      memset(x, 0, width * 4);
    }
    for (int k = 0; k < depth; k++) {
      const float y = a[i][k];
      for (int j = 0; j < width; j++) {
        x[j] += y * b[k][j];
      }
    }
  }
}

// give returns sums to their threads. No thread may have changed its sums.
static void give(const Sums& s, unsigned first) {
  for (int t = 0; t < GROUP; t++) {
    for (int i = 0; i < s.width / 2; i++) {
      if (__float_as_uint(s.at[t][i]) != POISON) {
        fail_of(first + t, "sums of a product were changed before it was waited for; sum", i);
      }
      s.at[t][i] = s.x[s.place(t, i)];
    }
  }
}

// waits returns the number of the product for which all threads of a warpgroup wait, or 0.
static long waits(unsigned first) {
  for (unsigned i = first; i < first + GROUP; i++) {
    if (threads[i].state != AT_PRODUCTS) {
      return 0;
    }
    if (threads[i].until != threads[first].until) {
      fail_of(i, "threads of a warpgroup do not agree for which products they wait; products", threads[i].until);
    }
  }
  return threads[first].until;
}

static bool step(unsigned first) {
  const long until = waits(first);
  if (!until) {
    return false;
  }
  current = first;
  Warpgroup& g = warpgroups[first / GROUP];
  for (; g.done < until; g.done++) {
    make(g.products.front());
    g.products.pop_front();
  }
  for (auto s = g.sums.begin(); s != g.sums.end();) {
    if (s->last < until) {
      give(*s, first);
      s = g.sums.erase(s);
    } else {
      s++;
    }
  }
  for (unsigned i = first; i < first + GROUP; i++) {
    threads[i].state = READY;
  }
  return true;
}

// products_step computes the products for which a warpgroup waits.
bool products_step() {
  const int groups = threads_of_all / GROUP;
  for (int i = 0; i < groups; i++) {
    if (step(GROUP * (descending ? groups - 1 - i : i))) {
      return true;
    }
  }
  return false;
}

void products_begin() {
  for (Warpgroup& g : warpgroups) {
    g = {};
  }
}

void products_end() {
  for (unsigned i = 0; i < threads_of_all / GROUP; i++) {
    if (!warpgroups[i].products.empty()) {
      fail_of(i * GROUP, "the block is over, and has not waited for products; products", warpgroups[i].products.size());
    }
  }
}
