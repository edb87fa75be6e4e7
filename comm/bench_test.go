package comm_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
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
		b.Run(fmt.Sprintf("tcp/%d", size), func(b *testing.B) { hop(b, pair(b, "127.0.0.1"), size) })
	}
}

// node joins ranks of one node, which share memory if they are not alone.
func node(b *testing.B, n int, alone bool) []*comm.Group {
	dir, key := worldtest.SocketDir(b), worldtest.Secret()
	return worldtest.Join(b, n, func(r int) (*comm.Group, error) {
		return comm.Connect(
			context.Background(),
			comm.Mesh{Dir: dir, Rank: r, Size: n, Secret: key, Alone: alone},
			nil,
			comm.Options{},
		)
	})
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
		return func() (comm.Pending, error) {
			return g.Exchange([]comm.Message{{Peer: peer, View: out}}, []comm.Message{{Peer: peer, View: in}})
		}
	})
}

// each repeats on every rank the calls that of returns for it.
func each(b *testing.B, groups []*comm.Group, bytes int, of func(g *comm.Group) func() (comm.Pending, error)) {
	defer closeAll(groups)
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			call := of(g)
			for range b.N {
				p, err := call()
				if err == nil {
					err = p.Sync(context.Background())
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}
