package wire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/internal/base/admission"
)

// unproven bounds the connections before their proof. The ranks of a node need less than a millisecond each.
var unproven = admission.Limits{Most: 128, Each: 32}

const (
	firstPause, lastPause = 2 * time.Millisecond, 100 * time.Millisecond // between two attempts to dial

	// callAgain separates repeated calls.
	callAgain = time.Second
)

// A mesher makes the connections of one rank: it dials lower ranks and accepts higher ones. In a small world it ends
// when all are connected, in a large one when the world ends.
type mesher struct {
	*identity
	s      *sockets
	config *Config
	door   *admission.Door
	refuse *admission.Log // logs refused connections
	wg     sync.WaitGroup // with s.mu held while the world has not ended, or before it begins

	open    context.Context // ends with the acceptance of connections
	dialing context.Context // ends with the search for connections
	cancel  context.CancelFunc
}

// newMesher returns a mesher with the rank's transport.
func newMesher(c *Config) *mesher {
	id := c.identity()
	m := &mesher{identity: id, s: newSockets(id.rank, id.size, id.name, cmp.Or(c.Pairs, defaultPairs)), config: c}
	m.door, m.refuse = admission.New(unproven), admission.NewLog(c.Log)
	m.s.meets = m
	m.open, m.cancel = context.WithCancel(context.Background())
	var ended context.CancelFunc
	m.dialing, ended = context.WithCancel(m.open)
	m.wg.Go(func() {
		select {
		case <-m.s.dead:
		case <-m.open.Done():
		}
		ended()
	})
	return m
}

// close stops making connections, and returns when that has ended.
func (m *mesher) close() {
	m.cancel()
	m.door.Close()
	for _, ln := range m.config.Listeners {
		ln.Close()
	}
	m.wg.Wait()
}

// Connect returns when the neighbours at the start are connected, or an error that names the missing ranks. The config
// must have passed Check.
func Connect(ctx context.Context, c Config) (link.Link, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	m := newMesher(&c)
	for _, ln := range c.Listeners {
		m.wg.Go(func() { // until ln is closed
			m.door.Serve(ln, func(conn net.Conn) { m.welcome(conn, ln.Mode) }, func(err error) {
				m.refuse.Printf("rank %d: accept: %v", m.rank, err)
			})
		})
	}
	for _, r := range m.s.near {
		if r < m.rank {
			m.s.want(m.s.peer(r))
		}
	}
	var err error
	select {
	case <-m.s.complete:
	case <-m.s.dead:
		err = m.s.Err()
	case <-ctx.Done():
		err = m.absence(ctx)
	}
	if err != nil {
		m.s.Fail(err)
		m.s.Close()
		return link.Link{}, fmt.Errorf("connect rank %d of %d: %w", m.rank, m.size, err)
	}
	if !m.s.few { // all have come
		m.close()
	}
	return link.Link{Transport: m.s, Roster: m.s, Pairs: cmp.Or(c.Pairs, defaultPairs)}, nil
}

// absence returns an error that names the missing ranks.
func (m *mesher) absence(ctx context.Context) error {
	missing := m.s.missing()
	if len(missing) == 0 || !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return context.Cause(ctx)
	}
	names, why := make([]string, len(missing)), ""
	for i, r := range missing {
		names[i] = fmt.Sprint(r)
		if err := m.s.Unreached(r); err != nil && why == "" {
			why = fmt.Sprintf(" (rank %d: %v)", r, err)
		}
	}
	word := "rank "
	if len(names) > 1 {
		word = "ranks "
	}
	return &blame.PeerError{
		Rank: missing[0], Name: word + strings.Join(names, ", "), Op: "connect",
		Cause: &notedError{fmt.Sprintf("did not come within %v%s", m.config.Timeout, why), blame.ErrDeadline},
	}
}

// errCalled explains a missing connection with a higher rank.
var errCalled = errors.New("it has been called and has not dialled")

// seek makes the connection with a peer, by dialling or by calling it, until it is there, the peer has left, or the
// world ends. The deadlines of transfers bound the time.
func (m *mesher) seek(p *peer) {
	pause := firstPause
	for !m.s.roster.hasLeft(p.rank) && !p.met.Load() {
		switch {
		case p.rank > m.rank:
			p.unreached(errCalled)
			m.s.call(p.rank)
			pause = callAgain
		case m.dial(p):
			return
		default:
			pause = min(2*pause, lastPause)
		}
		select {
		case <-m.dialing.Done():
			return
		case <-p.ready:
		case <-time.After(pause):
		}
	}
}

// dial tries to make the connection with a lower rank, and reports whether it succeeded.
func (m *mesher) dial(p *peer) bool {
	if m.dialing.Err() != nil || !p.reserve() {
		return false
	}
	conn, mode, err := m.config.Dial(m.dialing, p.rank)
	if err == nil {
		err = m.meet(conn, mode, handshakeBound, func(b bound) (*channel, error) {
			return m.identity.dial(conn, mode, p.rank, b.commit)
		})
		if err == nil {
			return true
		}
		err = fmt.Errorf("handshake: %w", err)
	}
	if m.dialing.Err() != nil {
		err = p.s.Unreached(p.rank) // the reason before the end
	}
	p.free(err)
	return false
}

// welcome handles a dialer, and closes a connection that does not prove to be a missing rank.
func (m *mesher) welcome(conn net.Conn, mode Mode) {
	var held *peer
	err := m.meet(conn, mode, helloBound, func(b bound) (*channel, error) {
		return m.identity.accept(conn, mode, func() { b.set(handshakeBound) }, func(rank int) error {
			m.door.Leave(conn)
			p := m.s.peer(rank)
			if !p.reserve() {
				return fmt.Errorf("rank %d is connected already", rank)
			}
			held = p
			if !b.commit() {
				return errEnded
			}
			return nil
		})
	})
	if err == nil {
		return
	}
	if held != nil {
		held.free(err)
	}
	if m.dialing.Err() == nil {
		m.refuse.Printf("rank %d: refused a connection: %v", m.rank, err)
	}
}

// A bound sets the time of a handshake.
type bound struct {
	set    func(time.Duration) // from now
	commit func() bool         // removes it: the other side expects a last frame; false at the end of the world
}

// meet runs a handshake within its bounds, beginning with first, and attaches the peer.
func (m *mesher) meet(conn net.Conn, mode Mode, first time.Duration, shake func(b bound) (*channel, error)) error {
	if network := conn.LocalAddr().Network(); mode == Plain && network != "unix" {
		conn.Close()
		return fmt.Errorf("%v frames over %s, where others can read them", mode, network)
	}
	until := func(t time.Time) {
		conn.SetDeadline(t)
		if m.dialing.Err() != nil { // it may have ended before the line above
			conn.SetDeadline(time.Now())
		}
	}
	set := func(d time.Duration) { until(time.Now().Add(min(d, m.config.Timeout))) }
	set(first)
	fired := make(chan struct{})
	stop := context.AfterFunc(m.dialing, func() {
		conn.SetDeadline(time.Now())
		close(fired)
	})
	committed := false
	c, err := shake(bound{set, func() bool {
		if committed = m.s.commit(); committed {
			until(time.Time{})
		}
		return committed
	}})
	if !stop() {
		<-fired
	}
	if committed {
		defer m.s.committed.Done()
	}
	if err != nil && (c == nil || m.dialing.Err() == nil) {
		conn.Close()
		return err
	}
	conn.SetDeadline(time.Time{})
	c.raw = tune(conn)
	m.config.Log("rank %d: connected to rank %d (%s)", m.rank, c.rank, c.name)
	m.s.attach(c)
	return nil
}
