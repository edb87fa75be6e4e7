// Package netsim is a network within one process, for tests of what agents of many hosts agree on.
// Its packets are lost and its streams are late, as told; hosts end, fall silent and are cut off.
//
// All waiting is by package time and by package sync, so it runs in a bubble of testing/synctest,
// where an hour of a thousand hosts takes minutes. Chance comes from a seed; the order in which the
// Go runtime runs goroutines does not.
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
	// Loss is the share of packets that are lost. A part of a stream that is lost comes again, after
	// Resend.
	Loss float64
	// A packet takes Delay, and up to Jitter more.
	Delay, Jitter time.Duration
	Resend        time.Duration // 0: 200 ms, the least of Linux
}

const (
	resend    = 200 * time.Millisecond
	dialAgain = time.Second // between two tries to open a stream
)

// Network joins hosts.
type Network struct {
	mu         sync.Mutex
	rand       *rand.Rand                // guarded by mu
	conditions Conditions                // guarded by mu
	open       func(from, to *Host) bool // guarded by mu; nil: all links are open
	hosts      map[netip.Addr]*Host      // guarded by mu
	held       map[*half]bool            // guarded by mu; those with parts that a closed link holds up
}

// New returns a network without hosts. Its chance comes from the seed.
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

// SetLinks says which links are open, each direction for itself; nil: all. open must not block.
// Packets on a closed link are lost. Streams wait until it is open again, and go on.
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

// Host returns the host of this number, from 0 to 2^24 − 1. There is one.
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

// find returns the host and port that an address names.
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

// carries reports whether the link is open. It is held up by no host that is gone.
func (n *Network) carries(from, to *Host) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.carriesLocked(from, to)
}

func (n *Network) carriesLocked(from, to *Host) bool {
	return !from.silent.Load() && !to.silent.Load() && (n.open == nil || n.open(from, to))
}

// hold notes that h waits for its link. It returns false if the link has just been opened.
func (n *Network) hold(h *half) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.carriesLocked(h.from, h.to) {
		return false
	}
	n.held[h] = true
	return true
}

// packet returns how long a packet takes, and whether it is lost.
func (n *Network) packet() (delay time.Duration, lost bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.delayLocked(), n.rand.Float64() < n.conditions.Loss
}

// part returns how long a part of a stream takes, what is lost sent again.
func (n *Network) part() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.delayLocked()
	again := n.conditions.Resend
	if again == 0 {
		again = resend
	}
	for tries := 0; tries < 10 && n.rand.Float64() < n.conditions.Loss; tries++ {
		d += again
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

// inbox is how many packets wait at a port. As in a system's buffer, more are lost.
const inbox = 1024

// Packets is a port for packets and streams. It is a memberlist.Transport.
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
	p.host.sent.packets.Add(1)
	p.host.sent.packetBytes.Add(int64(len(b)))
	to, port, err := p.host.net.find(address)
	if err != nil {
		return now, nil // as to an address that no one has
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

// PacketCh returns the packets that arrive.
func (p *Packets) PacketCh() <-chan *memberlist.Packet { return p.arrive }

// StreamCh returns the streams that others open.
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
