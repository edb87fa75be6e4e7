package launch

import (
	"runtime"
	"slices"
	"testing"
)

// TestShareOf checks that a rank is pinned if each core gets equally many ranks.
func TestShareOf(t *testing.T) {
	for name, c := range map[string]struct {
		cores        []int
		procs, ranks int
		want         []int // nil: not pinned
	}{
		"two each":         {[]int{0, 1}, 2, 4, []int{0, 0, 1, 1}},
		"cores of a mask":  {[]int{3, 7, 9}, 3, 6, []int{3, 3, 7, 7, 9, 9}},
		"one each":         {[]int{4, 7}, 2, 2, []int{4, 7}},
		"more cores":       {[]int{0, 1, 2, 3}, 4, 2, nil},
		"not even":         {[]int{0, 1}, 2, 3, nil},
		"one core":         {[]int{5}, 1, 4, nil},
		"not known":        {nil, 2, 4, nil},
		"limited in cores": {[]int{0, 1, 2, 3}, 2, 8, nil}, // a cgroup's limit of processor time
	} {
		for r := range c.ranks {
			got := coreForRank(c.cores, c.procs, r, c.ranks)
			switch {
			case c.want == nil && got != nil:
				t.Errorf("%s: rank %d of %d keeps to core %d", name, r, c.ranks, *got)
			case c.want != nil && (got == nil || *got != c.want[r]):
				t.Errorf("%s: rank %d of %d keeps to %v, want %d", name, r, c.ranks, got, c.want[r])
			}
		}
	}
}

// TestCrowded checks that ranks count as oversubscribed if a batch system bound them to fewer cores. On a host without
// such a bound, fewer ranks are the only fix. Tasks with a core each are not oversubscribed.
func TestCrowded(t *testing.T) {
	for name, c := range map[string]struct{ own, host, given, local, ranks, want, cores int }{
		"a task with one core":         {own: 1, host: 8, given: 1, local: 4, ranks: 4, want: 4, cores: 1},
		"a mask outside of Slurm":      {own: 2, host: 8, local: 4, ranks: 4, want: 4, cores: 2},
		"tasks on one core":            {own: 1, host: 8, given: 1, local: 1, ranks: 4, want: 4, cores: 1},
		"tasks with a core each":       {own: 1, host: 8, given: 4, local: 1, ranks: 4},
		"tasks of an unknown launcher": {own: 1, host: 8, local: 1, ranks: 4},
		"enough":                       {own: 4, host: 8, given: 4, local: 4, ranks: 4},
		"a whole host":                 {own: 2, host: 2, given: 2, local: 4, ranks: 4},
		"not known":                    {host: 8, given: 1, local: 4, ranks: 4},
		"a host that is not known":     {own: 2, local: 4, ranks: 4},
	} {
		if n, cores := oversubscribed(c.own, c.host, c.given, c.local, c.ranks); n != c.want || cores != c.cores {
			t.Errorf("%s: %d ranks on %d cores, want %d on %d", name, n, cores, c.want, c.cores)
		}
	}
}

// TestCoreIsLeftAlone checks that cprun does not pin ranks that the user, or a launcher per rank, has placed.
func TestCoreIsLeftAlone(t *testing.T) {
	n := len(ownCores())
	ranks := &hello{Process: Process{LocalWorldSize: 2 * n}}
	if core := ranks.chooseCore(true); core != nil {
		t.Errorf("with GOMAXPROCS of the user a rank keeps to core %d", *core)
	}
	if core := ranks.chooseCore(false); (core != nil) != (n > 1 && runtime.GOMAXPROCS(0) == n) {
		t.Errorf("the first of %d ranks on %d cores keeps to %v", 2*n, n, core)
	}
	one := &hello{Process: Process{LocalWorldSize: 1, Hosts: slices.Repeat([]string{"a"}, 2*n)}}
	if core := one.chooseCore(false); core != nil {
		t.Errorf("the rank of a launcher of its own keeps to core %d", *core)
	}
}
