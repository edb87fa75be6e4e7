//go:build cuda

package gpu

import (
	"testing"

	"github.com/cprun/cprun/internal/base/cuda"
)

// A second start compiles nothing. These programs compile quickly; tests of kernels load the others.
func TestLoader(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dev, err := cuda.Open(0)
	check(t, err)
	defer func() { check(t, dev.Close()) }()
	names := []string{"fused", "gemm_simple", "ops_copy", "ops_glu"}
	for start, want := range []int{len(names), 0} {
		l, err := NewLoader(dev)
		check(t, err)
		check(t, l.Preload(names...))
		if got := l.cache.Compiled(); got != want || l.Fault() != nil {
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
		f, err := l.Function("ops_glu", "swiglu_fp32", 0)
		check(t, err)
		if again, _ := l.Function("ops_glu", "swiglu_fp32", 0); again != f {
			t.Error("a function was looked up twice")
		}
		for _, k := range []functionKey{{"ops_glu", "nothing", 0}, {"nothing", "swiglu_fp32", 0}} {
			if _, err := l.Function(k.program, k.name, k.shared); err == nil {
				t.Errorf("%v, which does not exist, was found", k)
			}
		}
	}
}
