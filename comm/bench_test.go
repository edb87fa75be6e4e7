package comm_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkExchange is a hop of a ring of two ranks. The bytes are those that one rank sends.
func BenchmarkExchange(b *testing.B) {
	for _, size := range []int{8, 8 << 10, 64 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("local/%d", size), func(b *testing.B) {
			hop(b, comm.NewLocal(2, nil, comm.Options{}), size)
		})
		b.Run(fmt.Sprintf("unix/%d", size), func(b *testing.B) {
			dir, key := commtest.SocketDir(b), commtest.Secret()
			hop(b, commtest.Join(b, 2, func(r int) (*comm.Group, error) {
				return comm.ConnectUnix(context.Background(), comm.Mesh{Dir: dir, Rank: r, Size: 2, Secret: key}, nil, comm.Options{})
			}), size)
		})
		b.Run(fmt.Sprintf("tcp/%d", size), func(b *testing.B) { hop(b, pair(b, "127.0.0.1", comm.Mesh{}), size) })
		b.Run(fmt.Sprintf("readable/%d", size), func(b *testing.B) { hop(b, pair(b, "127.0.0.1", comm.Mesh{Readable: true}), size) })
	}
}

// BenchmarkStreams is a hop of 16 MiB over TCP, by one connection and by several.
func BenchmarkStreams(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { hop(b, pair(b, "127.0.0.1", comm.Mesh{Streams: n}), 16<<20) })
	}
}

func hop(b *testing.B, groups []*comm.Group, size int) {
	defer closeAll(groups)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			out, in := tensor.New(tensor.U8, size), tensor.New(tensor.U8, size)
			for range b.N {
				p, err := g.Exchange([]comm.Message{{Peer: 1 - r, View: out}}, []comm.Message{{Peer: 1 - r, View: in}})
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
