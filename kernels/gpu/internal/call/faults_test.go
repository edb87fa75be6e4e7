//go:build cuda

package call

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// TestHostSeesFaults checks that faulty kernels end with an error.
func TestHostSeesFaults(t *testing.T) {
	for i, c := range []struct{ name, body, want string }{
		{"right", "store_shared(at + 4 * threadIdx.x, 1); __syncthreads();", ""},
		{"some threads leave before a barrier", "if (threadIdx.x < 40) return; __syncthreads();", "different barriers"},
		{"half a warp waits for the block", "if (threadIdx.x % 32 < 16) __syncthreads(); else __syncwarp();",
			"different barriers"},
		{"beyond shared memory", "store_shared(at + 256 + 4 * threadIdx.x, 1);", "outside the block's shared memory"},
		{"before shared memory", "load_shared(at - 4);", "outside the block's shared memory"},
		{"four floats off 16 bytes", "store_shared(at + 4, 1, 2, 3, 4);", "not aligned"},
		{"a copy off 16 bytes", "copy16(at, (const char*)shared + 8, true);", "not aligned"},
		{"a copy that nobody waits for", "copy16(at, shared + 16, false); copies_commit(); if (load_shared(at) == 0) " +
			"fail(\"early\", 0);", ""},
		{"a copy of the last group", "copy4(at, shared, false); copies_commit(); copies_wait<1>(); if (load_shared(at) == " +
			"0) fail(\"early\", 0);", ""},
		{"a copy that is waited for", "copy4(at, shared, false); copies_commit(); copies_wait<0>(); if (load_shared(at) " +
			"== 0) fail(\"there\", 0);", "there"},
		{"what no thread has written", "float x = load_shared(at); if (x != x) fail(\"no number\", 0);", "no number"},
		{"no barrier after a store", "if (threadIdx.x == 0) store_shared(at, 0); else if (load_shared(at) != 0) fail(\"a " +
			"race\", 0);", "a race"},
		{"no barrier after a store, descending", "if (threadIdx.x == 63) store_shared(at, 0); else if (load_shared(at) != " +
			"0) fail(\"a race\", 0);", "a race"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			name := fmt.Sprintf("faulty_%d", i)
			_, err := h.compiler.text(name, []byte(`
#include "mma.cuh"
struct Params { long long x[96]; };
extern "C" void faulty(Params) { unsigned at = smem_address(shared); `+c.body+` }`))
			ok(t, err)
			for range 2 { // in both orders of threads
				if err == nil {
					err = h.launch(Launch{Program: name, Kernel: "faulty", Grid: [3]int{1, 1, 1}, Threads: 64, Shared: 256})
				}
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the host says %v, want %q", err, c.want)
			}
		})
	}
}

// TestHostSeesHopperFaults does the same for the instructions of Hopper. Threads have matrices of 64 by 64, a and b,
// floats of 32 by 8, and a barrier of one arrival. There are tensor maps of such matrices.
func TestHostSeesHopperFaults(t *testing.T) {
	const (
		bring = "if (one) { barrier_expect(full, 16384); copy_box(a, p.map, full, 0, 0, 0, 0); copy_box(b, p.map, full," +
			" 0, 0, 0, 0); }"
		wait     = "barrier_wait(full, 0);"
		multiply = "wg_multiply<fp16_t, false, false>(c, matrix(a), matrix(b), false);"
		come     = bring + wait
		product  = come + "wg_begin();" + multiply + "wg_commit();"
		number   = "if (c[5] != c[5]) fail(\"no number\", 0);"
		store    = "store_shared(a + 8 * threadIdx.x, 1);"
		add      = "if (one) { add_box(p.floats, floats, 0, 0, 0, 0); adds_commit(); }"
		fill     = "store_shared(floats + 8 * threadIdx.x, 0, 0);"
	)
	cases := []struct{ name, body, want string }{
		{"right", product + "wg_wait<0>();" + number, ""},
		{"a product before its matrices are there",
			bring + "wg_begin();" + multiply + "wg_commit(); wg_wait<0>();", "a copy is under way to"},
		{"a load before a copy is there", bring + "load_shared(a);" + wait, "a copy is under way to"},
		{"a wait for the wrong phase", bring + "barrier_wait(full, 1); load_shared(b);", "a copy is under way to"},
		{"a copy that nobody waits for", bring, "under way when the block is over"},
		{"a phase that nobody ends",
			bring + "barrier_wait(full, 0); barrier_wait(full, 1);",
			"parity 1 of the barrier at 0x4400, whose phase 1 lacks 1 arrivals of 1, and 0 bytes"},
		{"bytes that do not come",
			"if (one) { barrier_expect(full, 8200); copy_box(a, p.map, full, 0, 0, 0, 0); }" + wait,
			"lacks 0 arrivals of 1, and 8 bytes"},
		{"too many arrivals", "if (one) barrier_expect(full, 16); else barrier_arrive(full);", "more arrivals"},
		{"a barrier that is none", "barrier_arrive(a);", "no barrier"},
		{"a barrier that was stored over", "if (one) { store_shared(full, 1); barrier_arrive(full); }", "stored over"},
		{"a barrier of which not all know", "if (one) barrier_init(full + 8, 128); barrier_arrive(full + 8);", "barrier"},
		{"a barrier of which the engine does not know",
			"if (one) { barrier_init(full + 8, 1); copy_bytes(a, (void*)p.map.words[0], 16, full + 8); }", "made known"},
		{"a box off 128 bytes", "if (one) copy_box(a + 64, p.map, full, 0, 0, 0, 0);", "not aligned"},
		{"bytes off 16", "if (one) copy_bytes(a + 8, (void*)p.map.words[0], 16, full);", "no pieces of 16"},
		{"8 bytes", "if (one) copy_bytes(a, (void*)p.map.words[0], 8, full);", "no pieces of 16"},
		{"a box beyond shared memory",
			"if (one) copy_box(b + 4096, p.map, full, 0, 0, 0, 0);", "outside the block's shared memory"},
		{"two copies to one place",
			bring + "if (one) copy_bytes(b, (void*)p.map.words[0], 16, full);", "a copy to shared memory"},
		{"sums before the wait", product + number, "no number"},
		{"sums of a group that is pending", product + "wg_wait<1>();" + number, "no number"},
		{"sums that were never committed", come + "wg_begin();" + multiply + "wg_wait<0>();" + number, "no number"},
		{"products that nobody waits for", product, "has not waited for products"},
		{"sums that are changed before the wait", product + "c[3] = 1; wg_wait<0>();", "were changed"},
		{"no wg_begin", come + multiply, "since wg_begin"},
		{"no wg_begin after a wait", product + "wg_wait<0>();" + multiply, "since wg_begin"},
		{"a product of three warps",
			come + "wg_begin(); if (threadIdx.x >= 32) {" + multiply + "wg_commit(); wg_wait<0>(); }",
			"with the rest of its warpgroup"},
		{"a product of which warps do not agree",
			come + "wg_begin(); wg_multiply<fp16_t, false, false>(c, matrix(a), matrix(threadIdx.x < 32 ? a : b), false);",
			"do not agree"},
		{"a matrix off 1024 bytes",
			come + "wg_begin(); wg_multiply<fp16_t, false, false>(c, matrix(a + 128), matrix(b), false);",
			"does not begin where one may"},
		{"a copy to what a product reads",
			product + "if (one) copy_bytes(b, (void*)p.map.words[0], 16, full); wg_wait<0>();", "a copy to shared memory"},
		{"a store to what a product reads", product + "store_shared(b, 1); wg_wait<0>();", "a store to shared memory"},
		{"a store that is made known",
			come + "__syncthreads();" + store + "shared_for_engine(); __syncthreads(); wg_begin();" + multiply +
				"wg_commit(); wg_wait<0>();", ""},
		{"a store that is not made known",
			come + "__syncthreads();" + store + "__syncthreads(); wg_begin();" + multiply, "has not called shared_for_engine"},
		{"a store that is made known before",
			come + "shared_for_engine(); __syncthreads();" + store + "__syncthreads(); wg_begin();" + multiply,
			"has not called shared_for_engine"},
		{"a store that others make known",
			come + "__syncthreads(); if (one) store_shared(a, 1); else shared_for_engine(); __syncthreads(); wg_begin();" + multiply,
			"thread 0 has not called"},
		{"adds", fill + "shared_for_engine(); __syncthreads();" + add + "adds_wait<0>();", ""},
		{"adds of what is not made known",
			fill + "__syncthreads();" + add + "adds_wait<0>();", "has not called shared_for_engine"},
		{"adds that nobody waits for", fill + "shared_for_engine(); __syncthreads();" + add, "has not waited for adds"},
		{"a store to what is added",
			fill + "shared_for_engine(); __syncthreads();" + add + "__syncthreads();" + fill + "adds_wait<0>();",
			"a store to shared memory"},
		{"a store to what was added",
			fill + "shared_for_engine(); __syncthreads();" + add + "adds_wait<0>(); __syncthreads();" + fill, ""},
		{"warps that meet", "if (threadIdx.x < 64) some_arrive(1, 128); else some_sync(1, 128);", ""},
		{"warps that do not meet",
			"if (threadIdx.x < 64) some_arrive(1, 128); else some_sync(2, 128);",
			"barrier 2, to which 64 threads of 128 came"},
		{"warps that do not agree how many",
			"if (threadIdx.x < 64) some_arrive(1, 96); else some_sync(1, 128);", "do not agree how many"},
		{"threads of many warps meet", "if (threadIdx.x % 4 == 0) some_sync(1, 32);", "a part of a warp"},
		{"a poll that ends",
			"volatile float* x = p.out; if (one) { __nanosleep(9); *x = 7; } else while (*x != 7) __nanosleep(9);", ""},
		{"a poll that does not", "volatile float* x = p.out; while (*x != 8) __nanosleep(9);", "asks again and again"},
	}
	var code strings.Builder
	code.WriteString(`#include "hopper.cuh"
struct Params { TensorMap map, floats; float* out; };
`)
	for i, c := range cases {
		fmt.Fprintf(&code, `extern "C" void faulty_%d(Params p) {
  const unsigned a = smem_address(shared), b = a + 8192, floats = b + 8192, full = floats + 1024;
  const bool one = threadIdx.x == 0;
  float c[32] = {};
  if (one) {
    barrier_init(full, 1);
    barriers_ready();
  }
  __syncthreads();
  %s
}
`, i, c.body)
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			_, err := h.compiler.text("hopper_faults", []byte(code.String()))
			ok(t, err)
			m, err := h.alloc(64 * 128)
			ok(t, err)
			arg := struct {
				matrix, floats tensorMap
				out            uint64
			}{
				h.mapOf(tensor.Dense(m, tensor.F16, 0, [4]int{1, 64, 1, 64}), 64),
				h.mapOf(tensor.Dense(m, tensor.F32, 0, [4]int{1, 8, 1, 32}), 8),
				uint64(uintptr(m.Ptr())),
			}
			h.move(&arg.out)
			for range 2 { // in both orders of threads
				if err == nil {
					err = h.start("hopper_faults", fmt.Sprintf("faulty_%d", i), [3]int{1, 1, 1}, [2]int{128, 1}, 16384+1024+16,
						argumentsOf(&arg))
				}
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the host says %v, want %q", err, c.want)
			}
		})
	}
}
