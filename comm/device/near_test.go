package device

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// A fakeEngine moves data between the fake devices of one node, and counts its sends.
type fakeEngine struct {
	g    *comm.Group
	sent *atomic.Int64
}

func (e *fakeEngine) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	e.sent.Add(int64(len(send)))
	return e.g.Exchange(unmaskAll(send), unmaskAll(recv))
}
func (e *fakeEngine) SetDeadline(limit time.Duration) { e.g.SetDeadline(limit) }
func (e *fakeEngine) Streams() []tensor.Stream        { return e.g.Streams() }
func (e *fakeEngine) Waits() []comm.Wait              { return e.g.Waits() }
func (e *fakeEngine) Abort(cause error)               { e.g.Abort(cause) }
func (e *fakeEngine) Close() error                    { return e.g.Close() }

// nodeRanks joins fake devices of ranks on the given nodes. Devices of the lame node have no copy engines. sent counts
// the messages over engines.
func nodeRanks(
	t *testing.T,
	nodes []int,
	lame int,
	opts Options,
) (groups []*Group, devices []*FakeDevice, sent *atomic.Int64, err error) {
	t.Helper()
	sent = &atomic.Int64{}
	n := len(nodes)
	lib := &fakeLibrary{worlds: map[uint64]*local.World{}}
	devices = make([]*FakeDevice, n)
	for r := range n {
		devices[r] = NewFakeDevice(r)
	}
	lib.engine = func(_ context.Context, host *comm.Group) (mover, error) {
		if host.Node(0) == lame || !host.OneNode() {
			return nil, fmt.Errorf("no engines on node %d", host.Node(host.Rank()))
		}
		compute := devices[host.WorldRank(host.Rank())].s
		w := lib.world(host.ID()+1<<40, host.Size())
		return &fakeEngine{
			comm.NewWorld(w.Link(host.Rank()), host.Rank(), compute, comm.Options{Deadline: -1}),
			sent,
		}, nil
	}
	w, hosts := local.NewWorld(n), make([]*comm.Group, n)
	for r := range n {
		l := w.Link(r)
		l.Nodes = nodes
		hosts[r] = comm.NewWorld(l, r, nil, comm.Options{})
	}
	groups, err = fakeDeviceWorld(lib, hosts, devices, opts)
	t.Cleanup(func() {
		for r := range n {
			if groups[r] != nil {
				groups[r].Close()
			}
			devices[r].Close()
		}
	})
	return groups, devices, sent, err
}

// each runs f for all ranks at once.
func each(t *testing.T, groups []*Group, f func(r int, g *Group) error) {
	t.Helper()
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			if err := f(r, g); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
}

// TestNodes moves data between ranks on several nodes. Messages within a node go over its engines if it has any, all
// others over the library, and everything arrives.
func TestNodes(t *testing.T) {
	for name, c := range map[string]struct {
		nodes      []int
		lame       int
		transports string // by rank
		sent       int64  // over engines: all to all with the own rank, and around a ring
	}{
		"one node":         {[]int{7, 7, 7}, -1, "copy,copy,copy", 6 + 3 + 3},
		"two nodes":        {[]int{0, 0, 1, 1}, -1, "copy and nccl,copy and nccl,copy and nccl,copy and nccl", 4 + 4 + 2},
		"not side by side": {[]int{0, 1, 0, 1}, -1, "copy and nccl,copy and nccl,copy and nccl,copy and nccl", 4 + 4},
		"one is alone":     {[]int{0, 0, 5}, -1, "copy and nccl,copy and nccl,nccl", 2 + 2 + 1},
		"all are alone":    {[]int{2, 1, 0}, -1, "nccl,nccl,nccl", 0},
		"one has none":     {[]int{0, 0, 1, 1}, 1, "copy and nccl,copy and nccl,nccl,nccl", 2 + 2 + 1},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			groups, devices, sent, err := nodeRanks(t, c.nodes, c.lame, Options{})
			if err != nil {
				t.Fatal(err)
			}
			n := len(groups)
			var transports []string
			for _, g := range groups {
				transports = append(transports, g.Transport())
			}
			if got := strings.Join(transports, ","); got != c.transports {
				t.Errorf("exchanges go over %s, want %s", got, c.transports)
			}
			each(t, groups, func(r int, g *Group) error {
				src, dst := devices[r].New(tensor.F32, n), devices[r].New(tensor.F32, n)
				for p := range n {
					tensor.Data[float32](unmask(src))[p] = float32(10*r + p)
				}
				var send, recv []comm.Message
				for p := range n {
					send = append(send, comm.Message{Peer: p, View: src.Slice(tensor.Dim, p, p+1)})
					recv = append(recv, comm.Message{Peer: p, View: dst.Slice(tensor.Dim, p, p+1)})
				}
				p, err := g.Exchange(send, recv)
				if err == nil {
					p.Wait()
					err = p.Sync(ctx)
				}
				for from, x := range tensor.Data[float32](unmask(dst)) {
					if err == nil && x != float32(10*from+r) {
						err = fmt.Errorf("from rank %d: %v", from, x)
					}
				}
				return err
			})
			each(t, groups, func(r int, g *Group) error {
				out, in := devices[r].New(tensor.F32, 1), devices[r].New(tensor.F32, 1)
				tensor.Data[float32](unmask(out))[0] = float32(r + 1)
				p, err := g.Exchange(
					[]comm.Message{{Peer: (r + 1) % n, View: out}},
					[]comm.Message{{Peer: (r + n - 1) % n, View: in}},
				)
				if err == nil {
					err = p.Sync(ctx)
				}
				if x := tensor.Data[float32](unmask(in))[0]; err == nil && x != float32((r+n-1)%n+1) {
					err = fmt.Errorf("around the ring: %v", x)
				}
				return err
			})
			if got := sent.Load(); got != c.sent {
				t.Errorf("%d messages over engines, want %d", got, c.sent)
			}
			each(t, groups, func(r int, g *Group) error {
				src, dst := devices[r].New(tensor.F32, 1), devices[r].New(tensor.F32, n)
				tensor.Data[float32](unmask(src))[0] = float32(r)
				p, err := g.AllGather(dst, src)
				if err == nil {
					err = p.Sync(ctx)
				}
				for from, x := range tensor.Data[float32](unmask(dst)) {
					if err == nil && x != float32(from) {
						err = fmt.Errorf("gathered from rank %d: %v", from, x)
					}
				}
				return err
			})
		})
	}
}

// TestCopyAcrossNodes requires copy engines between nodes: the error names two ranks on all ranks.
func TestCopyAcrossNodes(t *testing.T) {
	_, _, _, err := nodeRanks(t, []int{3, 3, 4}, -1, Options{Transport: TransportCopy})
	for r := range 3 {
		want := fmt.Sprintf(
			"connect devices on rank %d of 3: transport copy: rank 0 is on node 3 and rank 2 on node 4, and copy engines reach the devices of one: use nccl or auto",
			r,
		)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestDeathOnAnotherNode aborts one rank while ranks of both nodes wait for exchanges over both carriers.
func TestDeathOnAnotherNode(t *testing.T) {
	ctx := testContext(t)
	groups, devices, _, err := nodeRanks(t, []int{0, 0, 1, 1}, -1, Options{})
	if err != nil {
		t.Fatal(err)
	}
	boom := errors.New("the loss is not a number")
	each(t, groups, func(r int, g *Group) error {
		if r == 3 {
			time.Sleep(20 * time.Millisecond)
			g.Abort(boom)
			return nil
		}
		p, err := g.Exchange(
			nil,
			[]comm.Message{
				{Peer: 3, View: devices[r].New(tensor.F32, 1)},
				{Peer: 3 - (r ^ 1), View: devices[r].New(tensor.F32, 1)},
			},
		)
		if err == nil {
			err = p.Sync(ctx)
		}
		if !errors.Is(err, boom) || !comm.IsRemote(err) {
			return fmt.Errorf("%v, want %v", err, boom)
		}
		return nil
	})
}
