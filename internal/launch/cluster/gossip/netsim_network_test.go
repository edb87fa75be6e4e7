package gossip

// A simulated network within one process, for tests of agents on many hosts. It loses packets, delays streams, and
// kills, silences and partitions hosts.
//
//	net := NewNetwork(seed, Conditions{Loss: 0.01, Delay: time.Millisecond})
//	listener, err := net.Host(1).Listen("10.0.0.1:4000")
//	conn, err := net.Host(2).Dial(ctx, "10.0.0.1:4000")
//
// All waits use the packages time and sync, so it runs in a bubble of testing/synctest: an hour of a thousand hosts
// takes minutes. Random numbers come from a seed; the Go scheduler's order does not.

import (
	"io"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Conditions are the faults and delays of every link between two hosts.
type Conditions struct {
	// Loss is the fraction of lost packets. A lost segment of a stream is resent after 200 ms, as on Linux.
	Loss float64
	// Delay is the latency of a packet; up to Jitter is added.
	Delay, Jitter time.Duration
}

// Network connects hosts.
type Network struct {
	conditions Conditions

	mu       sync.Mutex // guards all below, and the hosts
	rand     *rand.Rand
	open     func(from, to *Host) bool // nil: all links are open
	relinked chan struct{}             // closed by SetLinks
	hosts    map[netip.Addr]*Host
}

// NewNetwork returns a network without hosts. seed determines its random numbers.
func NewNetwork(seed uint64, c Conditions) *Network {
	return &Network{rand: rand.New(rand.NewPCG(seed, 1)), conditions: c, relinked: make(chan struct{}),
		hosts: map[netip.Addr]*Host{}}
}

// SetLinks sets which links are open, for each direction; nil: all. open must not block. Packets on a closed link are
// lost. Streams wait until it is open again.
func (n *Network) SetLinks(open func(from, to *Host) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open = open
	close(n.relinked)
	n.relinked = make(chan struct{})
}

// links returns a channel that is closed when the links change.
func (n *Network) links() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.relinked
}

// carries reports whether the link is open and neither host has crashed.
func (n *Network) carries(from, to *Host) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !from.silent && !to.silent && (n.open == nil || n.open(from, to))
}

// latency returns the travel time of a packet, and how often it is lost before.
func (n *Network) latency() (d, losses time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d = n.conditions.Delay
	if n.conditions.Jitter > 0 {
		d += time.Duration(n.rand.Int64N(int64(n.conditions.Jitter)))
	}
	for losses < 10 && n.rand.Float64() < n.conditions.Loss {
		losses++
	}
	return d, losses
}

// A Host has the address 10.x.y.z; x.y.z is its number.
type Host struct {
	Number int

	net      *Network
	addr     netip.Addr
	down     bool // after Kill or Crash
	silent   bool // after Crash
	lastPort uint16
	ports    map[string]*port   // by network and address
	sockets  map[io.Closer]bool // the open ports and streams
	sent     Traffic
}

// Traffic counts a host's sent packets, and the bytes of packets and streams without headers.
type Traffic struct{ Packets, PacketBytes, StreamBytes int64 }

// Host returns the host with this number, from 0 to 2^24 − 1, and creates it at the first call.
func (n *Network) Host(number int) *Host {
	at := netip.AddrFrom4([4]byte{10, byte(number >> 16), byte(number >> 8), byte(number)})
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hosts[at] == nil {
		n.hosts[at] = &Host{Number: number, net: n, addr: at, lastPort: 1 << 15, ports: map[string]*port{},
			sockets: map[io.Closer]bool{}}
	}
	return n.hosts[at]
}

// Addr returns the address of the host.
func (h *Host) Addr() netip.Addr { return h.addr }

// Sent returns the traffic that the host has sent so far.
func (h *Host) Sent() Traffic {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	return h.sent
}

// Crash silences the host, as a power failure does: peers get no notice.
func (h *Host) Crash() { h.end(true) }

// Kill closes all sockets of the host, as the kernel does for killed programs: peers see their streams end. Nothing
// can be opened afterwards.
func (h *Host) Kill() { h.end(false) }

func (h *Host) end(silent bool) {
	h.net.mu.Lock()
	h.down, h.silent = true, h.silent || silent
	sockets := h.sockets
	h.sockets = map[io.Closer]bool{}
	h.net.mu.Unlock()
	for s := range sockets {
		s.Close()
	}
}

func (h *Host) count(t Traffic) {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	h.sent.Packets += t.Packets
	h.sent.PacketBytes += t.PacketBytes
	h.sent.StreamBytes += t.StreamBytes
}

// find returns the host and the port of an address; they are nil if there are none.
func (n *Network) find(network, address string) (*Host, *port) {
	at, _ := netip.ParseAddrPort(address)
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.hosts[at.Addr()]; h != nil {
		return h, h.ports[network+address]
	}
	return nil, nil
}
