package comm_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// Three ranks of one process pass their values on around a ring, as ring attention does with
// keys, until each has seen all.
func ExampleNewLocal() {
	groups := comm.NewLocal(3, nil, comm.Options{})
	seen := make([][]int32, len(groups))
	var wg sync.WaitGroup
	for rank, g := range groups {
		wg.Go(func() {
			defer g.Close()
			next, prev := (rank+1)%3, (rank+2)%3
			have, come := tensor.FromSlice([]int32{int32(rank)}, 1), tensor.New(tensor.I32, 1)
			for range groups {
				seen[rank] = append(seen[rank], tensor.Data[int32](have)[0])
				err := comm.Finish(context.Background())(g.Exchange(
					[]comm.Message{{Peer: next, View: have}}, []comm.Message{{Peer: prev, View: come}}))
				if err != nil {
					panic(err)
				}
				have, come = come, have
			}
			if err := g.Barrier(context.Background()); err != nil { // all stay until then
				panic(err)
			}
		})
	}
	wg.Wait()
	for rank, values := range seen {
		fmt.Println("rank", rank, "saw", values)
	}
	// Output:
	// rank 0 saw [0 2 1]
	// rank 1 saw [1 0 2]
	// rank 2 saw [2 1 0]
}

// An all-reduce leaves the sum of all ranks' values on each of them. It is combined in rank order,
// so that it is the same, bit for bit, on all and each time.
func ExampleGroup_AllReduce() {
	groups := comm.NewLocal(4, nil, comm.Options{})
	sums := make([]tensor.View, len(groups))
	var wg sync.WaitGroup
	for rank, g := range groups {
		wg.Go(func() {
			defer g.Close()
			sums[rank] = tensor.FromSlice([]float32{1, float32(rank)}, 2)
			ctx := context.Background()
			err := comm.Finish(ctx)(g.AllReduce(sums[rank], comm.Sum))
			if err = errors.Join(err, g.Barrier(ctx)); err != nil { // all stay until then
				panic(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(tensor.Data[float32](sums[0]), tensor.Data[float32](sums[3]))
	// Output: [4 6] [4 6]
}
