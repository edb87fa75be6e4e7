package commtest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// testStreamOrder queues slow work, transfers and work again, many times, on buffers that
// are used again and again, and waits once, at the end. Wrong order shows as wrong numbers
// here, and as a race under the race detector.
func (s suite) testStreamOrder(t *testing.T) {
	const n, size, hops = 3, 3000, 12
	s.run(t, n, comm.Options{}, func(r *rank) error {
		h, ok := r.dev.(*host)
		if !ok {
			return nil // code of the host cannot run on the stream
		}
		next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
		out, in := tensor.New(tensor.F32, size), tensor.New(tensor.F32, size)
		src, dst := tensor.Data[float32](out), tensor.Data[float32](in)
		sum := tensor.New(tensor.F64, 1)
		total := tensor.Data[float64](sum)
		for k := range hops {
			h.s.Do("produce", func() error {
				time.Sleep(time.Duration((r.Rank()+k)%3) * time.Millisecond)
				for i := range src {
					src[i] = float32(r.Rank()*1000 + k)
				}
				return nil
			})
			p, err := r.Exchange(with(next, out), with(prev, in))
			if err != nil {
				return err
			}
			p.Wait()
			h.s.Do("consume", func() error {
				want := float32(prev*1000 + k)
				if i := slices.IndexFunc(dst, func(x float32) bool { return x != want }); i >= 0 {
					return fmt.Errorf("hop %d: element %d is %v, want %v", k, i, dst[i], want)
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
		if err := h.s.Sync(r.ctx); err != nil {
			return err
		}
		want := 0.0
		for q := range n {
			for k := range hops {
				want += float64(q*1000 + k)
			}
		}
		if total[0] != want {
			return fmt.Errorf("the sum over ranks and hops is %v, want %v", total[0], want)
		}
		return nil
	})
}

// testCopyOrder fills one buffer, sends it and reads the received one, again and again, without waiting on the host.
// Each value must belong to its own turn.
func (s suite) testCopyOrder(t *testing.T) {
	const size = 1 << 18
	n, hops := s.most(4), 12
	if testing.Short() {
		hops = 5
	}
	s.run(t, n, comm.Options{}, func(r *rank) error {
		next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
		out, in := r.new(tensor.I32, size), r.new(tensor.I32, size)
		got, src := make([]tensor.View, hops), tensor.New(tensor.I32, size)
		for k := range hops {
			fillWith(src, func(i int) int { return number(r.Rank(), k+i) })
			r.dev.Upload(out, src)
			p, err := r.Exchange(with(next, out), with(prev, in))
			if err != nil {
				return err
			}
			p.Wait()
			got[k] = tensor.New(tensor.I32, size)
			r.dev.Download(got[k], in)
		}
		if err := r.dev.Stream().Sync(r.ctx); err != nil {
			return err
		}
		for k, v := range got {
			if err := expect(fmt.Sprintf("hop %d", k), v, 1,
				func(_, i int) int { return number(prev, k+i) }); err != nil {
				return err
			}
		}
		return nil
	})
}

// testSplit makes rows and columns of a 2 by 3 grid, or of 2 by 2 with fewer ranks, a reversed group, and splits of
// splits.
func (s suite) testSplit(t *testing.T) {
	n := s.most(6) &^ 1
	w := n / 2 // ranks of a row
	if w < 2 {
		t.Skip("a grid needs four ranks")
	}
	s.run(t, n, comm.Options{}, func(r *rank) error {
		row, err := r.Split(r.ctx, r.Rank()/w, 0)
		if err != nil {
			return err
		}
		defer row.Close()
		column, err := r.Split(r.ctx, r.Rank()%w, 0)
		if err != nil {
			return err
		}
		defer column.Close()
		back, err := r.Split(r.ctx, -5, -r.Rank())
		if err != nil {
			return err
		}
		if row.Rank() != r.Rank()%w || row.Size() != w || column.Rank() != r.Rank()/w || column.Size() != 2 ||
			back.Rank() != n-1-r.Rank() || back.Size() != n {
			return fmt.Errorf("rank %d of %d in its row, %d of %d in its column, %d of %d reversed", row.Rank(),
				row.Size(), column.Rank(), column.Size(), back.Rank(), back.Size())
		}
		// A split of a split: every other rank of the row, backwards.
		ends, err := row.Split(r.ctx, row.Rank()%2, -row.Rank())
		if err != nil {
			return err
		}
		first := r.Rank() / w * w
		var members, line, reversed []int
		for k := range w {
			line = append(line, first+k)
			if b := w - 1 - k; b%2 == row.Rank()%2 {
				members = append(members, first+b)
			}
		}
		for k := range n {
			reversed = append(reversed, n-1-k)
		}
		for _, g := range []struct {
			name  string
			c     comm.Communicator
			ranks []int
		}{
			{"row", row, line},
			{"column", column, []int{r.Rank() % w, r.Rank()%w + w}},
			{"reversed", back, reversed},
			{"ends", ends, members},
		} {
			sub := &rank{g.c, r.t, r.dev, r.setup, r.ctx}
			v := r.put(tensor.FromSlice([]int32{int32(r.Rank())}, 1))
			all := r.new(tensor.I32, len(g.ranks))
			if err := sub.do(g.c.AllGather(all, v)); err != nil {
				return fmt.Errorf("%s: %w", g.name, err)
			}
			if err := r.expect(g.name, all, func(i int) int { return g.ranks[i] }); err != nil {
				return err
			}
		}
		return nil
	})
}

// testConcurrentGroups runs a parent and its sub-groups at once, from goroutines of their own, each with its own calls
// and sizes.
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
		const turns = 15
		groups := []comm.Communicator{r.Communicator, row, all}
		views := make([][]tensor.View, len(groups))
		for k, c := range groups {
			for i := range turns {
				views[k] = append(views[k], r.fill(tensor.F32, (i*i*i*37*(k+1))%40_000, c.Rank(), k))
			}
		}
		var wg sync.WaitGroup
		errs := make([]error, len(groups))
		for k, c := range groups {
			wg.Go(func() {
				for _, v := range views[k] {
					// No Wait: through the one compute stream the groups would wait for each
					// other, on each rank in another order.
					if errs[k] = comm.Finish(r.ctx)(c.AllReduce(v, comm.Sum)); errs[k] != nil {
						return
					}
				}
			})
		}
		wg.Wait()
		for k, c := range groups {
			if errs[k] != nil {
				return fmt.Errorf("group %d: %w", k, errs[k])
			}
			for i, v := range views[k] {
				err := r.expect(fmt.Sprintf("group %d call %d", k, i), v,
					func(j int) int { return reduced(comm.Sum, c.Size(), k+j) })
				if err != nil {
					return err
				}
			}
		}
		return nil
	})
}
