package commtest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// testStreamOrder queues slow work, transfers and work again, many times, on buffers that
// are used again and again, and waits once, at the end. Wrong order shows as wrong numbers
// here, and as a race under the race detector.
func (s suite) testStreamOrder(t *testing.T) {
	const n, size, hops = 3, 3000, 12
	s.run(t, n, comm.Options{}, func(r *rank) error {
		next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
		out, in := tensor.New(tensor.F32, size), tensor.New(tensor.F32, size)
		src, dst := tensor.Data[float32](out), tensor.Data[float32](in)
		sum := tensor.New(tensor.F64, 1)
		total := tensor.Data[float64](sum)
		for h := range hops {
			r.s.Do("produce", func() error {
				time.Sleep(time.Duration((r.Rank()+h)%3) * time.Millisecond)
				for i := range src {
					src[i] = float32(r.Rank()*1000 + h)
				}
				return nil
			})
			p, err := r.Exchange([]comm.Message{{Peer: next, View: out}}, []comm.Message{{Peer: prev, View: in}})
			if err != nil {
				return err
			}
			p.Wait()
			r.s.Do("consume", func() error {
				want := float32(prev*1000 + h)
				if i := slices.IndexFunc(dst, func(x float32) bool { return x != want }); i >= 0 {
					return fmt.Errorf("hop %d: element %d is %v, want %v", h, i, dst[i], want)
				}
				total[0] += float64(dst[0])
				return nil
			})
		}
		p, err := r.AllReduce(sum, comm.Sum)
		if err != nil {
			return err
		}
		p.Wait()
		if err := r.s.Sync(r.ctx); err != nil {
			return err
		}
		want := 0.0
		for q := range n {
			for h := range hops {
				want += float64(q*1000 + h)
			}
		}
		if total[0] != want {
			return fmt.Errorf("the sum over ranks and hops is %v, want %v", total[0], want)
		}
		return nil
	})
}

// testSplit makes rows and columns of a 2 by 3 grid, a reversed group, and splits of splits.
func (s suite) testSplit(t *testing.T) {
	s.run(t, 6, comm.Options{}, func(r *rank) error {
		row, err := r.Split(r.ctx, r.Rank()/3, 0)
		if err != nil {
			return err
		}
		defer row.Close()
		column, err := r.Split(r.ctx, r.Rank()%3, 0)
		if err != nil {
			return err
		}
		defer column.Close()
		back, err := r.Split(r.ctx, -5, -r.Rank())
		if err != nil {
			return err
		}
		if row.Rank() != r.Rank()%3 || row.Size() != 3 || column.Rank() != r.Rank()/3 || column.Size() != 2 || back.Rank() != 5-r.Rank() || back.Size() != 6 {
			return fmt.Errorf("rank %d of %d in its row, %d of %d in its column, %d of %d reversed", row.Rank(), row.Size(), column.Rank(), column.Size(), back.Rank(), back.Size())
		}
		// A split of a split: the row without its middle, and the middle alone.
		ends, err := row.Split(r.ctx, row.Rank()%2, -row.Rank())
		if err != nil {
			return err
		}
		first := r.Rank() / 3 * 3
		members := []int{first + 2, first}
		if row.Rank() == 1 {
			members = []int{r.Rank()}
		}
		for _, g := range []struct {
			name  string
			c     comm.Communicator
			ranks []int
		}{
			{"row", row, []int{first, first + 1, first + 2}},
			{"column", column, []int{r.Rank() % 3, r.Rank()%3 + 3}},
			{"reversed", back, []int{5, 4, 3, 2, 1, 0}},
			{"ends", ends, members},
		} {
			sub := &rank{g.c, r.t, r.s, r.ctx}
			v := tensor.FromSlice([]int32{int32(r.Rank())}, 1)
			all := tensor.New(tensor.I32, len(g.ranks))
			if err := sub.do(g.c.AllGather(all, v)); err != nil {
				return fmt.Errorf("%s: %w", g.name, err)
			}
			if err := expect(g.name, all, func(i int) int { return g.ranks[i] }); err != nil {
				return err
			}
		}
		return nil
	})
}

// testConcurrentGroups has a parent and its sub-groups in flight at once, from goroutines of
// their own, each with its own sequence of calls and sizes.
func (s suite) testConcurrentGroups(t *testing.T) {
	const n = 4
	s.run(t, n, comm.Options{}, func(r *rank) error {
		row, err := r.Split(r.ctx, r.Rank()/2, 0)
		if err != nil {
			return err
		}
		all, err := r.Split(r.ctx, 0, -r.Rank())
		if err != nil {
			return err
		}
		var wg sync.WaitGroup
		errs := make([]error, 3)
		for k, c := range []comm.Communicator{r.Communicator, row, all} {
			wg.Go(func() {
				for i := range 15 {
					v := fill(tensor.F32, (i*i*i*37*(k+1))%40_000, c.Rank(), k)
					// No Wait: through the one compute stream the groups would wait for each
					// other, on each rank in another order.
					p, err := c.AllReduce(v, comm.Sum)
					if err == nil {
						err = p.Sync(r.ctx)
					}
					if errs[k] = err; err != nil {
						return
					}
					if errs[k] = expect(fmt.Sprintf("group %d call %d", k, i), v, func(j int) int { return reduced(comm.Sum, c.Size(), k+j) }); errs[k] != nil {
						return
					}
				}
			})
		}
		wg.Wait()
		for k, err := range errs {
			if err != nil {
				return fmt.Errorf("group %d: %w", k, err)
			}
		}
		return nil
	})
}
