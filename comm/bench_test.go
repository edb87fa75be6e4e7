package comm_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkExchange times a hop of a ring of two ranks, by the bytes that one rank sends.
func BenchmarkExchange(b *testing.B) {
	for _, size := range []int{8, 4 << 10, 64 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("local/%d", size), func(b *testing.B) {
			hop(b, comm.NewLocal(2, nil, comm.Options{}), size)
		})
		for name, alone := range map[string]bool{"memory": false, "sockets": true} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) { hop(b, node(b, 2, alone), size) })
		}
		b.Run(fmt.Sprintf("tcp/%d", size), func(b *testing.B) {
			hop(b, tcpWorld(b, 0, make([]tensor.Stream, 2), comm.Options{}), size)
		})
	}
}

// node joins ranks of one node, which share memory if they are not alone.
func node(b *testing.B, n int, alone bool) []*comm.Group {
	return unixWorldOf(func(int) bool { return alone })(b, 0, make([]tensor.Stream, n), comm.Options{})
}

// BenchmarkNode times the collectives of a training step over four ranks of a node, by the bytes of the whole vector.
func BenchmarkNode(b *testing.B) {
	const ranks = 4
	for name, call := range map[string]func(g *comm.Group, all, own tensor.View) (comm.Pending, error){
		"all-reduce": func(g *comm.Group, all, _ tensor.View) (comm.Pending, error) { return g.AllReduce(all, comm.Sum) },
		"reduce-scatter": func(g *comm.Group, all, own tensor.View) (comm.Pending, error) {
			return g.ReduceScatter(own, all, comm.Sum)
		},
		"all-gather": func(g *comm.Group, all, own tensor.View) (comm.Pending, error) { return g.AllGather(all, own) },
	} {
		for _, size := range []int{32, 4 << 10, 64 << 10, 1 << 20, 4 << 20} {
			for kind, alone := range map[string]bool{"memory": false, "sockets": true} {
				b.Run(fmt.Sprintf("%s/%s/%d", name, kind, size), func(b *testing.B) {
					each(b, node(b, ranks, alone), size, func(g *comm.Group) func() (comm.Pending, error) {
						all, own := tensor.New(tensor.F32, size/4), tensor.New(tensor.F32, size/4/ranks)
						return func() (comm.Pending, error) { return call(g, all, own) }
					})
				})
			}
		}
	}
}

func hop(b *testing.B, groups []*comm.Group, size int) {
	each(b, groups, size, func(g *comm.Group) func() (comm.Pending, error) {
		out, in := tensor.New(tensor.U8, size), tensor.New(tensor.U8, size)
		peer := 1 - g.Rank()
		return func() (comm.Pending, error) { return g.Exchange(with(peer, out), with(peer, in)) }
	})
}

// each repeats on every rank the calls that of returns for it.
func each(b *testing.B, groups []*comm.Group, bytes int, of func(g *comm.Group) func() (comm.Pending, error)) {
	defer closeAll(groups)
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	b.ResetTimer()
	repeat(b, groups, of)
}

// repeat makes b.N calls on every rank.
func repeat(b *testing.B, groups []*comm.Group, of func(g *comm.Group) func() (comm.Pending, error)) {
	everyone(b, groups, func(g *comm.Group) (err error) {
		call := of(g)
		for i := 0; i < b.N && err == nil; i++ {
			err = comm.Finish(context.Background())(call())
		}
		return err
	})
}

// BenchmarkWorld makes a world over Unix sockets in one process, runs one barrier, and closes it. It reports the heap
// and stacks of all ranks before the close.
func BenchmarkWorld(b *testing.B) {
	for _, n := range []int{2, 8, 16, 64, 256} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var made, closed time.Duration
			var memory uint64
			idle := runtime.NumGoroutine()
			for range b.N {
				for runtime.NumGoroutine() > idle { // of the world before
					time.Sleep(time.Millisecond)
				}
				before, start := inUse(), time.Now()
				groups := node(b, n, false)
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
		groups := node(b, n, false)
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
				repeat(b, groups, func(g *comm.Group) func() (comm.Pending, error) {
					v := tensor.New(tensor.F32, bytes/4)
					return func() (comm.Pending, error) { return g.AllReduce(v, comm.Sum) }
				})
			})
		}
		closeAll(groups)
	}
}

// inUse returns the bytes of live objects and stacks.
func inUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
