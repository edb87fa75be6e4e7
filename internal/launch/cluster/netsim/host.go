package netsim

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Host is a host of a network. Its address is 10.x.y.z; x.y.z is its number.
type Host struct {
	Number int

	net    *Network
	addr   netip.Addr
	silent atomic.Bool // nothing leaves or reaches it

	mu      sync.Mutex
	gone    bool                 // guarded by mu; after Kill or Crash
	next    uint16               // guarded by mu; the last assigned port
	ports   map[uint16]*Listener // guarded by mu
	inboxes map[uint16]*Packets  // guarded by mu
	conns   map[*conn]bool       // guarded by mu
	sent    Traffic              // guarded by mu
}

// Traffic counts a host's sent packets, opened streams, and their bytes without headers.
type Traffic struct{ Packets, PacketBytes, Streams, StreamBytes int64 }

// Sent returns the traffic that the host has sent so far.
func (h *Host) Sent() Traffic {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sent
}

func (h *Host) count(add func(*Traffic)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	add(&h.sent)
}

// Addr returns the address of the host.
func (h *Host) Addr() netip.Addr { return h.addr }

// Crash silences the host, as a power failure does: peers get no notice.
func (h *Host) Crash() {
	h.silent.Store(true)
	h.Kill()
}

// Kill closes all sockets of the host, as the kernel does for killed programs: peers see their streams end. Nothing
// can be opened afterwards.
func (h *Host) Kill() {
	h.mu.Lock()
	h.gone = true
	var all []interface{ Close() error }
	for _, l := range h.ports {
		all = append(all, l)
	}
	for _, p := range h.inboxes {
		all = append(all, p)
	}
	for c := range h.conns {
		all = append(all, c)
	}
	h.mu.Unlock()
	for _, x := range all {
		_ = x.Close()
	}
}

// port returns the requested port, or a free one for 0. h.mu is held.
func (h *Host) port(want uint16) (uint16, error) {
	if h.gone {
		return 0, errors.New("the host is down")
	}
	if want != 0 {
		if h.ports[want] != nil {
			return 0, syscall.EADDRINUSE
		}
		return want, nil
	}
	for {
		h.next = max(h.next+1, 32768)
		if h.ports[h.next] == nil {
			return h.next, nil
		}
	}
}

// backlog bounds the streams that wait to be accepted.
const backlog = 1024

// Listener is a net.Listener for the streams of a port.
type Listener struct {
	host  *Host
	addr  *net.TCPAddr
	queue chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// Listen listens at host:port of this host; port 0 is any.
func (h *Host) Listen(address string) (net.Listener, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	return h.listen(at.Port())
}

func (h *Host) listen(port uint16) (*Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	port, err := h.port(port)
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: "tcp", Err: err}
	}
	l := &Listener{
		host: h, queue: make(chan net.Conn, backlog), done: make(chan struct{}),
		addr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(h.addr, port)),
	}
	h.ports[port] = l
	return l, nil
}

// Accept returns the next stream.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
	}
}

// Addr returns the listen address.
func (l *Listener) Addr() net.Addr { return l.addr }

// Close frees the port, and closes streams that were not accepted.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.host.mu.Lock()
		delete(l.host.ports, uint16(l.addr.Port))
		l.host.mu.Unlock()
		close(l.done)
		for {
			select {
			case c := <-l.queue:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

// Dial opens a stream to host:port. Without an answer it retries until ctx ends.
func (h *Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	fault := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Source: net.TCPAddrFromAddrPort(netip.AddrPortFrom(h.addr, 0)),
			Err: err}
	}
	to, port, err := h.net.find(address)
	if err != nil {
		return fault(err)
	}
	for {
		if err := pause(ctx, h.net.part()+h.net.part()); err != nil {
			return fault(err)
		}
		if h.net.carries(h, to) && h.net.carries(to, h) {
			c, err := h.connect(to, port)
			if c != nil {
				return c, nil
			}
			if err != nil {
				return fault(err)
			}
		}
		if err := pause(ctx, dialAgain); err != nil {
			return fault(err)
		}
	}
}

// connect makes both ends of a stream, and queues the far end at the listener. It returns neither a stream nor an error
// if the queue is full.
func (h *Host) connect(to *Host, port uint16) (net.Conn, error) {
	to.mu.Lock()
	l := to.ports[port]
	to.mu.Unlock()
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	h.mu.Lock()
	local, err := h.port(0)
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	near, far := pair(h, to, net.TCPAddrFromAddrPort(netip.AddrPortFrom(h.addr, local)), l.addr)
	if !to.keep(far) || !h.keep(near) {
		far.Close()
		near.Close()
		return nil, syscall.ECONNREFUSED
	}
	select {
	case <-l.done:
	case l.queue <- far:
		h.count(func(t *Traffic) { t.Streams++ })
		select {
		case <-l.done: // closed before this stream was queued
			far.Close()
		default:
		}
		return near, nil
	default:
	}
	near.Close()
	far.Close()
	return nil, nil
}

func (h *Host) keep(c *conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.gone {
		h.conns[c] = true
	}
	return !h.gone
}

// pause waits for d, or returns the error of ctx.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return syscall.ETIMEDOUT
		}
		return ctx.Err()
	}
}
