//go:build cuda

package call

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
)

// TestClustersShareSMs checks the grids of head dim 512: two blocks for each 64 keys of a head, or two for each two SMs
// that a kernel takes.
func TestClustersShareSMs(t *testing.T) {
	s, _ := source.HopperShapeFor(512, 512)
	f := flashOf(300, 300, 2, 512, doc(0, 300, causal))
	for _, c := range []struct{ sms, margin, grid, next, orderedNext int }{
		{132, 0, 20, 0, 1}, {132, 112, 20, 0, 1}, {132, 114, 18, 1, 1}, {132, 115, 16, 1, 1}, {132, 131, 2, 1, 1},
	} {
		sms := SMs{c.sms, c.sms - c.margin}
		l, ordered := f.HopperBackward(s, sms, span(0, 300)), f.HopperOrdered(s, sms, span(0, 300))
		if l.Grid != [3]int{c.grid, 1, 1} || ordered.Grid != l.Grid || l.Next != c.next || ordered.Next != c.orderedNext ||
			ordered.Progress != 5*8*4 {
			t.Errorf("%v: grids %v and %v, next %d and %d, progress %d", sms, l.Grid, ordered.Grid, l.Next, ordered.Next,
				ordered.Progress)
		}
	}
}

// TestHostSeesClusterFaults checks clusters of two blocks of a warp. Each block has room for four floats of each thread
// of the other, and a barrier of one arrival. As kernels do, it waits for its start, and leaves after the other.
func TestHostSeesClusterFaults(t *testing.T) {
	const (
		start  = "cluster_sync();"
		give   = "send(there + 16 * threadIdx.x, there + 512, cluster_rank(), 1, 2, 3);"
		expect = "if (threadIdx.x == 0) barrier_expect(at + 512, 512);"
		check  = "if (load_shared(at + 16 * threadIdx.x) != (cluster_rank() ^ 1)) fail(\"another float\", 0);"
		come   = expect + "barrier_wait(at + 512, 0);" + check
	)
	cases := []struct{ name, body, want string }{
		{"right", start + give + come + start, ""},
		{"floats before the barrier expects them", start + give + "cluster_sync();" + come + start, ""},
		{"floats before they come", start + give + start + expect + check + start, "a copy is under way to"},
		{"floats that nobody waits for", start + give + expect + start, "under way when the block is over"},
		{"floats of one block", start + "if (cluster_rank()) " + give + come + start, "waits for a phase"},
		{"floats to a block that may not have started", give + start + come + start, "may not have started"},
		{"an arrival at a block that has ended",
			start + "if (cluster_rank()) for (int i = 0; i < 9; i++) __nanosleep(9); else return;" +
				"if (threadIdx.x == 0) send_arrive(there + 512);", "has ended"},
		{"a word for the other block",
			start + "if (threadIdx.x == 0) send_word(there, 7 + cluster_rank());" + start +
				"if (load_shared(at) != __uint_as_float(8 - cluster_rank())) fail(\"another word\", 0);", ""},
		{"a word without a wait",
			start + "if (cluster_rank() && threadIdx.x == 0) send_word(there, 0);" +
				"if (!cluster_rank()) { __nanosleep(9); if (load_shared(at) != 0) fail(\"another word\", 0); }" + start, ""},
		{"barriers of a block", start + "if (cluster_rank()) { some_sync(1, 32); __syncthreads(); }" + start, ""},
		{"a block beyond its shared memory", start + "store_shared(at + 1024, 1);", "outside the block's shared memory"},
	}
	code := `#include "hopper_cluster.cuh"
struct Params { long long x[96]; };
`
	for i, c := range cases {
		code += fmt.Sprintf(`extern "C" void cluster_%d(Params) {
  const unsigned at = smem_address(shared), there = in_block(at, cluster_rank() ^ 1);
  if (blockIdx.x %% 2 != cluster_rank()) fail("the rank of another block", blockIdx.x);
  if (threadIdx.x == 0) {
    barrier_init(at + 512, 1);
    barriers_ready();
  }
  %s
}
`, i, c.body)
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			_, err := h.compiler.text("cluster_faults", []byte(code), "CLUSTER=2")
			ok(t, err)
			for range 2 { // in both orders of threads
				if err == nil {
					err = h.start("cluster_faults", fmt.Sprintf("cluster_%d", i), [3]int{4, 1, 1}, [2]int{32, 1}, 1024,
						arguments{})
				}
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the host says %v, want %q", err, c.want)
			}
		})
	}
}
