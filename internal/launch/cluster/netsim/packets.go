package netsim

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

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
		return now, nil // as to an address that nobody has
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
