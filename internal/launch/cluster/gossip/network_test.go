package gossip

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

const (
	resend  = 200 * time.Millisecond // of a lost segment of a stream, as on Linux
	backlog = 1024                   // streams or packets that wait at a port
)

// A Network is a simulated network within one process, for tests of agents on many hosts. It delays packets by 0.1 to
// 0.5 ms and loses some, and links close. All waits use the packages time and sync, so it runs in a bubble of
// testing/synctest: an hour of a thousand hosts takes minutes.
type Network struct {
	loss float64     // fraction of lost packets
	tap  chan []byte // receives sent packets while there is room; nil: none

	mu    sync.Mutex // guards all below
	rand  *rand.Rand
	open  func(from, to int) bool // by the hosts' numbers; nil: all links are open
	ports map[string]*port        // by network and address
	last  uint16                  // port that was given for port 0
}

// NewNetwork returns a network that loses a fraction of the packets.
func NewNetwork(loss float64) *Network {
	return &Network{rand: rand.New(rand.NewPCG(1, 1)), loss: loss, last: 1 << 15, ports: map[string]*port{}}
}

// SetLinks sets which links are open, for each direction; nil: all. open must not block. Packets on a closed link are
// lost. Streams wait until it is open again.
func (n *Network) SetLinks(open func(from, to int) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open = open
}

// carries reports whether a link is open.
func (n *Network) carries(from, to Host) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.open == nil || n.open(from.Number, to.Number)
}

// latency returns the travel time of a packet, and how often it is lost before.
func (n *Network) latency() (d, losses time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for losses < 10 && n.rand.Float64() < n.loss {
		losses++
	}
	return 100*time.Microsecond + time.Duration(n.rand.Int64N(int64(400*time.Microsecond))), losses
}

// A Host has the address 10.x.y.z; x.y.z is its number.
type Host struct {
	Number int
	net    *Network
}

// Host returns the host with this number, from 0 to 2^24 − 1.
func (n *Network) Host(number int) Host { return Host{number, n} }

// hostOf returns the host of host:port.
func (n *Network) hostOf(address string) Host {
	at := netip.MustParseAddrPort(address).Addr().As4()
	return n.Host(int(at[1])<<16 | int(at[2])<<8 | int(at[3]))
}

// Addr returns the address of the host.
func (h Host) Addr() netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(h.Number >> 16), byte(h.Number >> 8), byte(h.Number)})
}

// deliver queues a stream or a packet at a port, and reports whether there is one with room.
func (n *Network) deliver(port string, x any) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.ports[port]; p != nil && len(p.arrived) < backlog {
		p.arrived <- x
		return true
	}
	return false
}

// A port is a net.Listener or a net.PacketConn without deadlines.
type port struct {
	net.PacketConn // nil, for its deadlines
	host           Host
	addr           netip.AddrPort
	name           string   // in Network.ports
	arrived        chan any // streams or packets; closed with the port
}

type packet struct {
	from net.Addr
	data []byte
}

// Listen and ListenPacket listen at host:port of this host; port 0 is any.
func (h Host) Listen(address string) (net.Listener, error)         { return h.bind("tcp", address) }
func (h Host) ListenPacket(address string) (net.PacketConn, error) { return h.bind("udp", address) }

func (h Host) bind(network, address string) (*port, error) {
	at := netip.MustParseAddrPort(address)
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	if at.Port() == 0 {
		h.net.last++
		at = netip.AddrPortFrom(h.Addr(), h.net.last)
	}
	p := &port{host: h, addr: at, name: network + at.String(), arrived: make(chan any, backlog)}
	h.net.ports[p.name] = p
	return p, nil
}

func (p *port) Addr() net.Addr      { return net.TCPAddrFromAddrPort(p.addr) }
func (p *port) LocalAddr() net.Addr { return net.UDPAddrFromAddrPort(p.addr) }

// Close frees the port, and closes streams that were not accepted.
func (p *port) Close() error {
	p.host.net.mu.Lock()
	defer p.host.net.mu.Unlock()
	if p.host.net.ports[p.name] == p {
		delete(p.host.net.ports, p.name)
		close(p.arrived)
		for x := range p.arrived {
			if c, ok := x.(net.Conn); ok {
				c.Close()
			}
		}
	}
	return nil
}

func (p *port) Accept() (net.Conn, error) {
	x, ok := <-p.arrived
	if !ok {
		return nil, net.ErrClosed
	}
	return x.(net.Conn), nil
}

func (p *port) ReadFrom(b []byte) (int, net.Addr, error) {
	if x, ok := <-p.arrived; ok {
		return copy(b, x.(packet).data), x.(packet).from, nil
	}
	return 0, nil, net.ErrClosed
}

// WriteTo sends a packet, which may be lost.
func (p *port) WriteTo(b []byte, to net.Addr) (int, error) {
	n, m := p.host.net, packet{p.LocalAddr(), bytes.Clone(b)}
	select {
	case n.tap <- m.data:
	default:
	}
	if delay, losses := n.latency(); losses == 0 {
		time.AfterFunc(delay, func() {
			if n.carries(p.host, n.hostOf(to.String())) {
				n.deliver("udp"+to.String(), m)
			}
		})
	}
	return len(b), nil
}

// Dial opens a stream to host:port. Without an answer it retries until ctx ends. Each end is the program's side of a
// pipe; the network carries bytes between the other sides.
func (h Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	to := h.net.hostOf(address)
	for {
		d, losses := h.net.latency()
		reached := sleep(ctx, 2*d+losses*resend)
		if reached && h.net.carries(h, to) && h.net.carries(to, h) {
			near, x := net.Pipe()
			far, y := net.Pipe()
			go h.carry(to, x, y)
			go to.carry(h, y, x)
			if h.net.deliver("tcp"+address, far) {
				return near, nil
			}
			near.Close()
			far.Close()
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
		}
		if !reached || !sleep(ctx, resend) {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
		}
	}
}

// carry moves bytes from a program on h to one on another host, in order. Without the link they wait, so a test opens
// all links in the end.
func (h Host) carry(to Host, from, into net.Conn) {
	defer from.Close()
	defer into.Close()
	data := make([]byte, 16<<10)
	for {
		n, ended := from.Read(data)
		d, losses := h.net.latency()
		for time.Sleep(d + losses*resend); !h.net.carries(h, to); time.Sleep(resend) {
		}
		if ended != nil {
			return
		}
		if _, err := into.Write(data[:n]); err != nil {
			return
		}
	}
}

// TestNetwork checks that packets are lost. Without its other faults, other tests fail.
func TestNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(0.1)
		far, _ := n.Host(2).bind("udp", "10.0.0.2:7")
		near, _ := n.Host(1).ListenPacket("10.0.0.1:7")
		for range 1000 {
			near.WriteTo([]byte{1}, far.LocalAddr())
		}
		time.Sleep(time.Second)
		if k := len(far.arrived); k < 850 || k > 950 {
			t.Errorf("%d of 1000 packets arrived with a loss of 0.1", k)
		}
	})
}
