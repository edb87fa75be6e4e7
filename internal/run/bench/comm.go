package bench

import (
	"context"
	"fmt"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/tensor"
)

// CommSpec selects the measurements of `bench comm`: every call in every size over every transport.
type CommSpec struct {
	Sizes  []int    `json:"sizes"` // bytes
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
	s.Sizes = []int{4 << 10, 64 << 10, 1 << 20}
	if device != "cpu" {
		s.Sizes = []int{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20}
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
		if n < 4*ranks {
			return fmt.Errorf("--sizes %d: want at least 4 bytes for each of %d ranks", n, ranks)
		}
	}
	return nil
}

// Transfer is one size of one call over one transport.
type Transfer struct {
	Transport string  `json:"transport"` // unix, tcp, nccl, copy
	Call      string  `json:"call"`      // exchange, all_reduce, all_gather, reduce_scatter
	Bytes     int64   `json:"bytes"`     // sent to the neighbour, or the whole buffer of a collective
	Seconds   float64 `json:"seconds"`
	// GBps is the bus bandwidth, in 1e9 bytes per second and direction on a rank's link.
	GBps float64 `json:"gb_per_second"`
	// Share is GBps divided by the link's limit; 0: unknown.
	Share float64 `json:"share_of_link,omitempty"`
}

// comm measures every call in every size over every transport.
func (r *Rank) comm(ctx context.Context, s *CommSpec, emit func(Transfer) error) error {
	most := slices.Max(s.Sizes)
	arena, err := r.Device.Arena("buffers", int64(2*most+1024))
	if err != nil {
		return err
	}
	src, dst := arena.Alloc(tensor.F32, most/4), arena.Alloc(tensor.F32, most/4)
	if err := r.random(ctx, 0, src, dst); err != nil {
		return err
	}
	e := effort{warmup: s.Warmup, iters: s.Iters}
	if s.Iters == 0 {
		e.heat = settle
	}
	for _, call := range s.Calls {
		for _, size := range s.Sizes {
			for _, t := range r.Transports {
				if t.NoReduce && (call == "all_reduce" || call == "reduce_scatter") {
					continue
				}
				begin, moved := transferOf(t.Comm, call, size, dst, src)
				seconds, _, err := r.measure(ctx, e, func() error {
					for range burst {
						p, err := begin()
						if err != nil {
							return err
						}
						p.Wait()
					}
					return nil
				})
				if err != nil {
					return fmt.Errorf("%s of %s over %s: %w", call, readable.Bytes(int64(size)), t.Name, err)
				}
				row := Transfer{Transport: t.Name, Call: call, Bytes: int64(size), Seconds: seconds / burst}
				row.GBps = moved / row.Seconds / 1e9
				if r.LinkGBps > 0 {
					row.Share = row.GBps / r.LinkGBps
				}
				if err := emit(row); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

const (
	// burst counts the calls of one iteration. Like a hop of the ring, a call begins after the previous one is
	// complete, so its latency counts.
	burst = 8
	// settle is the warm-up time in seconds: the clocks of a GPU and its links take a while to leave their idle state.
	settle = 0.1
)

// transferOf returns the call, and the bytes that it moves over a rank's link per direction. It cuts the views to size.
// A buffer of a collective has size bytes in total.
func transferOf(c comm.Communicator, call string, size int, dst, src View) (begin func() (comm.Pending, error),
	moved float64) {
	n, rank := c.Size(), c.Rank()
	part := size / 4 / n
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
	all := func(v View) View { return v.Slice(tensor.Dim, 0, size/4) }
	send := []comm.Message{{Peer: (rank + 1) % n, View: all(src)}}
	recv := []comm.Message{{Peer: (rank + n - 1) % n, View: all(dst)}}
	return func() (comm.Pending, error) { return c.Exchange(send, recv) }, float64(size / 4 * 4)
}

func transferTable(on string, rows []Transfer) readable.Table {
	t := readable.Table{
		Title: "transfers between neighbours; " + on + "; GB/s per direction, slowest rank",
		Head:  []string{"call", "bytes"},
		Notes: []string{
			"exchange: send to the next rank and receive from the previous one",
			"collectives: bytes of the whole buffer, and bus bandwidth",
			fmt.Sprintf("time: one call in a burst of %d, with its latency", burst),
		},
	}
	var names []string
	columns := 2 // of each transport
	if rows[0].Share > 0 {
		columns++
	}
	for _, r := range rows {
		if !slices.Contains(names, r.Transport) {
			names = append(names, r.Transport)
			t.Head = append(t.Head, []string{r.Transport + " µs", "GB/s", "of link"}[:columns]...)
		}
	}
	for len(rows) > 0 {
		first := rows[0]
		cells := []string{first.Call, readable.Bytes(first.Bytes)}
		for _, name := range names {
			own := make([]string, columns)
			if len(rows) > 0 && rows[0].Transport == name && rows[0].Call == first.Call && rows[0].Bytes == first.Bytes {
				x := rows[0]
				copy(own, []string{readable.Number(1e6 * x.Seconds), readable.Number(x.GBps), readable.Percent(x.Share)})
				rows = rows[1:]
			}
			cells = append(cells, own...)
		}
		t.Add(cells...)
	}
	return t
}
