package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = []byte("a key of thirty-two bytes, or so")

// An agent is a member and its host.
type agent struct {
	*Members
	host *Host
	addr string
	stop func() // ends its listener
	gone bool

	accepted, dialed atomic.Int32 // streams
}

// start starts an agent of a job on a simulated host. The streams are plain.
func start(t *testing.T, h *Host, job string, wrap func(net.PacketConn) net.PacketConn) *agent {
	t.Helper()
	a := &agent{host: h, addr: h.Addr().String() + ":4000"}
	packets, err := h.ListenPacket(a.addr)
	ln, failed := h.Listen(a.addr)
	if err = errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
	if wrap != nil {
		packets = wrap(packets)
	}
	dial := func(ctx context.Context, addr string) (net.Conn, error) {
		a.dialed.Add(1)
		return h.Dial(ctx, addr)
	}
	a.Members, err = Join(Config{Job: job, Key: key, Name: name(h), Packets: packets, Dial: dial})
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			a.accepted.Add(1)
			a.Accept(conn)
		}
	})
	a.stop = func() {
		ln.Close()
		accepting.Wait()
	}
	return a
}

func name(h *Host) string { return fmt.Sprintf("n%d", h.Number) }

// leave ends an agent.
func (a *agent) leave(t *testing.T) {
	t.Helper()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	a.stop()
	a.gone = true
}

// await waits until the agent knows exactly these others.
func (a *agent) await(t *testing.T, hosts ...int) {
	t.Helper()
	var want []Peer
	for _, h := range hosts {
		want = append(want, Peer{fmt.Sprintf("n%d", h), fmt.Sprintf("10.0.0.%d:4000", h)})
	}
	for late := time.After(time.Minute); ; {
		got := a.Peers()
		if slices.Equal(got, want) {
			return
		}
		select {
		case <-a.Changed():
		case <-late:
			t.Fatalf("%s knows %v, not %v", a.self, got, want)
		}
	}
}

// simulated runs a test in simulated time.
func simulated(t *testing.T, test func(t *testing.T, n *Network)) {
	synctest.Test(t, func(t *testing.T) {
		test(t, NewNetwork(1, Conditions{Delay: time.Millisecond}))
		time.Sleep(10 * time.Second) // pending waits time out
	})
}

func TestAgentsFindEachOther(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		var all []*agent
		for i := range 8 {
			all = append(all, start(t, n.Host(i), "job", nil))
			if i > 0 {
				all[i].Meet(all[0].addr)
			}
		}
		for i, a := range all {
			a.await(t, slices.DeleteFunc([]int{0, 1, 2, 3, 4, 5, 6, 7}, func(k int) bool { return k == i })...)
		}
		all[2].leave(t)
		for i, a := range all {
			if i != 2 {
				a.await(t, slices.DeleteFunc([]int{0, 1, 3, 4, 5, 6, 7}, func(k int) bool { return k == i })...)
			}
		}
		for i, a := range all {
			if i != 2 {
				a.leave(t)
			}
		}
	})
}

// TestMeetTriesAgain checks that an agent meets another that starts later, and then exchanges full state with random
// agents while there are some.
func TestMeetTriesAgain(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		early := start(t, n.Host(1), "job", nil)
		defer early.leave(t)
		early.Meet("10.0.0.2:4000")
		time.Sleep(syncPause)
		late := start(t, n.Host(2), "job", nil)
		late.await(t, 1)
		early.await(t, 2)
		late.leave(t)
		early.await(t)
		time.Sleep(randomSyncs * 2 * syncPause)
		again := start(t, n.Host(2), "job", nil)
		defer again.leave(t)
		early.Meet(again.addr)
		time.Sleep(randomSyncs * 2 * syncPause)
		if got := again.accepted.Load(); got < 1+randomSyncs {
			t.Errorf("%d exchanges, not %d", got, 1+randomSyncs)
		}
	})
}

// TestMeetEnds checks that an agent gives up an absent other, and does not meet a known one again.
func TestMeetEnds(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		a, b := start(t, n.Host(1), "job", nil), start(t, n.Host(2), "job", nil)
		defer a.leave(t)
		defer b.leave(t)
		a.Meet("10.0.0.3:4000")
		time.Sleep(2 * meetTries * (syncPause + streamTimeout))
		if got := a.dialed.Load(); got != meetTries {
			t.Errorf("%d attempts, not %d", got, meetTries)
		}
		a.Meet(b.addr)
		a.await(t, 2)
		synctest.Wait()
		before := a.dialed.Load()
		a.Meet(b.addr)
		synctest.Wait()
		if got := a.dialed.Load(); got != before {
			t.Errorf("%d more attempts to meet a known agent", got-before)
		}
	})
}

// TestLeaveIsKnownAtOnce checks that others need no timeout to notice an agent that leaves.
func TestLeaveIsKnownAtOnce(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		a, b := start(t, n.Host(1), "job", nil), start(t, n.Host(2), "job", nil)
		defer a.leave(t)
		b.Meet(a.addr)
		a.await(t, 2)
		b.leave(t)
		time.Sleep(100 * time.Millisecond)
		if got := a.Peers(); len(got) > 0 {
			t.Errorf("still knows %v", got)
		}
	})
}

// TestChangesAreCollected checks that changes within notifyDelay make one notification.
func TestChangesAreCollected(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		a := start(t, n.Host(1), "job", nil)
		defer a.leave(t)
		for range 3 {
			time.Sleep(notifyDelay)
			synctest.Wait()
			select {
			case <-a.Changed():
			default:
			}
			a.change(func() {})
			time.Sleep(notifyDelay / 2)
			a.change(func() {})
			begin := time.Now()
			<-a.Changed()
			if d := time.Since(begin); d > notifyDelay/2 {
				t.Errorf("notified after %v", d)
			}
			select {
			case <-a.Changed():
				t.Error("notified twice")
			case <-time.After(2 * notifyDelay):
			}
		}
	})
}

// TestForeignPacketsAreDropped checks that only packets of the job reach memberlist.
func TestForeignPacketsAreDropped(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		at := func(host int, job string) *transport {
			addr := fmt.Sprintf("10.0.0.%d:4000", host)
			packets, err := n.Host(host).ListenPacket(addr)
			if err != nil {
				t.Fatal(err)
			}
			tr, err := newTransport(&Config{Job: job, Key: key, Packets: packets})
			if err != nil {
				t.Fatal(err)
			}
			return tr
		}
		a, b, other := at(1, "job"), at(2, "job"), at(3, "another job")
		defer a.Shutdown()
		defer b.Shutdown()
		defer other.Shutdown()
		for _, p := range [][]byte{nil, []byte("short"), make([]byte, packetSize)} {
			other.conn.WriteTo(p, a.conn.LocalAddr())
			if _, err := other.WriteTo(p, "10.0.0.1:4000"); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(time.Second)
		if _, err := b.WriteTo([]byte("mine"), "10.0.0.1:4000"); err != nil {
			t.Error(err)
		}
		if p := <-a.PacketCh(); string(p.Buf) != "mine" {
			t.Errorf("a packet of %d bytes", len(p.Buf))
		}
		if _, err := b.WriteTo([]byte("mine"), "10.0.0.1"); err == nil {
			t.Error("a packet to no port")
		}
	})
}

// A counted stream is open until its first Close.
type counted struct {
	net.Conn
	close func()
}

func (c *counted) Close() error {
	c.close()
	return c.Conn.Close()
}

// TestBrokenStreamsAreClosed checks that no stream stays open whose other end is gone before the first message.
func TestBrokenStreamsAreClosed(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		packets, err := n.Host(1).ListenPacket("10.0.0.1:4000")
		if err != nil {
			t.Fatal(err)
		}
		var dialed, open atomic.Int32
		dial := func(context.Context, string) (net.Conn, error) {
			near, far := net.Pipe()
			far.Close()
			dialed.Add(1)
			open.Add(1)
			return &counted{near, sync.OnceFunc(func() { open.Add(-1) })}, nil
		}
		m, err := Join(Config{Job: "job", Key: key, Name: "n1", Packets: packets, Dial: dial})
		if err != nil {
			t.Fatal(err)
		}
		m.Meet("10.0.0.2:4000")
		time.Sleep(time.Minute)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if dialed.Load() == 0 || open.Load() != 0 {
			t.Errorf("%d of %d streams are open", open.Load(), dialed.Load())
		}
	})
}

func TestJobsDoNotMeet(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		a, b := start(t, n.Host(1), "job", nil), start(t, n.Host(2), "another job", nil)
		defer a.leave(t)
		defer b.leave(t)
		b.Meet(a.addr)
		time.Sleep(10 * time.Second)
		a.await(t)
		b.await(t)
	})
}

// A recorder keeps the packets that an agent received.
type recorder struct {
	net.PacketConn
	got chan []byte
}

func (r *recorder) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := r.PacketConn.ReadFrom(b)
	if err == nil && len(r.got) < cap(r.got) {
		r.got <- slices.Clone(b[:n])
	}
	return n, from, err
}

// TestForeignPacketsStopNothing sends random, replayed and changed packets to an agent. A departed agent may seem alive
// for some seconds.
func TestForeignPacketsStopNothing(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		r := &recorder{got: make(chan []byte, 1000)}
		a := start(t, n.Host(1), "job", func(c net.PacketConn) net.PacketConn { r.PacketConn = c; return r })
		defer a.leave(t)
		gone := start(t, n.Host(2), "job", nil)
		gone.Meet(a.addr)
		a.await(t, 2)
		time.Sleep(10 * time.Second)
		gone.leave(t)
		a.await(t)
		stranger, err := n.Host(9).ListenPacket("10.0.0.9:1")
		if err != nil {
			t.Fatal(err)
		}
		defer stranger.Close()
		send := func(b []byte) { stranger.WriteTo(b, r.LocalAddr()) }
		if len(r.got) < 5 {
			t.Fatalf("%d packets", len(r.got))
		}
		chance := rand.NewChaCha8([32]byte{1})
		for range len(r.got) {
			p := <-r.got
			send(p)
			for i := range p {
				p[i] ^= 1
				send(p)
				p[i] ^= 1
				send(p[:i])
			}
			b := make([]byte, chance.Uint64()%packetSize)
			chance.Read(b)
			send(b)
			time.Sleep(10 * time.Millisecond)
		}
		a.await(t)
		late := start(t, n.Host(3), "job", nil)
		defer late.leave(t)
		late.Meet(a.addr)
		late.await(t, 1)
		a.await(t, 3)
	})
}

// TestPacketsAreSealed checks that an observer of the network reads no name.
func TestPacketsAreSealed(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		r := &recorder{got: make(chan []byte, 1000)}
		a := start(t, n.Host(1), "job", func(c net.PacketConn) net.PacketConn { r.PacketConn = c; return r })
		defer a.leave(t)
		b := start(t, n.Host(2222), "job", nil)
		defer b.leave(t)
		b.Meet(a.addr)
		time.Sleep(10 * time.Second)
		for range len(r.got) {
			if p := <-r.got; len(p) > packetSize-100 || bytes.Contains(p, []byte(name(b.host))) {
				t.Errorf("packet %q", p)
			}
		}
	})
}

// TestStreamsEndWithTheMember checks that a silent stream ends, and one after Close.
func TestStreamsEndWithTheMember(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		a := start(t, n.Host(1), "job", nil)
		ends := func() time.Duration {
			near, far := net.Pipe()
			begin := time.Now()
			go a.Accept(far)
			near.Read(make([]byte, 1))
			return time.Since(begin)
		}
		if d := ends(); d != streamTimeout {
			t.Errorf("a silent stream ended after %v, not %v", d, streamTimeout)
		}
		a.leave(t)
		if d := ends(); d != 0 {
			t.Errorf("a stream to a member that left ended after %v", d)
		}
	})
}

// TestSidesOfACutFindEachOther checks that both sides of a partition that have dropped each other know all after two of
// their agents have met.
func TestSidesOfACutFindEachOther(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		w := together(t, n, 8)
		defer w.end()
		n.SetLinks(func(from, to *Host) bool { return from.Number < 4 == (to.Number < 4) })
		time.Sleep(2 * time.Minute) // memberlist sends to the dead for 30 s
		for i, a := range w.here {
			if n := len(a.Peers()); n != 3 {
				t.Errorf("agent %d knows %d others while it is cut off with 3", i, n)
			}
		}
		n.SetLinks(nil)
		w.here[6].Meet(w.here[1].addr)
		w.agree(time.Minute)
	})
}

// TestPausedAgentsReturn checks that an agent that was paused and dropped returns, after a long pause once it meets
// another.
func TestPausedAgentsReturn(t *testing.T) {
	for pause, meets := range map[time.Duration]bool{5 * time.Second: false, 2 * time.Minute: true} {
		t.Run(fmt.Sprint(pause), func(t *testing.T) {
			simulated(t, func(t *testing.T, n *Network) {
				w := together(t, n, 6)
				defer w.end()
				n.SetLinks(func(from, to *Host) bool { return from.Number != 3 && to.Number != 3 })
				time.Sleep(pause)
				if n := len(w.here[0].Peers()); n != 4 {
					t.Errorf("%d other agents are there", n)
				}
				n.SetLinks(nil)
				if meets {
					w.here[3].Meet(w.here[0].addr)
				}
				w.agree(time.Minute)
			})
		})
	}
}

// TestDialEndsWithTheMember checks that Close ends dials in progress.
func TestDialEndsWithTheMember(t *testing.T) {
	simulated(t, func(t *testing.T, n *Network) {
		packets, err := n.Host(1).ListenPacket("10.0.0.1:4000")
		if err != nil {
			t.Fatal(err)
		}
		begun := make(chan struct{}, 1)
		m, err := Join(Config{Job: "job", Key: key, Name: "n1", Packets: packets,
			Dial: func(ctx context.Context, _ string) (net.Conn, error) {
				begun <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			}})
		if err != nil {
			t.Fatal(err)
		}
		m.Meet("10.0.0.2:4000")
		<-begun
		begin := time.Now()
		if err := m.Close(); err != nil || time.Since(begin) != 0 {
			t.Errorf("closed after %v, %v", time.Since(begin), err)
		}
	})
}
