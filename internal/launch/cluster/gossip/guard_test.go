package gossip

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/cprun/cprun/internal/launch/cluster/netsim"
)

// intact requires that m finds a new agent, and has accepted no foreign one.
func intact(t *testing.T, m *Members, name string) {
	t.Helper()
	late := join(t, config(t, name, m.Addr()))
	await(t, late, m.self, name)
	await(t, m, m.self, name)
}

// jobHead returns the header of the job's packets, which an eavesdropper can read.
func jobHead(t *testing.T) []byte {
	_, label, err := derive(key, "job")
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{labelled, byte(len(label))}, label...)
}

func TestGarbageStopsNothing(t *testing.T) {
	m := join(t, config(t, "n0"))
	head := jobHead(t)
	chance := rand.NewChaCha8([32]byte{1})
	garbage := func(i int) []byte {
		b := make([]byte, 1+chance.Uint64()%1400)
		chance.Read(b)
		switch i % 4 {
		case 1:
			return append(slices.Clone(head), b...)
		case 2:
			return append(append(slices.Clone(head), sealing), b...)
		case 3:
			b = append([]byte{encrypted, 0, 0, byte(len(b) >> 8), byte(len(b)), sealing}, b...)
			return append(slices.Clone(head), b...)
		}
		return b
	}
	udp, err := net.Dial("udp", m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	for i := range 5000 {
		_, _ = udp.Write(garbage(i))
	}
	var wait sync.WaitGroup
	for i := range 200 {
		b := garbage(i)
		wait.Go(func() {
			tcp, err := net.Dial("tcp", m.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer tcp.Close()
			_, _ = tcp.Write(b)
			_, _ = tcp.(*net.TCPConn).ReadFrom(bytes.NewReader(b))
		})
	}
	wait.Wait()
	intact(t, m, "n1")
}

// TestHalfOpenStreamsStopNothing checks that silent streams use little memory and block no agent.
func TestHalfOpenStreamsStopNothing(t *testing.T) {
	m := join(t, config(t, "n0"))
	head := jobHead(t)
	slow := append(append(slices.Clone(head), encrypted), 0, 0x40, 0, 0, sealing) // announces 4 MiB
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for i := range 1000 {
		c, err := net.Dial("tcp", m.Addr())
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			_, _ = c.Write(slow)
		}
		open = append(open, c)
	}
	intact(t, m, "n1")
	if n := runtime.NumGoroutine(); n > 3*maxStreams {
		t.Errorf("%d goroutines", n)
	}
}

// TestStreamsHoldABoundedNumberOfBytes checks that many large streams stay within the common bound.
func TestStreamsHoldABoundedNumberOfBytes(t *testing.T) {
	g := newGuard(idle{}, "label")
	defer g.Shutdown()
	var streams []*stream
	for range maxStreams {
		s := &stream{Conn: &source{}, guard: g, inbound: true, opened: true, left: maxState}
		if !g.inbound.Enter(s.Conn) {
			t.Fatal("no room")
		}
		streams = append(streams, s)
	}
	refused := 0
	for _, s := range streams {
		if _, err := io.CopyN(io.Discard, s, maxState); err != nil {
			refused++
			s.Close()
		}
	}
	if allowed := heldState / maxState; refused != maxStreams-allowed {
		t.Errorf("%d of %d streams brought %d MiB each, not %d", maxStreams-refused, maxStreams, maxState>>20, allowed)
	}
	for _, s := range streams {
		s.Close()
	}
	if held := g.held.Load(); held != 0 {
		t.Errorf("closed streams hold %d bytes", held)
	}
	for _, s := range streams {
		if g.inbound.Leave(s.Conn) {
			t.Fatal("a closed stream holds a place")
		}
	}
}

// A source is an endless stream.
type source struct {
	net.Conn
	_ int // makes each value distinct
}

func (*source) Read(p []byte) (int, error) { return len(p), nil }
func (*source) Close() error               { return nil }

// An idle is a transport without traffic.
type idle struct{ memberlist.Transport }

func (idle) PacketCh() <-chan *memberlist.Packet { return nil }
func (idle) StreamCh() <-chan net.Conn           { return nil }
func (idle) Shutdown() error                     { return nil }

// A recorder keeps the packets received by an agent.
type recorder struct {
	memberlist.Transport
	packets chan *memberlist.Packet
	done    chan struct{}

	mu  sync.Mutex
	got [][]byte // guarded by mu
}

func record(inner memberlist.Transport) *recorder {
	r := &recorder{Transport: inner, packets: make(chan *memberlist.Packet), done: make(chan struct{})}
	go func() {
		for {
			select {
			case p := <-inner.PacketCh():
				r.mu.Lock()
				r.got = append(r.got, slices.Clone(p.Buf))
				r.mu.Unlock()
				select {
				case r.packets <- p:
				case <-r.done:
				}
			case <-r.done:
				return
			}
		}
	}()
	return r
}

func (r *recorder) Shutdown() error {
	close(r.done)
	return r.Transport.Shutdown()
}

func (r *recorder) PacketCh() <-chan *memberlist.Packet { return r.packets }

// taken returns the packets so far.
func (r *recorder) taken() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

// TestReplayedPacketsStopNothing replays packets, also with encryption version 0, which is not authenticated:
// memberlist would then cut off as many bytes as the last one says.
func TestReplayedPacketsStopNothing(t *testing.T) {
	w, err := Bind("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r := record(w)
	c := config(t, "n0")
	c.Transport = r
	m := join(t, c)
	gone := join(t, config(t, "gone", m.Addr()))
	await(t, m, "n0", "gone")
	time.Sleep(time.Second)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, m, "n0")
	udp, err := net.Dial("udp", m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	packets := r.taken()
	if len(packets) < 5 {
		t.Fatalf("%d packets", len(packets))
	}
	for range 20 {
		for _, p := range packets {
			_, _ = udp.Write(p)
			flipped := slices.Clone(p)
			flipped[2+int(p[1])] = 0
			_, _ = udp.Write(flipped)
		}
	}
	await(t, m, "n0")
	intact(t, m, "n1")
}

func TestGuardKnowsTheJobsPackets(t *testing.T) {
	g := newGuard(idle{}, "label")
	defer g.Shutdown()
	packet := append([]byte("\xf4\x05label\x01"), make([]byte, 28)...)
	if !g.isOurs(packet) {
		t.Error("a packet of the job is none")
	}
	for i := range 8 {
		other := slices.Clone(packet)
		other[i] ^= 1
		if g.isOurs(other) {
			t.Errorf("a packet of the job with byte %d changed is one", i)
		}
		if g.isOurs(packet[:i]) {
			t.Errorf("%d bytes of it are one", i)
		}
	}
	if g.isOurs(packet[:len(packet)-1]) {
		t.Error("one that is too short to be sealed is one")
	}
}

// FuzzStream reads arbitrary bytes as a stream.
func FuzzStream(f *testing.F) {
	good := append([]byte{encrypted, 0, 0, 0, 33, sealing}, make([]byte, 32)...)
	f.Add([]byte{}, good)
	f.Add([]byte("\xf4\x05label"), append([]byte("\xf4\x05label"), good...))
	f.Add([]byte{}, []byte{encrypted, 0xff, 0xff, 0xff, 0xff, sealing})
	f.Fuzz(func(t *testing.T, prefix, b []byte) {
		if len(prefix) > 300 {
			return
		}
		g := &guard{}
		s := &stream{Conn: &prefixedConn{Conn: ended{}, head: slices.Clone(b)}, guard: g}
		if err := s.open(prefix); err != nil {
			return
		}
		got, err := io.ReadAll(s)
		size := int(binary.BigEndian.Uint32(b[len(prefix)+1:]))
		want := b[:min(len(b), len(prefix)+5+size)]
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%x of %x, %v", got, b, err)
		}
	})
}

// An ended is an empty stream.
type ended struct{ net.Conn }

func (ended) Read([]byte) (int, error) { return 0, io.EOF }

// TestSidesOfACutFindEachOther checks that both sides of a partition that have dropped each other find each other again
// through the seeds.
func TestSidesOfACutFindEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := together(t, 8)
		defer w.end()
		w.net.SetLinks(func(from, to *netsim.Host) bool { return from.Number < 4 == (to.Number < 4) })
		time.Sleep(10 * time.Minute)
		for i, a := range w.here {
			if n := len(a.Peers()); n != 4 {
				t.Errorf("agent %d knows %d while it is cut off with 3 others", i, n)
			}
		}
		w.net.SetLinks(nil)
		w.agree(time.Minute)
	})
}

// TestAgentsThatStoodStillComeBack checks that an agent that was paused and dropped returns.
func TestAgentsThatStoodStillComeBack(t *testing.T) {
	for _, pause := range []time.Duration{5 * time.Second, 5 * time.Minute} {
		t.Run(fmt.Sprint(pause), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := together(t, 6)
				defer w.end()
				w.net.SetLinks(func(from, to *netsim.Host) bool { return from.Number != 3 && to.Number != 3 })
				time.Sleep(pause)
				if n := len(w.here[0].Peers()); n != 5 {
					t.Errorf("%d agents are there", n)
				}
				w.net.SetLinks(nil)
				w.agree(time.Minute)
			})
		})
	}
}
