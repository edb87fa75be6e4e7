//go:build cuda

package call

import (
	"fmt"
	"strings"
	"testing"
)

// TestHostSeesFaults holds that a kernel that no GPU would run as it is meant ends with an error.
func TestHostSeesFaults(t *testing.T) {
	for i, c := range []struct{ name, body, want string }{
		{"right", "store_shared(at + 4 * threadIdx.x, 1); __syncthreads();", ""},
		{"some threads leave before a barrier", "if (threadIdx.x < 40) return; __syncthreads();", "different barriers"},
		{"half a warp waits for the block", "if (threadIdx.x % 32 < 16) __syncthreads(); else __syncwarp();", "different barriers"},
		{"beyond shared memory", "store_shared(at + 256 + 4 * threadIdx.x, 1);", "outside the block's shared memory"},
		{"before shared memory", "load_shared(at - 4);", "outside the block's shared memory"},
		{"four floats off 16 bytes", "store_shared(at + 4, 1, 2, 3, 4);", "not aligned"},
		{"a copy off 16 bytes", "copy16(at, (const char*)shared + 8, true);", "not aligned"},
		{"a copy that nobody waits for", "copy16(at, shared + 16, false); copies_commit(); if (load_shared(at) == 0) fail(\"early\", 0);", ""},
		{"a copy of the last group", "copy4(at, shared, false); copies_commit(); copies_wait<1>(); if (load_shared(at) == 0) fail(\"early\", 0);", ""},
		{"a copy that is waited for", "copy4(at, shared, false); copies_commit(); copies_wait<0>(); if (load_shared(at) == 0) fail(\"there\", 0);", "there"},
		{"what no thread has written", "float x = load_shared(at); if (x != x) fail(\"no number\", 0);", "no number"},
		{"no barrier after a store", "if (threadIdx.x == 0) store_shared(at, 0); else if (load_shared(at) != 0) fail(\"a race\", 0);", "a race"},
		{"no barrier after a store, descending", "if (threadIdx.x == 63) store_shared(at, 0); else if (load_shared(at) != 0) fail(\"a race\", 0);", "a race"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			name := fmt.Sprintf("faulty_%d", i)
			_, err := h.compiler.text(name, []byte(`
#include "mma.cuh"
struct Params { long long x[96]; };
extern "C" void faulty(Params) { unsigned at = smem_address(shared); `+c.body+` }`))
			ok(t, err)
			for range 2 { // in either order of threads
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
