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
	// packetSize is the most that a packet of ours has (1,400 bytes), and a bit, so that a longer
	// one is known as such.
	packetSize = 1500
	// packetQueue is the requested size of the system's queue of packets. Agents are slow to read while ranks compute.
	packetQueue = 2 << 20
	// portTries bounds the search for a port that is free for both UDP and TCP.
	portTries = 16
)

// Port is one port of one address, for a job: UDP and TCP. It carries gossip, as a
// memberlist.Transport, and is a net.Listener for the streams that are not gossip, so that agents
// need no port besides. What does not ask for either holds nothing up.
type Port struct {
	udp     *net.UDPConn
	tcp     *net.TCPListener
	packets chan *memberlist.Packet
	streams chan net.Conn // those of gossip
	others  chan net.Conn
	silent  *admission.Door // streams that no one has taken yet

	gossip, rest context.Context // ended by Shutdown and by Close
	stop, close  context.CancelFunc

	listening, accepting sync.WaitGroup // listen; sort
}

// Bind takes the port of an address, host:port, or one that is free if it is 0.
func Bind(address string) (*Port, error) {
	at, err := netip.ParseAddrPort(address)
	switch ip := at.Addr(); {
	case err != nil:
		return nil, fmt.Errorf("cannot listen at %.80q: give an IP address of this host and a port", address)
	case ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "":
		return nil, fmt.Errorf("others cannot reach %s: give the address that this host has on the job's network", ip)
	}
	var p *Port
	for range portTries {
		if p, err = bind(at); at.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; another program or job has port %d, so choose another", err, at.Port())
	case err != nil:
		return nil, err
	}
	p.listening.Go(p.listen)
	p.accepting.Go(func() { p.silent.Serve(p.tcp, p.sort, func(error) {}) })
	return p, nil
}

// bind takes a port for TCP and the same one for UDP.
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
	_ = udp.SetReadBuffer(packetQueue) // the system may give less
	p := &Port{
		udp: udp, tcp: tcp, silent: admission.New(inboundLimits),
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), others: make(chan net.Conn),
	}
	p.gossip, p.stop = context.WithCancel(context.Background())
	p.rest, p.close = context.WithCancel(context.Background())
	return p, nil
}

// listen reads packets into one buffer, so that a flood of them costs time and no memory.
func (p *Port) listen() {
	buf := make([]byte, packetSize)
	for p.gossip.Err() == nil {
		n, from, err := p.udp.ReadFromUDPAddrPort(buf)
		if err != nil || n == len(buf) {
			continue // errors of earlier packets are also reported here
		}
		packet := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: net.UDPAddrFromAddrPort(from),
			Timestamp: time.Now()}
		select {
		case p.packets <- packet:
		case <-p.gossip.Done():
		}
	}
}

// sort hands a stream to gossip or to the listener, by its first byte. Until somebody takes it, it
// has the place of a silent stream.
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
	case <-time.After(handBound): // no one is there for it
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

// Close takes no more streams, and frees the port for TCP.
func (p *Port) Close() error {
	p.close()
	p.silent.Close()
	err := p.tcp.Close()
	p.accepting.Wait()
	return err
}

// Shutdown carries no more gossip, and frees the port for UDP. It does not close the listener.
func (p *Port) Shutdown() error {
	p.stop()
	err := p.udp.Close()
	p.listening.Wait()
	return err
}

// FinalAdvertiseAddr returns the address that is listened at. There is no other by which to reach it.
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

// PacketCh returns the packets that arrive.
func (p *Port) PacketCh() <-chan *memberlist.Packet { return p.packets }

// StreamCh returns the streams that others open.
func (p *Port) StreamCh() <-chan net.Conn { return p.streams }
