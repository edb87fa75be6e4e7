package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// The coordinator's effects, and the connections. All of it runs on loop, except for the goroutines in the package
// comment.

// dialTimeout bounds the wait for a host that does not answer.
const dialTimeout = 3 * time.Second

func (m *Membership) renewHello() {
	raw, err := json.Marshal(helloOf(m.coord))
	if err == nil {
		m.helloFrame.Store(&raw)
	}
}

// check checks a peer's hello. The goroutines of handshakes call it.
func (m *Membership) check(raw []byte, dialed bool) error {
	h, err := m.checkHello(raw)
	if err != nil || dialed {
		return err
	}
	if _, both := m.dialing.Load(h.Member.Addr); both && m.self.Name < h.Member.Name {
		return wire.ErrBoth
	}
	return nil
}

// checkHello refuses an agent with other inputs, and this agent itself.
func (m *Membership) checkHello(raw []byte) (*hello, error) {
	h, err := decodeHello(raw)
	switch {
	case err != nil:
		return nil, err
	case h.Member.Name == m.self.Name:
		return nil, wire.ErrSelf
	case h.Program != m.cfg.Program:
		return nil, fmt.Errorf("node %s runs cprun version %s, and node %s version %s: "+
			"install the same version on all nodes",
			h.Member.Host, h.Program, m.self.Host, m.cfg.Program)
	case h.Inputs != m.cfg.Inputs:
		return nil, fmt.Errorf("the config or flags of node %s (digest %s) differ from those of node %s (digest %s): "+
			"start all nodes with the same",
			h.Member.Host, short(h.Inputs), m.self.Host, short(m.cfg.Inputs))
	}
	return h, nil
}

func short(s string) string { return s[:min(len(s), 12)] }

func decodeHello(raw []byte) (*hello, error) {
	h := new(hello)
	if err := launch.DecodeStrict(raw, h); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	if err := h.Member.check(); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	return h, nil
}

// onRefused logs refused connections. The acceptor's goroutines call it.
func (m *Membership) onRefused(err error) {
	refusal := (*wire.Refusal)(nil)
	if errors.As(err, &refusal) && !errors.Is(err, wire.ErrBoth) && !errors.Is(err, wire.ErrSelf) {
		m.calls.put(func() { m.coord.search.logForeign(refusal, m.coord.now) })
	}
}

// admit adds a connection. The goroutine of its handshake calls it.
func (m *Membership) admit(l *wire.Link, via string) {
	h, err := decodeHello(l.Hello)
	if err != nil || !m.post(func() { m.linkUp(l, h, via) }) {
		l.Close()
		<-l.Closed()
	}
}

// post passes an event to loop, and reports whether loop accepted it.
func (m *Membership) post(f func()) bool {
	select {
	case m.events <- f:
		return true
	case <-m.ctx.Done():
		return false
	}
}

// simultaneous bounds the age of a first connection beside which a second one counts as simultaneous dialing.
const simultaneous = 2 * time.Second

// linkUp replaces an older connection with the same peer, unless both agents dialed at the same time.
func (m *Membership) linkUp(l *wire.Link, h *hello, via string) {
	name := h.Member.Name
	if old := m.links[name]; old != nil {
		if time.Since(m.linkedAt[name]) < simultaneous {
			l.Close()
			m.group.Go(func() { <-l.Closed() })
			return
		}
		delete(m.links, name)
		old.Close()
		m.coord.down(name, "it has reconnected")
	}
	m.links[name], m.linkedAt[name] = l, time.Now()
	m.group.Go(func() { m.read(l, name) })
	if via != "" {
		m.gossip.Meet(h.Member.Addr)
	}
	m.coord.up(*h, via)
}

// read passes a peer's messages to loop, in order.
func (m *Membership) read(l *wire.Link, name string) {
	defer func() { <-l.Closed() }()
	defer l.Close()
	for {
		raw, err := l.Receive()
		var msg *message
		if err == nil {
			if msg, err = decodeMessage(raw); err != nil {
				err = fmt.Errorf("it sent an invalid message: %w", err)
			}
		}
		ok := m.post(func() {
			switch {
			case m.links[name] != l:
			case err != nil:
				delete(m.links, name)
				m.coord.down(name, err.Error())
			default:
				m.coord.receive(name, msg)
			}
		})
		if err != nil || !ok {
			return
		}
	}
}

func (m *Membership) dial(addr string) {
	m.dialing.Store(addr, true)
	m.group.Go(func() {
		l, err := m.connect(addr)
		m.dialing.Delete(addr)
		if err == nil {
			m.admit(l, addr)
		}
		m.post(func() {
			if err != nil && m.absent {
				m.meet()
			}
			m.coord.dialed(addr, err)
		})
	})
}

// meet listens at the rendezvous too, once the process that used its port at the start has left it. The next dial of
// the rendezvous reaches this agent.
func (m *Membership) meet() {
	ln, err := m.cfg.Network.Listen(net.JoinHostPort(m.cfg.Listen, strconv.Itoa(m.cfg.Port)))
	if err != nil {
		return
	}
	m.absent = false
	acceptor := m.accept(ln)
	m.group.Go(func() {
		<-m.ctx.Done()
		acceptor.Close()
	})
}

func (m *Membership) accept(ln net.Listener) *wire.Acceptor {
	return wire.Open(ln, &m.wireConfig, func(l *wire.Link) { m.admit(l, "") }, m.gossip.Accept, m.onRefused)
}

func (m *Membership) connect(addr string) (*wire.Link, error) {
	ctx, cancel := context.WithTimeout(m.ctx, dialTimeout)
	conn, err := m.cfg.Network.Dial(ctx, addr)
	cancel()
	if err != nil {
		return nil, err
	}
	return wire.Dial(m.ctx, conn, &m.wireConfig)
}

// dialGossip opens a stream for gossip.
func (m *Membership) dialGossip(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := m.cfg.Network.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return wire.DialStream(ctx, conn, &m.wireConfig)
}

func (m *Membership) hangUp(name string) {
	if l := m.links[name]; l != nil {
		delete(m.links, name)
		l.Close()
	}
}

// send encodes a message once for consecutive recipients.
func (m *Membership) send(msg *message, names ...string) {
	if m.sending != msg {
		var err error
		if m.frame, err = wire.NewFrame(msg); err != nil {
			m.cfg.Log("message to the other nodes: %v", err)
			return
		}
		m.sending = msg
	}
	for _, name := range names {
		if l := m.links[name]; l != nil && !l.Send(m.frame) {
			l.Close() // read gets the error
		}
	}
}

func (m *Membership) prepare(w Assignment) {
	m.group.Go(func() {
		payload, err := m.cfg.RunDir.Prepare(m.ctx, w)
		if raw, _ := json.Marshal(&message{Decided: &decision{Assignment: w, Payload: payload}}); err == nil &&
			len(raw) > wire.MaxFrame/8*7 {
			err = fmt.Errorf("a start of %d nodes with a payload of %d bytes exceeds the message limit of %d",
				len(w.Members), len(payload), wire.MaxFrame)
		}
		m.calls.put(func() { m.coord.leader.prepared(w.Generation, payload, launch.NewSecret(), err) })
	})
}

func (m *Membership) claim(payload []byte, d *decision) {
	m.group.Go(func() {
		newest, err := m.claimNow(payload, d)
		m.calls.put(func() { m.coord.claimed(d, newest, err) })
	})
}

func (m *Membership) claimNow(payload []byte, d *decision) (*decision, error) {
	var raw []byte
	index := 0
	if d != nil {
		var err error
		if raw, err = json.Marshal(d); err != nil {
			return nil, err
		}
		index = d.Index
	}
	raw, err := m.cfg.RunDir.Claim(m.ctx, payload, index, raw)
	if err != nil || raw == nil {
		return nil, err
	}
	newest := new(decision)
	if err := launch.DecodeStrict(raw, newest); err != nil {
		return nil, fmt.Errorf("newest decision of the job: %w", err)
	}
	return newest, newest.check()
}

func (m *Membership) begin(d *decision) {
	const room = 64 // more than an agent sends
	ch := make(chan launch.News, room)
	m.newsChan.Store(&ch)
	put(m.next, nextResult{decision: d})
}

func (m *Membership) over(err error) { put(m.next, nextResult{err: err}) }

func (m *Membership) verdict(v launch.Verdict) { put(m.verdicts, v) }

func (m *Membership) news(n launch.News) {
	if ch := m.newsChan.Load(); ch != nil {
		put(*ch, n)
	}
}

// put never blocks. It drops v if the last value was not read.
func put[T any](ch chan T, v T) {
	select {
	case ch <- v:
	default:
	}
}

func (m *Membership) gone() { m.leaveOnce.Do(func() { close(m.goodbyeSent) }) }

// packetQueue sets the size of the kernel's packet queue. Agents read slowly while ranks compute.
const packetQueue = 2 << 20

type tcp struct{}

func (tcp) Listen(addr string) (net.Listener, error) { return net.Listen("tcp", addr) }

func (tcp) ListenPacket(addr string) (net.PacketConn, error) {
	conn, err := net.ListenPacket("udp", addr)
	if err == nil {
		_ = conn.(*net.UDPConn).SetReadBuffer(packetQueue) // best effort
	}
	return conn, err
}

func (tcp) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// errClosed results from calls after Close.
var errClosed = errors.New("this agent has left the job")

// A mailbox queues calls without blocking the caller. Each start has few.
type mailbox struct {
	ready chan struct{} // capacity 1

	mu    sync.Mutex
	calls []func() // guarded by mu
}

// put never blocks.
func (b *mailbox) put(f func()) {
	b.mu.Lock()
	b.calls = append(b.calls, f)
	b.mu.Unlock()
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

func (b *mailbox) take() []func() {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := b.calls
	b.calls = nil
	return calls
}
