package commtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// calls returns all ways to wait for somebody. Each ends only with the other ranks' help.
func (r *rank) calls() map[string]func() error {
	n := r.Size()
	v := func(n int) tensor.View { return r.new(tensor.F32, n) }
	next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
	return map[string]func() error{
		"exchange":       func() error { return r.do(r.Exchange(with(next, v(100_000)), with(prev, v(100_000)))) },
		"receive":        func() error { return r.do(r.Exchange(nil, with(prev, v(3)))) },
		"all-reduce":     func() error { return r.do(r.AllReduce(v(7), comm.Sum)) },
		"all-reduce big": func() error { return r.do(r.AllReduce(v(70_000), comm.Sum)) },
		"all-gather":     func() error { return r.do(r.AllGather(v(100*n), v(100))) },
		"reduce-scatter": func() error { return r.do(r.ReduceScatter(v(100), v(100*n), comm.Max)) },
		"broadcast":      func() error { return r.do(r.Broadcast(v(10), n-1)) },
		"barrier":        func() error { return r.Barrier(r.ctx) },
		"split": func() error {
			_, err := r.Split(r.ctx, 0, 0)
			return err
		},
	}
}

var errSpoiled = errors.New("the loss is not a number")

// testAbort checks an abort by the last rank during a call of the others.
func (s suite) testAbort(t *testing.T) {
	const n = 3
	for _, name := range []string{"exchange", "receive", "all-reduce", "all-reduce big", "all-gather", "reduce-scatter",
		"broadcast", "barrier", "split"} {
		t.Run(name, func(t *testing.T) {
			s.run(t, n, comm.Options{}, func(r *rank) error {
				if r.Rank() == n-1 {
					r.Abort(errSpoiled)
					err := r.Barrier(r.ctx)
					if !errors.Is(err, errSpoiled) || !errors.Is(err, comm.ErrAborted) || comm.IsRemote(err) {
						return fmt.Errorf("after its own abort, a call ends with %w", err)
					}
					return nil
				}
				err := r.calls()[name]()
				if name == "receive" && r.Rank() == 1 || name == "exchange" {
					// These may have had all they need from the other rank before.
					err = r.Barrier(r.ctx)
				}
				if err := remote(err, n-1, comm.ErrAborted); err != nil {
					return err
				}
				if !strings.Contains(err.Error(), errSpoiled.Error()) {
					return fmt.Errorf("the abort's cause is missing in %w", err)
				}
				// A later call fails with the same cause, and to abort again changes nothing.
				r.Abort(errors.New("another cause"))
				return remote(r.do(r.AllReduce(r.new(tensor.F32, 1), comm.Sum)), n-1, comm.ErrAborted)
			})
		})
	}
}

// testAbortIdle checks that a rank which waits for no one learns of an abort: its next call
// fails although it could have completed.
func (s suite) testAbortIdle(t *testing.T) {
	told := make(chan struct{})
	var split sync.WaitGroup
	split.Add(4)
	s.run(t, 4, comm.Options{}, func(r *rank) error {
		pair, err := r.Split(r.ctx, r.Rank()/2, 0)
		split.Done()
		if err != nil {
			return err
		}
		defer pair.Close()
		if r.Rank() == 3 {
			split.Wait() // an abort could overtake data of a waiting rank
			pair.Abort(errSpoiled)
			close(told)
			return nil
		}
		<-told
		for {
			err := pair.Barrier(r.ctx) // ranks 0 and 1 need no one else for this
			if err == nil {
				continue // the news has not come yet
			}
			return remote(err, 3, comm.ErrAborted)
		}
	})
}

// testComputeError checks that an error of the compute stream travels: to the Pending of the
// same rank, and as an abort to the others.
func (s suite) testComputeError(t *testing.T) {
	s.run(t, 3, comm.Options{}, func(r *rank) error {
		if r.Rank() == 1 {
			r.dev.Fail(errSpoiled)
		}
		v := r.new(tensor.F32, 5)
		p, err := r.AllReduce(v, comm.Sum)
		if err != nil {
			if r.Rank() == 1 {
				return fmt.Errorf("a call before the error was seen ended with %w", err)
			}
			return remote(err, 1, comm.ErrAborted)
		}
		p.Wait()
		err = p.Sync(r.ctx)
		if r.Rank() != 1 {
			if stream := r.dev.Stream().Sync(r.ctx); stream == nil {
				return errors.New("the compute stream goes on after a failed transfer")
			}
			return remote(err, 1, comm.ErrAborted)
		}
		if !errors.Is(err, errSpoiled) || comm.IsRemote(err) {
			return fmt.Errorf("the rank's own error became %w", err)
		}
		return nil
	})
}

// testDeadline keeps one rank away, alive.
func (s suite) testDeadline(t *testing.T) {
	const silent = 1
	s.parallel(t) // most of the time nothing is done
	for _, name := range []string{"exchange", "all-reduce big", "barrier"} {
		t.Run(name, func(t *testing.T) {
			s.parallel(t)
			over := make(chan struct{}, 3)
			s.run(t, 3, comm.Options{Deadline: 250 * time.Millisecond}, func(r *rank) error {
				if r.Rank() == silent {
					<-over
					<-over
					return nil
				}
				defer func() { over <- struct{}{} }()
				err := r.calls()[name]()
				if err == nil { // this rank needed nothing from the silent one
					err = r.Barrier(r.ctx)
				}
				if err := remote(err, silent, comm.ErrDeadline); err != nil {
					return err
				}
				for _, part := range []string{"rank 1", "bytes", "250ms"} {
					if !strings.Contains(err.Error(), part) {
						return fmt.Errorf("%q is missing in %w", part, err)
					}
				}
				return nil
			})
		})
	}
}

// testGroupDeadline gives a split group more patience than its world: a rank that stays away
// for longer than the world's deadline is waited for.
func (s suite) testGroupDeadline(t *testing.T) {
	const world = 50 * time.Millisecond // after the split, which may take longer on a busy machine
	s.parallel(t)
	s.run(t, 3, comm.Options{Deadline: time.Minute}, func(r *rank) error {
		c, err := r.Split(r.ctx, 0, r.Rank())
		if err != nil {
			return err
		}
		all, _ := r.Communicator.(comm.DeadlineSetter)
		g, ok := c.(comm.DeadlineSetter)
		if !ok || all == nil {
			return nil // a communicator with one deadline for all
		}
		g.SetDeadline(time.Minute)
		all.SetDeadline(world)
		if r.Rank() == 1 {
			time.Sleep(4 * world) // beyond the deadline and the second look
		}
		return c.Barrier(r.ctx)
	})
}

// testDeadlineChain keeps one rank of a ring away: only its neighbour waits for it, but all must name it.
func (s suite) testDeadlineChain(t *testing.T) {
	const silent = 1
	n := s.most(5)
	if n < 3 {
		t.Skip("a chain needs three ranks")
	}
	s.parallel(t)
	over := make(chan struct{})
	s.run(t, n, comm.Options{Deadline: 250 * time.Millisecond}, func(r *rank) error {
		if err := r.Barrier(r.ctx); err != nil {
			return err
		}
		if r.Rank() == silent {
			for range n - 1 {
				<-over
			}
			return nil
		}
		defer func() { over <- struct{}{} }()
		err := r.do(r.Exchange(nil, with((r.Rank()+n-1)%n, r.new(tensor.F32, 10))))
		return remote(err, silent, comm.ErrDeadline)
	})
}

// testMismatch gives two ranks different sizes, small and large, in either direction.
func (s suite) testMismatch(t *testing.T) {
	if s.SizesUnchecked {
		t.Skip("sizes are not compared")
	}
	s.parallel(t) // some engines end a failed world after a while
	for _, c := range [][2]int{{10, 20}, {20, 10}, {10, 200_000}, {200_000, 10}, {200_000, 300_000}, {0, 1}, {1, 0}} {
		t.Run(fmt.Sprintf("%d into %d", c[0], c[1]), func(t *testing.T) {
			s.parallel(t)
			s.run(t, 2, comm.Options{}, func(r *rank) error {
				send, recv := with(1, r.new(tensor.U8, c[0])), []comm.Message(nil)
				if r.Rank() == 1 {
					send, recv = nil, with(0, r.new(tensor.U8, c[1]))
				}
				// The sender of a small message may be done before the fault is found.
				err := r.do(r.Exchange(send, recv))
				for err == nil {
					err = r.Barrier(r.ctx)
				}
				if !errors.Is(err, comm.ErrMismatch) || !comm.IsRemote(err) {
					return fmt.Errorf("got %w, want %q", err, comm.ErrMismatch)
				}
				for _, size := range c {
					if !strings.Contains(err.Error(), fmt.Sprint(size)) {
						return fmt.Errorf("size %d is missing in %w", size, err)
					}
				}
				return nil
			})
		})
	}
}

// testClose checks that a rank may close as soon as its own calls are done, without failing ranks that need nothing
// more of it, and that later calls report the cause.
func (s suite) testClose(t *testing.T) {
	s.run(t, 3, comm.Options{}, func(r *rank) error {
		for range 3 {
			if err := r.Barrier(r.ctx); err != nil {
				return err
			}
		}
		if r.Rank() == 2 {
			if err := r.Close(); err != nil {
				return err
			}
			if err := r.Close(); err != nil {
				return fmt.Errorf("second close: %w", err)
			}
			if err := r.Barrier(r.ctx); !errors.Is(err, comm.ErrClosed) {
				return fmt.Errorf("a call on the closed group ended with %w", err)
			}
			r.Abort(errSpoiled) // after a close it says nothing to anybody
			return nil
		}
		for range 3 { // ranks 0 and 1 go on with each other
			v := r.fill(tensor.F32, 1000, r.Rank(), 0)
			w := r.new(tensor.F32, 1000)
			peer := 1 - r.Rank()
			if err := r.do(r.Exchange(with(peer, v), with(peer, w))); err != nil {
				return err
			}
		}
		return remote(r.do(r.AllReduce(r.new(tensor.F32, 9), comm.Sum)), 2, comm.ErrPeerLeft)
	})
}

// testCancel checks that a caller can stop waiting while the call goes on.
func (s suite) testCancel(t *testing.T) {
	left := make(chan struct{})
	s.run(t, 2, comm.Options{}, func(r *rank) error {
		if r.Rank() == 0 {
			ctx, cancel := context.WithCancel(r.ctx)
			time.AfterFunc(time.Millisecond, cancel)
			err := r.Barrier(ctx)
			close(left)
			if !errors.Is(err, context.Canceled) {
				return fmt.Errorf("a cancelled barrier ended with %w", err)
			}
		} else {
			<-left
			if err := r.Barrier(r.ctx); err != nil {
				return err
			}
		}
		v := r.fill(tensor.F32, 10, r.Rank(), 0)
		if err := r.do(r.AllReduce(v, comm.Sum)); err != nil {
			return err
		}
		return r.expect("sum", v, func(i int) int { return reduced(comm.Sum, 2, i) })
	})
}

// testArguments checks that wrong arguments are refused on the spot and harm nothing.
func (s suite) testArguments(t *testing.T) {
	s.run(t, 2, comm.Options{}, func(r *rank) error {
		f := func(shape ...int) tensor.View { return r.new(tensor.F32, shape...) }
		strided := f(4, 4).Slice(tensor.Dim, 0, 2)
		whole := f(8)
		other := func(v tensor.View) tensor.View { // the part of the other rank
			return v.Slice(tensor.Dim, (1-r.Rank())*4, (2-r.Rank())*4)
		}
		of := func(_ comm.Pending, err error) error { return err }
		for name, err := range map[string]error{
			"2 of a group":           of(r.Exchange(with(2, f(1)), nil)),
			"-1 of a group":          of(r.Exchange(nil, with(-1, f(1)))),
			"to the own rank":        of(r.Exchange(with(r.Rank(), f(1)), nil)),
			"is received into":       of(r.Exchange(with(r.Rank(), f(1)), with(r.Rank(), f(2)))),
			"not dense":              of(r.AllReduce(strided, comm.Sum)),
			"without memory":         of(r.AllReduce(tensor.View{}, comm.Sum)),
			"reductions support":     of(r.AllReduce(r.new(tensor.BF16, 2), comm.Sum)),
			"reduction 7 is unknown": of(r.AllReduce(f(1), comm.Op(7))),
			"needs 6":                of(r.AllGather(f(5), f(3))),
			"one element type":       of(r.AllGather(r.new(tensor.I32, 6), f(3))),
			"with 2 ranks":           of(r.ReduceScatter(f(3), f(5), comm.Sum)),
			"src lies in dst":        of(r.AllGather(whole, other(whole))),
			"dst lies in src":        of(r.ReduceScatter(other(whole), whole, comm.Sum)),
			"root 2":                 of(r.Broadcast(f(2), 2)),
		} {
			if err == nil || !strings.Contains(err.Error(), name) ||
				!strings.Contains(err.Error(), fmt.Sprintf("rank %d of 2", r.Rank())) {
				return fmt.Errorf("error %v, want one with %q and the rank", err, name)
			}
		}
		return r.Barrier(r.ctx)
	})
}
