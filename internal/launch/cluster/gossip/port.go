package gossip

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/cprun/cprun/internal/base/admission"
)

const (
	// packetSize is more than the longest packet (1,400 bytes), so that longer packets are detected.
	packetSize = 1500
	// packetQueue is the requested size of the kernel's packet queue. Agents read slowly while ranks compute.
	packetQueue = 2 << 20
	// portTries bounds the search for a port that is free for both UDP and TCP.
	portTries = 16
)

// Port is one UDP and TCP port of a job. It carries gossip, as a memberlist.Transport, and is a net.Listener for all
// other streams, so that agents need one port. Silent or unknown connections block nothing.
type Port struct {
	udp     *net.UDPConn
	tcp     *net.TCPListener
	packets chan *memberlist.Packet
	streams chan net.Conn // of gossip
	others  chan net.Conn
	silent  *admission.Door // streams not yet accepted

	gossip, rest context.Context // ended by Shutdown and by Close
	stop, close  context.CancelFunc

	listening, accepting sync.WaitGroup // listen; sort
}

// Bind opens the port of an address, host:port, or a free one if it is 0.
func Bind(address string) (*Port, error) {
	at, err := netip.ParseAddrPort(address)
	switch ip := at.Addr(); {
	case err != nil:
		return nil, fmt.Errorf("cannot listen at %.80q: give an IP address of this host and a port", address)
	case ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "":
		return nil, fmt.Errorf("other hosts cannot reach %s: give the address of this host on the job's network", ip)
	}
	var p *Port
	for range portTries {
		if p, err = bind(at); at.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w: another program or job uses port %d; choose another", err, at.Port())
	case err != nil:
		return nil, err
	}
	p.listening.Go(p.listen)
	p.accepting.Go(func() { p.silent.Serve(p.tcp, p.sort, func(error) {}) })
	return p, nil
}

// bind opens a TCP port and the same UDP port.
func bind(at netip.AddrPort) (*Port, error) {
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return nil, err
	}
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(tcp.Addr().(*net.TCPAddr).AddrPort()))
	if err != nil {
		tcp.Close()
		return nil, err
	}
	_ = udp.SetReadBuffer(packetQueue) // best effort
	p := &Port{
		udp: udp, tcp: tcp, silent: admission.New(inboundLimits),
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), others: make(chan net.Conn),
	}
	p.gossip, p.stop = context.WithCancel(context.Background())
	p.rest, p.close = context.WithCancel(context.Background())
	return p, nil
}

// listen reads packets into one buffer, so that a flood of them uses no memory.
func (p *Port) listen() {
	buf := make([]byte, packetSize)
	for p.gossip.Err() == nil {
		n, from, err := p.udp.ReadFromUDPAddrPort(buf)
		if err != nil || n == len(buf) {
			continue // it may be the error of an earlier packet
		}
		packet := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: net.UDPAddrFromAddrPort(from),
			Timestamp: time.Now()}
		select {
		case p.packets <- packet:
		case <-p.gossip.Done():
		}
	}
}

// sort passes a stream to gossip or to the listener, by its first byte. Until it is accepted, it counts as a silent
// stream.
func (p *Port) sort(conn net.Conn) {
	_ = conn.SetReadDeadline(time.Now().Add(headBound))
	first := make([]byte, 1)
	if _, err := io.ReadFull(conn, first); err != nil {
		conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	to, end := p.others, p.rest
	if first[0] == labelled {
		to, end = p.streams, p.gossip
	}
	select {
	case to <- &prefixedConn{conn, first}:
		return
	case <-time.After(handBound): // not accepted in time
	case <-end.Done():
	}
	conn.Close()
}

// Accept returns the next stream that is not gossip.
func (p *Port) Accept() (net.Conn, error) {
	select {
	case conn := <-p.others:
		return conn, nil
	case <-p.rest.Done():
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: p.Addr(), Err: net.ErrClosed}
	}
}

// Addr returns the address of the port.
func (p *Port) Addr() net.Addr { return p.tcp.Addr() }

// Close stops accepting streams and frees the TCP port.
func (p *Port) Close() error {
	p.close()
	p.silent.Close()
	err := p.tcp.Close()
	p.accepting.Wait()
	return err
}

// Shutdown stops gossip and frees the UDP port. It does not close the listener.
func (p *Port) Shutdown() error {
	p.stop()
	err := p.udp.Close()
	p.listening.Wait()
	return err
}

// FinalAdvertiseAddr returns the listen address.
func (p *Port) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	at := p.tcp.Addr().(*net.TCPAddr)
	if ip4 := at.IP.To4(); ip4 != nil {
		return ip4, at.Port, nil
	}
	return at.IP, at.Port, nil
}

// WriteTo sends a packet.
func (p *Port) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = p.udp.WriteToUDPAddrPort(b, to)
	return time.Now(), err
}

// DialTimeout opens a stream.
func (p *Port) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout}
	return d.DialContext(p.gossip, "tcp", addr)
}

// PacketCh returns the received packets.
func (p *Port) PacketCh() <-chan *memberlist.Packet { return p.packets }

// StreamCh returns the accepted streams of gossip.
func (p *Port) StreamCh() <-chan net.Conn { return p.streams }
