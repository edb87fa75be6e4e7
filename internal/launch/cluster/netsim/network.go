// Package netsim simulates a network within one process, for tests of agents on many hosts. It loses packets, delays
// streams, and kills, silences and partitions hosts.
//
//	net := netsim.New(seed, netsim.Conditions{Loss: 0.01, Delay: time.Millisecond})
//	listener, err := net.Host(1).Listen("10.0.0.1:4000")
//	conn, err := net.Host(2).Dial(ctx, "10.0.0.1:4000")
//
// All waits use the packages time and sync, so it runs in a bubble of testing/synctest: an hour of a thousand hosts
// takes minutes. Random numbers come from a seed; the Go scheduler's order does not.
package netsim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Conditions are the faults and delays of every link between two hosts.
type Conditions struct {
	// Loss is the fraction of lost packets. A lost segment of a stream is resent after 200 ms, as on Linux.
	Loss float64
	// Delay is the latency of a packet; up to Jitter is added.
	Delay, Jitter time.Duration
}

const (
	resend    = 200 * time.Millisecond
	dialAgain = time.Second // between two attempts to open a stream
)

// Network connects hosts.
type Network struct {
	mu         sync.Mutex
	rand       *rand.Rand                // guarded by mu
	conditions Conditions                // guarded by mu
	open       func(from, to *Host) bool // guarded by mu; nil: all links are open
	hosts      map[netip.Addr]*Host      // guarded by mu
	held       map[*half]bool            // guarded by mu; streams that wait for a closed link
}

// New returns a network without hosts. seed determines its random numbers.
func New(seed uint64, c Conditions) *Network {
	return &Network{rand: rand.New(rand.NewPCG(seed, 1)), conditions: c, hosts: map[netip.Addr]*Host{},
		held: map[*half]bool{}}
}

// SetConditions changes the conditions of later packets.
func (n *Network) SetConditions(c Conditions) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conditions = c
}

// SetLinks sets which links are open, for each direction; nil: all. open must not block. Packets on a closed link are
// lost. Streams wait until it is open again.
func (n *Network) SetLinks(open func(from, to *Host) bool) {
	n.mu.Lock()
	n.open = open
	held := n.held
	n.held = map[*half]bool{}
	n.mu.Unlock()
	for h := range held {
		h.arrive()
	}
}

// Host returns the host with this number, from 0 to 2^24 − 1, and creates it at the first call.
func (n *Network) Host(number int) *Host {
	at := netip.AddrFrom4([4]byte{10, byte(number >> 16), byte(number >> 8), byte(number)})
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.hosts[at]
	if h == nil {
		h = &Host{net: n, addr: at, Number: number, ports: map[uint16]*Listener{}, inboxes: map[uint16]*Packets{},
			conns: map[*conn]bool{}}
		n.hosts[at] = h
	}
	return h
}

// find returns the host and port of an address.
func (n *Network) find(address string) (*Host, uint16, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.hosts[at.Addr().Unmap()]
	if h == nil {
		return nil, 0, fmt.Errorf("no host %s", at.Addr())
	}
	return h, at.Port(), nil
}

// carries reports whether the link is open and both hosts are alive.
func (n *Network) carries(from, to *Host) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.carriesLocked(from, to)
}

func (n *Network) carriesLocked(from, to *Host) bool {
	return !from.silent.Load() && !to.silent.Load() && (n.open == nil || n.open(from, to))
}

// hold records that h waits for its link. It returns false if the link is open again.
func (n *Network) hold(h *half) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.carriesLocked(h.from, h.to) {
		return false
	}
	n.held[h] = true
	return true
}

// packet returns a packet's latency, and whether it is lost.
func (n *Network) packet() (delay time.Duration, lost bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.delayLocked(), n.rand.Float64() < n.conditions.Loss
}

// part returns the latency of a segment, including resends.
func (n *Network) part() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.delayLocked()
	for tries := 0; tries < 10 && n.rand.Float64() < n.conditions.Loss; tries++ {
		d += resend
	}
	return d
}

func (n *Network) delayLocked() time.Duration {
	d := n.conditions.Delay
	if n.conditions.Jitter > 0 {
		d += time.Duration(n.rand.Int64N(int64(n.conditions.Jitter)))
	}
	return d
}

// inbox bounds the packets that wait at a port. Further packets are lost, as with a full kernel buffer.
const inbox = 1024

// Packets is a port for packets and streams. It implements memberlist.Transport.
type Packets struct {
	host   *Host
	addr   *net.UDPAddr
	arrive chan *memberlist.Packet
	*Listener

	ctx  context.Context // ended by Close
	stop context.CancelFunc
	once sync.Once
}

// Packets opens a port for both; 0 is any.
func (h *Host) Packets(port uint16) (*Packets, error) {
	l, err := h.listen(port)
	if err != nil {
		return nil, err
	}
	at := netip.AddrPortFrom(h.addr, uint16(l.addr.Port))
	p := &Packets{host: h, addr: net.UDPAddrFromAddrPort(at), arrive: make(chan *memberlist.Packet, inbox), Listener: l}
	p.ctx, p.stop = context.WithCancel(context.Background())
	h.mu.Lock()
	h.inboxes[at.Port()] = p
	h.mu.Unlock()
	return p, nil
}

// FinalAdvertiseAddr returns the address of the port.
func (p *Packets) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return p.addr.IP.To4(), p.addr.Port, nil
}

// WriteTo sends a packet, which may be lost.
func (p *Packets) WriteTo(b []byte, address string) (time.Time, error) {
	now := time.Now()
	if p.ctx.Err() != nil {
		return now, &net.OpError{Op: "write", Net: "udp", Addr: p.addr, Err: net.ErrClosed}
	}
	p.host.count(func(t *Traffic) { t.Packets, t.PacketBytes = t.Packets+1, t.PacketBytes+int64(len(b)) })
	to, port, err := p.host.net.find(address)
	if err != nil {
		return now, nil // an unknown address is no error in UDP
	}
	delay, lost := p.host.net.packet()
	if lost || !p.host.net.carries(p.host, to) {
		return now, nil
	}
	packet := &memberlist.Packet{Buf: append([]byte(nil), b...), From: p.addr}
	time.AfterFunc(delay, func() { to.take(port, packet) })
	return now, nil
}

// take puts a packet into the inbox of its port.
func (h *Host) take(port uint16, packet *memberlist.Packet) {
	h.mu.Lock()
	p := h.inboxes[port]
	h.mu.Unlock()
	if p == nil || h.silent.Load() {
		return
	}
	packet.Timestamp = time.Now()
	select {
	case p.arrive <- packet:
	default:
	}
}

// PacketCh returns the received packets.
func (p *Packets) PacketCh() <-chan *memberlist.Packet { return p.arrive }

// StreamCh returns the inbound streams.
func (p *Packets) StreamCh() <-chan net.Conn { return p.queue }

// DialTimeout opens a stream.
func (p *Packets) DialTimeout(address string, timeout time.Duration) (net.Conn, error) {
	ctx, stop := context.WithTimeout(p.ctx, timeout)
	defer stop()
	conn, err := p.host.Dial(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", address, err)
	}
	return conn, nil
}

// Shutdown closes the port.
func (p *Packets) Shutdown() error { return p.Close() }

// Close closes the port.
func (p *Packets) Close() error {
	p.once.Do(func() {
		p.host.mu.Lock()
		delete(p.host.inboxes, uint16(p.addr.Port))
		p.host.mu.Unlock()
		p.stop()
	})
	return p.Listener.Close()
}
