package netsim

import (
	"cmp"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// window bounds the unread bytes of a stream.
	window = 256 << 10
	// segment bounds one segment of a stream.
	segment = 16 << 10
)

// A part is a segment of a stream in transit. The last one has no bytes.
type part struct {
	at   time.Time // of arrival, if the link is open then
	data []byte
	last bool
}

// A half is one direction of a stream: from writes, to reads.
type half struct {
	from, to *Host
	back     *half // the other direction

	mu     sync.Mutex
	moved  *sync.Cond     // signals any change below
	onWay  []part         // guarded by mu; in order
	ready  []byte         // guarded by mu; has arrived
	bytes  int            // guarded by mu; in onWay and ready
	ended  bool           // guarded by mu; the last part has arrived
	unread bool           // guarded by mu; the reader has closed
	broken bool           // guarded by mu; the writer has closed, or the reader's end is known
	read   time.Time      // guarded by mu; deadlines
	write  time.Time      // guarded by mu
	timers [2]*time.Timer // guarded by mu; of the deadlines
}

// A conn is one end of a stream.
type conn struct {
	host          *Host
	in, out       *half
	local, remote net.Addr
	once          sync.Once
}

func pair(near, far *Host, at, to net.Addr) (*conn, *conn) {
	there := &half{from: near, to: far}
	back := &half{from: far, to: near, back: there}
	there.back = back
	there.moved, back.moved = sync.NewCond(&there.mu), sync.NewCond(&back.mu)
	return &conn{host: near, in: back, out: there, local: at, remote: to},
		&conn{host: far, in: there, out: back, local: to, remote: at}
}

func (c *conn) Read(p []byte) (int, error) {
	h := c.in
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case h.unread:
			return 0, c.fault("read", net.ErrClosed)
		case len(h.ready) > 0:
			n := copy(p, h.ready)
			h.ready = h.ready[n:]
			h.bytes -= n
			h.moved.Broadcast()
			return n, nil
		case h.ended:
			return 0, io.EOF
		case late(h.read):
			return 0, c.fault("read", os.ErrDeadlineExceeded)
		}
		h.moved.Wait()
	}
}

func (c *conn) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := c.writePart(p[done:])
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// writePart writes at most one segment.
func (c *conn) writePart(p []byte) (int, error) {
	h := c.out
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case h.broken:
			return 0, c.fault("write", syscall.EPIPE)
		case late(h.write):
			return 0, c.fault("write", os.ErrDeadlineExceeded)
		case h.bytes < window:
			n := min(len(p), segment, window-h.bytes)
			h.bytes += n
			h.send(part{data: append([]byte(nil), p[:n]...)})
			c.host.count(func(t *Traffic) { t.StreamBytes += int64(n) })
			return n, nil
		}
		h.moved.Wait()
	}
}

// send starts the transfer of a part. Parts arrive in order. h.mu is held.
func (h *half) send(p part) {
	now := time.Now()
	p.at = now.Add(h.from.net.part())
	if n := len(h.onWay); n > 0 && h.onWay[n-1].at.After(p.at) {
		p.at = h.onWay[n-1].at
	}
	h.onWay = append(h.onWay, p)
	time.AfterFunc(p.at.Sub(now), h.arrive)
}

// arrive passes arrived parts to the reader, or waits for the link.
func (h *half) arrive() {
	if !h.from.net.carries(h.from, h.to) && h.from.net.hold(h) {
		return
	}
	h.mu.Lock()
	last := false
	for len(h.onWay) > 0 && !h.onWay[0].at.After(time.Now()) {
		p := h.onWay[0]
		h.onWay = h.onWay[1:]
		if h.unread {
			h.bytes -= len(p.data)
		} else {
			h.ready = append(h.ready, p.data...)
		}
		last = last || p.last
	}
	h.ended = h.ended || last
	h.moved.Broadcast()
	h.mu.Unlock()
	if last { // later writes of the reader fail
		h.back.shut(func(b *half) { b.broken = true })
	}
}

// shut changes a half and wakes its waiters.
func (h *half) shut(change func(*half)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h)
	h.moved.Broadcast()
}

// Close ends the stream in both directions. What was written before still arrives.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.host.mu.Lock()
		delete(c.host.conns, c)
		c.host.mu.Unlock()
		c.in.shut(func(h *half) {
			h.unread, h.ready = true, nil
			h.stopTimer(0)
		})
		c.out.shut(func(h *half) {
			h.broken = true
			h.stopTimer(1)
			h.send(part{last: true})
		})
	})
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

func (c *conn) SetDeadline(t time.Time) error {
	return cmp.Or(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.shut(func(h *half) {
		h.read = t
		h.startTimer(0, t)
	})
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.shut(func(h *half) {
		h.write = t
		h.startTimer(1, t)
	})
	return nil
}

// startTimer wakes the waiters at a deadline. h.mu is held.
func (h *half) startTimer(which int, t time.Time) {
	h.stopTimer(which)
	if !t.IsZero() {
		h.timers[which] = time.AfterFunc(time.Until(t), func() { h.shut(func(*half) {}) })
	}
}

func (h *half) stopTimer(which int) {
	if h.timers[which] != nil {
		h.timers[which].Stop()
	}
}

func (c *conn) fault(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
}

func late(deadline time.Time) bool { return !deadline.IsZero() && !time.Now().Before(deadline) }
