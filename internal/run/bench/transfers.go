package bench

import (
	"context"
	"fmt"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/tensor"
)

// CommSpec selects the measurements of `bench comm`: every call in every size over every transport.
type CommSpec struct {
	Sizes  []int64  `json:"sizes"` // bytes
	Calls  []string `json:"calls"`
	Iters  int      `json:"iters"` // bursts of calls; 0: up to 30, after a warm-up
	Warmup int      `json:"warmup"`
}

// Calls lists the calls of `bench comm`. exchange is a hop of the ring: every rank sends to the next rank and receives
// from the previous one.
var Calls = []string{"exchange", "all_reduce", "reduce_scatter", "all_gather"}

// Default fills unset fields.
func (s *CommSpec) Default(device string) {
	if len(s.Calls) == 0 {
		s.Calls = Calls
	}
	if len(s.Sizes) > 0 {
		return
	}
	s.Sizes = []int64{4 << 10, 64 << 10, 1 << 20}
	if device != "cpu" {
		s.Sizes = []int64{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20}
	}
}

// Check reports faults of a spec before any process is spawned.
func (s *CommSpec) Check(ranks int) error {
	if ranks < 2 {
		return fmt.Errorf("--nproc %d: transfers need 2 ranks or more", ranks)
	}
	if s.Iters < 0 || s.Warmup < 0 {
		return fmt.Errorf("--iters %d --warmup %d: want 0 or more", s.Iters, s.Warmup)
	}
	for _, c := range s.Calls {
		if !slices.Contains(Calls, c) {
			return fmt.Errorf("--calls %q is none of %v", c, Calls)
		}
	}
	for _, n := range s.Sizes {
		if n < int64(4*ranks) {
			return fmt.Errorf("--sizes %d: want at least 4 bytes for each of %d ranks", n, ranks)
		}
	}
	return nil
}

// Comm measures every row and passes it to emit, as Attention does.
func (r *Rank) Comm(ctx context.Context, s CommSpec, emit func(Transfer) error) (err error) {
	defer device.Caught(&err)
	most := slices.Max(s.Sizes)
	arena, err := r.Device.Arena("buffers", 2*most+1024)
	if err != nil {
		return err
	}
	src, dst := arena.Alloc(tensor.F32, int(most/4)), arena.Alloc(tensor.F32, int(most/4))
	if err := r.random(ctx, 0, src, dst); err != nil {
		return err
	}
	for _, call := range s.Calls {
		for _, size := range s.Sizes {
			for _, t := range r.Transports {
				if t.NoReduce && (call == "all_reduce" || call == "reduce_scatter") {
					continue
				}
				row, err := r.transfer(ctx, &s, t, call, size, dst, src)
				if err != nil {
					return fmt.Errorf("%s of %s over %s: %w", call, readable.Bytes(size), t.Name, err)
				}
				if err := emit(*row); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

const (
	// burst counts the calls of one measurement. Like a hop of the ring, a call begins after the previous one is
	// complete, so its latency counts.
	burst = 8
	// settle is the warm-up time in seconds: the clocks of a GPU and its links take a while to leave their idle state.
	settle = 0.1
	// maxSettle bounds the calls of the warm-up.
	maxSettle = 2000
)

// transfer measures a call. All ranks make the same number of calls.
func (r *Rank) transfer(ctx context.Context, s *CommSpec, t Transport, call string, size int64, dst,
	src View) (*Transfer, error) {
	begin, moved := transferOf(t.Comm, call, size, dst, src)
	once := func() error {
		p, err := begin()
		if err == nil {
			p.Wait()
		}
		return err
	}
	if s.Iters == 0 {
		first, _, err := r.measure(ctx, s.Warmup, minIters, once)
		if err != nil {
			return nil, err
		}
		if _, err := r.times(ctx, min(int(settle/max(first, 1e-9))+1, maxSettle), once); err != nil {
			return nil, err
		}
	}
	seconds, _, err := r.measure(ctx, s.Warmup, s.Iters, func() error {
		for range burst {
			if err := once(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	seconds /= burst
	row := &Transfer{Transport: t.Name, Call: call, Bytes: size, Seconds: seconds, GBps: moved / seconds / 1e9}
	if r.LinkGBps > 0 {
		row.Share = row.GBps / r.LinkGBps
	}
	return row, nil
}

// transferOf returns the call, and the bytes that it moves over a rank's link per direction. It cuts the views to size.
// A buffer of a collective has size bytes in total.
func transferOf(c comm.Communicator, call string, size int64, dst, src View) (begin func() (comm.Pending, error),
	moved float64) {
	n, rank := c.Size(), c.Rank()
	part := int(size/4) / n
	whole := func(v View) View { return v.Slice(tensor.Dim, 0, n*part) }
	own := func(v View) View { return v.Slice(tensor.Dim, rank*part, (rank+1)*part) }
	others := 4 * float64(part) * float64(n-1)
	switch call {
	case "all_reduce":
		// repeated calls of Max do not change the numbers
		return func() (comm.Pending, error) { return c.AllReduce(whole(src), comm.Max) }, 2 * others
	case "reduce_scatter":
		return func() (comm.Pending, error) { return c.ReduceScatter(own(dst), whole(src), comm.Sum) }, others
	case "all_gather":
		return func() (comm.Pending, error) { return c.AllGather(whole(dst), own(src)) }, others
	}
	all := func(v View) View { return v.Slice(tensor.Dim, 0, int(size/4)) }
	send := []comm.Message{{Peer: (rank + 1) % n, View: all(src)}}
	recv := []comm.Message{{Peer: (rank + n - 1) % n, View: all(dst)}}
	return func() (comm.Pending, error) { return c.Exchange(send, recv) }, float64(size / 4 * 4)
}
