package cpu

import (
	"runtime"
	"testing"
)

// TestLimit holds that all pieces of a kernel have one worker where the process is to compute on one.
func TestLimit(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	defer Limit(0)
	for _, limit := range []int{1, 0} {
		Limit(limit)
		c := newCPU(t)
		used := make([]*scratch, 64)
		c.split(len(used), func(s *scratch, i int) { used[i] = s })
		for i, s := range used {
			if s == nil || limit == 1 && s != used[0] {
				t.Errorf("limit %d: piece %d has worker %p, and piece 0 %p", limit, i, s, used[0])
			}
		}
		if want := max(limit, 4*(1-limit)); len(c.scratch) != want {
			t.Errorf("limit %d: %d workers, want %d", limit, len(c.scratch), want)
		}
	}
}
