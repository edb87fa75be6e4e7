package comm_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkWorld makes a world over Unix sockets in one process, runs one barrier, and closes it. It reports the heap
// and stacks of all ranks before the close.
func BenchmarkWorld(b *testing.B) {
	for _, n := range []int{2, 8, 16, 64, 256} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var made, closed time.Duration
			var memory uint64
			idle := runtime.NumGoroutine()
			for range b.N {
				dir, key := worldtest.SocketDir(b), worldtest.Secret()
				for runtime.NumGoroutine() > idle { // of the world before
					time.Sleep(time.Millisecond)
				}
				before, start := inUse(), time.Now()
				groups := worldtest.Join(b, n, func(r int) (*comm.Group, error) {
					return comm.Connect(
						context.Background(),
						comm.Mesh{Dir: dir, Rank: r, Size: n, Secret: key},
						nil,
						comm.Options{},
					)
				})
				everyone(b, groups, func(g *comm.Group) error { return g.Barrier(context.Background()) })
				made += time.Since(start)
				memory += inUse() - before
				start = time.Now()
				closeAll(groups)
				closed += time.Since(start)
			}
			b.ReportMetric(made.Seconds()*1e3/float64(b.N), "ms/world")
			b.ReportMetric(closed.Seconds()*1e3/float64(b.N), "ms/close")
			b.ReportMetric(float64(memory)/float64(b.N)/float64(n)/1024, "KiB/rank")
		})
	}
}

// BenchmarkCollectives runs collectives of worlds on both sides of the bound.
func BenchmarkCollectives(b *testing.B) {
	for _, n := range []int{8, 16, 64} {
		dir, key := worldtest.SocketDir(b), worldtest.Secret()
		groups := worldtest.Join(b, n, func(r int) (*comm.Group, error) {
			return comm.Connect(
				context.Background(),
				comm.Mesh{Dir: dir, Rank: r, Size: n, Secret: key},
				nil,
				comm.Options{},
			)
		})
		b.Run(fmt.Sprintf("barrier/%d", n), func(b *testing.B) {
			everyone(b, groups, func(g *comm.Group) (err error) {
				for i := 0; i < b.N && err == nil; i++ {
					err = g.Barrier(context.Background())
				}
				return err
			})
		})
		for _, bytes := range []int{8, 64 << 10, 4 << 20} {
			b.Run(fmt.Sprintf("all-reduce/%d/%d", n, bytes), func(b *testing.B) {
				everyone(b, groups, func(g *comm.Group) error {
					v := tensor.New(tensor.F32, bytes/4)
					for range b.N {
						p, err := g.AllReduce(v, comm.Sum)
						if err == nil {
							err = p.Sync(context.Background())
						}
						if err != nil {
							return err
						}
					}
					return nil
				})
			})
		}
		closeAll(groups)
	}
}

// everyone runs f for all groups at once.
func everyone(t testing.TB, groups []*comm.Group, f func(g *comm.Group) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := f(g); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
}

// inUse returns the bytes of live objects and stacks.
func inUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
