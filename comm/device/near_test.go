package device

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// nodeRanks joins fake devices of ranks on the given nodes. Devices of the lame node have no copy engines.
func nodeRanks(t *testing.T, nodes []int, lame int, opts Options) (*fakeLibrary, []*Group, []*fakeDevice, error) {
	lib := &fakeLibrary{}
	lib.engine = func(_ context.Context, host *comm.Group, compute tensor.Stream) (mover, error) {
		if host.Node(0) == lame || !host.OneNode() {
			return nil, fmt.Errorf("no engines on node %d", host.Node(host.Rank()))
		}
		return &fakeEngine{lib.join(host, host.ID()+1<<40, compute), &lib.sent}, nil
	}
	w, hosts := local.NewWorld(len(nodes)), make([]*comm.Group, len(nodes))
	for r := range hosts {
		l := w.Link(r)
		l.Nodes = nodes
		hosts[r] = comm.NewWorld(l, r, nil, comm.Options{})
	}
	groups, devices, err := ranksOver(t, lib, hosts, opts)
	return lib, groups, devices, err
}

// TestNodes moves data between ranks on several nodes. Messages within a node go over its engines if it has any, all
// others over the library, and everything arrives.
func TestNodes(t *testing.T) {
	const both = "copy and nccl"
	for name, c := range map[string]struct {
		nodes      []int
		lame       int
		transports string // by rank
		sent       int64  // over engines: all to all with the own rank, and around a ring
	}{
		"one node":         {[]int{7, 7, 7}, -1, "copy,copy,copy", 6 + 3 + 3},
		"two nodes":        {[]int{0, 0, 1, 1}, -1, both + "," + both + "," + both + "," + both, 4 + 4 + 2},
		"not side by side": {[]int{0, 1, 0, 1}, -1, both + "," + both + "," + both + "," + both, 4 + 4},
		"one is alone":     {[]int{0, 0, 5}, -1, both + "," + both + ",nccl", 2 + 2 + 1},
		"all are alone":    {[]int{2, 1, 0}, -1, "nccl,nccl,nccl", 0},
		"one has none":     {[]int{0, 0, 1, 1}, 1, both + "," + both + ",nccl,nccl", 2 + 2 + 1},
	} {
		t.Run(name, func(t *testing.T) {
			finish := comm.Finish(testContext(t))
			lib, groups, devices, err := nodeRanks(t, c.nodes, c.lame, Options{})
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
			// expect checks that v has the number of each rank.
			expect := func(v tensor.View, want func(from int) int) error {
				for from, x := range values(v) {
					if x != float32(want(from)) {
						return fmt.Errorf("from rank %d: %v", from, x)
					}
				}
				return nil
			}
			each(t, groups, func(r int, g *Group) error {
				var send, recv []comm.Message
				dst := devices[r].New(tensor.F32, n)
				for p := range n {
					send = append(send, with(p, devices[r].of(float32(10*r+p)))...)
					recv = append(recv, with(p, dst.Slice(tensor.Dim, p, p+1))...)
				}
				p, err := g.Exchange(send, recv)
				if err != nil {
					return err
				}
				p.Wait()
				if err := finish(p, nil); err != nil {
					return err
				}
				return expect(dst, func(from int) int { return 10*from + r })
			})
			each(t, groups, func(r int, g *Group) error {
				in, prev := devices[r].New(tensor.F32, 1), (r+n-1)%n
				err := finish(g.Exchange(with((r+1)%n, devices[r].of(float32(r+1))), with(prev, in)))
				return errors.Join(err, expect(in, func(int) int { return prev + 1 }))
			})
			if got := lib.sent.Load(); got != c.sent {
				t.Errorf("%d messages over engines, want %d", got, c.sent)
			}
			each(t, groups, func(r int, g *Group) error {
				dst := devices[r].New(tensor.F32, n)
				err := finish(g.AllGather(dst, devices[r].of(float32(r))))
				return errors.Join(err, expect(dst, func(from int) int { return from }))
			})
		})
	}
}

// TestCopyAcrossNodes requires copy engines between nodes: the error names two ranks on all ranks.
func TestCopyAcrossNodes(t *testing.T) {
	_, _, _, err := nodeRanks(t, []int{3, 3, 4}, -1, Options{Transport: TransportCopy})
	for r := range 3 {
		want := fmt.Sprintf("connect devices on rank %d of 3: transport copy: rank 0 is on node 3 and rank 2 on node 4, "+
			"and copy engines reach the devices of one: use nccl or auto", r)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestDeathOnAnotherNode aborts one rank while ranks of both nodes wait for exchanges over both carriers.
func TestDeathOnAnotherNode(t *testing.T) {
	_, groups, devices, err := nodeRanks(t, []int{0, 0, 1, 1}, -1, Options{})
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
		v := devices[r].New(tensor.F32, 2)
		recv := append(with(3, v.Slice(tensor.Dim, 0, 1)), with(3-(r^1), v.Slice(tensor.Dim, 1, 2))...)
		if err := comm.Finish(testContext(t))(g.Exchange(nil, recv)); !errors.Is(err, boom) || !comm.IsRemote(err) {
			return fmt.Errorf("%v, want %v", err, boom)
		}
		return nil
	})
}
