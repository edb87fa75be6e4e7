//go:build cuda

package kernels

import (
	"testing"

	"github.com/cprun/cprun/internal/cuda"
)

// A second start compiles nothing. These programs are quick to compile; tests of kernels load the
// others.
func TestLoader(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dev, err := cuda.Open(0)
	check(t, err)
	defer func() { check(t, dev.Close()) }()
	names := []string{"fused", "gemm_simple", "ops_copy", "ops_swiglu"}
	for start, want := range []int{len(names), 0} {
		l, err := NewLoader(dev)
		check(t, err)
		check(t, l.Preload(names...))
		if got := l.Compiled(); got != want || l.Fault() != nil {
			t.Errorf("start %d compiled %d of %d programs, want %d; fault %v", start, got, len(names), want, l.Fault())
		}
		m, err := l.Load(names[0])
		check(t, err)
		if again, _ := l.Load(names[0]); again != m {
			t.Errorf("%s was loaded twice", names[0])
		}
		if _, err := l.Load("nothing"); err == nil {
			t.Error("a program that does not exist was loaded")
		}
	}
}
