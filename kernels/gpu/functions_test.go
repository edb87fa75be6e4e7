//go:build cuda

package gpu

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda"
)

// finder counts look-ups. It shares the lock of the cache.
type finder struct{ asked []functionKey }

func (f *finder) find(k functionKey) (*cuda.Function, error) {
	f.asked = append(f.asked, k)
	if k.name == "nothing" {
		return nil, errors.New("there is no such kernel")
	}
	return &cuda.Function{Name: k.name}, nil
}

func TestFunctionCache(t *testing.T) {
	var driver finder
	c := newFunctionCache(driver.find)
	keys := []functionKey{{"a", "f", 0}, {"b", "f", 0}, {"a", "g", 0}, {"a", "f", 64 << 10}}
	found := map[*cuda.Function]bool{}
	for range 2 {
		for _, k := range keys {
			f, err := c.get(k)
			check(t, err)
			found[f] = true
		}
	}
	if len(found) != len(keys) || !slices.Equal(driver.asked, keys) {
		t.Errorf("%d functions for %d keys; the driver was asked for %v", len(found), len(keys), driver.asked)
	}
	for range 2 {
		if f, err := c.get(functionKey{"a", "nothing", 0}); f != nil || err == nil {
			t.Errorf("a kernel that does not exist is %v, %v", f, err)
		}
	}
	if n := len(driver.asked) - len(keys); n != 2 {
		t.Errorf("the driver was asked %d times for what it does not have, want each time", n)
	}
}

// A second use of a function with less shared memory does not lower the limit of the first.
func TestFunctionCacheKeepsTheLargestLimit(t *testing.T) {
	var driver finder
	c := newFunctionCache(driver.find)
	for _, shared := range []int{64 << 10, 48 << 10, 96 << 10} {
		_, err := c.get(functionKey{"a", "f", shared})
		check(t, err)
	}
	want := []functionKey{{"a", "f", 64 << 10}, {"a", "f", 64 << 10}, {"a", "f", 96 << 10}}
	if !slices.Equal(driver.asked, want) {
		t.Errorf("the driver was asked for %v, want %v", driver.asked, want)
	}
}

func TestFunctionCacheFromManyGoroutines(t *testing.T) {
	var driver finder
	c := newFunctionCache(driver.find)
	names := []string{"f", "g", "h"}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 300 {
				k := functionKey{"a", names[i%len(names)], 0}
				if f, err := c.get(k); err != nil || f.Name != k.name {
					t.Errorf("%v is %v, %v", k, f, err)
				}
			}
		})
	}
	wg.Wait()
	if len(driver.asked) != len(names) {
		t.Errorf("the driver was asked for %v, want each of %v once", driver.asked, names)
	}
}

func TestKnownFunctionsTakeNoAllocation(t *testing.T) {
	var driver finder
	l := &Loader{functions: newFunctionCache(driver.find)}
	use := func() {
		if _, err := l.Function("a", "f", 0); err != nil {
			t.Error(err)
		}
	}
	use()
	if n := testing.AllocsPerRun(100, use); n != 0 {
		t.Errorf("a known function takes %v allocations", n)
	}
}
