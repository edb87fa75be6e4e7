package gossip

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

const (
	resend    = 200 * time.Millisecond
	dialAgain = time.Second // between two attempts to open a stream
	backlog   = 1024        // streams or packets that wait at a port
	segment   = 16 << 10    // bytes of one segment of a stream
	window    = 16          // segments in transit
)

// A port is a net.Listener or a net.PacketConn without deadlines.
type port struct {
	noDeadlines
	host    *Host
	addr    netip.AddrPort
	key     string // in host.ports
	streams chan net.Conn
	packets chan packet
	done    chan struct{}
	once    sync.Once
}

type noDeadlines struct{ net.PacketConn }

type packet struct {
	from net.Addr
	data []byte
}

// Listen listens at host:port of this host; port 0 is any.
func (h *Host) Listen(address string) (net.Listener, error) { return h.bind("tcp", address) }

// ListenPacket opens a socket for packets at host:port of this host; port 0 is any.
func (h *Host) ListenPacket(address string) (net.PacketConn, error) { return h.bind("udp", address) }

func (h *Host) bind(network, address string) (*port, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	if at.Port() == 0 {
		at = h.free()
	}
	p := &port{host: h, addr: at, key: network + at.String(), streams: make(chan net.Conn, backlog),
		packets: make(chan packet, backlog), done: make(chan struct{})}
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	if h.down || h.ports[p.key] != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: syscall.EADDRINUSE}
	}
	h.ports[p.key], h.sockets[p] = p, true
	return p, nil
}

// free returns an unused port.
func (h *Host) free() netip.AddrPort {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	h.lastPort++
	return netip.AddrPortFrom(h.addr, h.lastPort)
}

func (p *port) Addr() net.Addr      { return net.TCPAddrFromAddrPort(p.addr) }
func (p *port) LocalAddr() net.Addr { return net.UDPAddrFromAddrPort(p.addr) }

// Close frees the port, and closes streams that were not accepted.
func (p *port) Close() error {
	p.once.Do(func() {
		p.host.net.mu.Lock()
		delete(p.host.ports, p.key)
		delete(p.host.sockets, p)
		p.host.net.mu.Unlock()
		close(p.done)
		for len(p.streams) > 0 {
			(<-p.streams).Close()
		}
	})
	return nil
}

func (p *port) Accept() (net.Conn, error) {
	select {
	case c := <-p.streams:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *port) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case m := <-p.packets:
		return copy(b, m.data), m.from, nil
	case <-p.done:
		return 0, nil, net.ErrClosed
	}
}

// WriteTo sends a packet, which may be lost.
func (p *port) WriteTo(b []byte, to net.Addr) (int, error) {
	p.host.count(Traffic{Packets: 1, PacketBytes: int64(len(b))})
	m := packet{p.LocalAddr(), append([]byte(nil), b...)}
	if delay, losses := p.host.net.latency(); losses == 0 {
		time.AfterFunc(delay, func() { p.host.deliver(to.String(), m) })
	}
	return len(b), nil
}

func (h *Host) deliver(address string, m packet) {
	if to, at := h.net.find("udp", address); at != nil && h.net.carries(h, to) {
		select {
		case at.packets <- m:
		default:
		}
	}
}

// Dial opens a stream to host:port. Without an answer it retries until ctx ends.
func (h *Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	for {
		there, losses := h.net.latency()
		back, more := h.net.latency()
		err := pause(ctx, there+back+(losses+more)*resend)
		to, at := h.net.find("tcp", address)
		if err == nil && to != nil && h.net.carries(h, to) && h.net.carries(to, h) {
			if at != nil {
				return h.connect(to, at)
			}
			err = syscall.ECONNREFUSED
		}
		if err == nil {
			err = pause(ctx, dialAgain)
		}
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A conn is one end of a stream: the program's side of a pipe. The network carries bytes between the pipes of both
// ends.
type conn struct {
	net.Conn
	host          *Host
	local, remote net.Addr
	ends          *sync.WaitGroup // the open ends
	once          sync.Once
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// Close ends the stream in both directions. What was written before still arrives.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.host.net.mu.Lock()
		delete(c.host.sockets, c)
		c.host.net.mu.Unlock()
		c.Conn.Close()
		c.ends.Done()
	})
	return nil
}

// connect makes both ends of a stream, and queues the far end at a listener.
func (h *Host) connect(to *Host, at *port) (net.Conn, error) {
	a, x := net.Pipe()
	b, y := net.Pipe()
	ends, done := new(sync.WaitGroup), make(chan struct{})
	local := net.TCPAddrFromAddrPort(h.free())
	near := &conn{Conn: a, host: h, local: local, remote: at.Addr(), ends: ends}
	far := &conn{Conn: b, host: to, local: at.Addr(), remote: local, ends: ends}
	ends.Add(2)
	go func() { ends.Wait(); close(done) }()
	go h.carry(to, x, y, done)
	go to.carry(h, y, x, done)
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	if !h.down && !to.down && to.ports[at.key] == at {
		select {
		case at.streams <- far:
			h.sockets[near], to.sockets[far] = true, true
			return near, nil
		default:
		}
	}
	go near.Close()
	go far.Close()
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
}

// A part is a segment of a stream in transit.
type part struct {
	at   time.Time // of arrival, if the link is open then
	data []byte    // nil: the stream ends
}

// carry moves bytes from a program on h to one on another host, until both have closed the stream.
func (h *Host) carry(to *Host, from, into net.Conn, done <-chan struct{}) {
	parts := make(chan part, window)
	defer close(parts)
	go h.arrive(to, parts, into, done)
	for ended := false; !ended; {
		data := make([]byte, segment)
		n, err := from.Read(data)
		if ended = err != nil; ended {
			data = nil
		}
		h.count(Traffic{StreamBytes: int64(n)})
		d, losses := h.net.latency()
		select {
		case parts <- part{time.Now().Add(d + losses*resend), data[:n]}:
		case <-done:
			return
		}
	}
}

// arrive hands over the parts in order. Without the link, they wait.
func (h *Host) arrive(to *Host, parts <-chan part, into net.Conn, done <-chan struct{}) {
	defer into.Close()
	for p := range parts {
		select {
		case <-time.After(time.Until(p.at)):
		case <-done:
			return
		}
		for relinked := h.net.links(); !h.net.carries(h, to); relinked = h.net.links() {
			select {
			case <-relinked:
			case <-done:
				return
			}
		}
		if p.data == nil {
			return
		}
		into.Write(p.data) // lost if the program has closed its end
	}
}
