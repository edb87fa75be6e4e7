package wire

import (
	"cmp"
	"context"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/pace"
	"github.com/cprun/cprun/comm/internal/shm"
	"github.com/cprun/cprun/internal/base/admission"
)

// unproven bounds the connections before their proof. The ranks of a node need less than a millisecond each.
var unproven = admission.Limits{Most: 128, Each: 32}

const (
	firstPause, lastPause = 2 * time.Millisecond, 100 * time.Millisecond // between two attempts to dial

	// callAgain is the period of repeated calls.
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

// errEnded ends handshakes after the end of the world.
var errEnded = errors.New("the world has ended")

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

// Of two ranks the higher one dials. A lower one that needs a connection calls the higher, from rank to rank: each
// passes the call to its connected rank that is nearest to the called one without going past it. The neighbours at
// distances of powers of two halve the distance with each step, so log2 N steps suffice.
//
// Two calls go out at once, one up through the ranks between the two, and one down around the others. No rank is on
// both routes, so that one stopped rank cannot block a call. The caller repeats the call, since a rank on the route may
// have left with it.

// The routes of a call, the size of its frame.
const (
	callUp   = 1
	callDown = 2
)

// maxCalls bounds the queued calls for one rank. Others are dropped: the caller repeats them.
const maxCalls = 4096

func (s *sockets) call(rank int) {
	for way := range uint64(2) {
		s.pass(header{kind: frameCall, id: link.MsgID{Group: uint64(s.rank), Seq: uint64(rank)}, size: callUp + way})
	}
}

// onCall answers a call or passes it on.
func (s *sockets) onCall(h header) error {
	from, to := int(h.id.Group), int(h.id.Seq)
	switch {
	case to >= s.size: // and so is from, which is below it
		return fmt.Errorf("%w: a call to rank %d of %d", blame.ErrProtocol, to, s.size)
	case to == s.rank:
		if p := s.peer(from); !p.met.Load() {
			s.want(p)
		}
	default:
		s.pass(h)
	}
	return nil
}

// pass sends a call one step further, if there is a way.
func (s *sockets) pass(h header) {
	to := int(h.id.Seq)
	away := func(rank int) int { // how far a rank is from the called one
		if h.size == callUp {
			return (to - rank + s.size) % s.size
		}
		return (rank - to + s.size) % s.size
	}
	var next *peer
	least := away(s.rank)
	for r := range s.peers {
		if p := s.peers[r].Load(); p != nil && p.met.Load() && away(r) < least && !s.roster.hasLeft(r) {
			next, least = p, away(r)
		}
	}
	if next == nil {
		return
	}
	next.mu.Lock()
	defer next.mu.Unlock()
	if len(next.ctrl) < maxCalls {
		next.control(h)
	}
}

// A channel is a connection after the handshake.
type channel struct {
	net.Conn
	rank int
	name string
	in   frameReader
	out  frameWriter

	raw   syscall.RawConn // over TCP, to be watched
	hears hearing         // guarded by peer.mu

	area    *shm.Area // memory that is shared with the other side, or nil
	pipes   *pipes    // that go with it
	placing bool      // guarded by peer.mu; the other side reads from it
	says    bool      // guarded by peer.mu; this side must send its share frame

	current []*link.Transfer // being sent, once for each piece; for the writer alone until peer.quiet
}

// channel returns the connection for use after the handshake.
func (id *identity) channel(conn net.Conn, own, other *hello) (*channel, error) {
	c := &channel{Conn: conn, rank: other.rank, name: other.name}
	if own.mode == Plain {
		c.in, c.out = newPlainReader(conn), &plainWriter{conn: conn}
		return c, nil
	}
	open, seal, err := id.keys(own, other)
	if err != nil {
		return nil, err
	}
	c.in, c.out = newOpeningReader(conn, open), &sealedWriter{conn: conn, aead: seal}
	return c, nil
}

// keys returns the ciphers of a connection, to read and to write.
func (id *identity) keys(own, other *hello) (open, seal cipher.AEAD, err error) {
	public, err := ecdh.X25519().NewPublicKey(other.fresh[:])
	if err != nil {
		return nil, nil, err
	}
	shared, err := own.key.ECDH(public)
	if err != nil {
		return nil, nil, fmt.Errorf("its key: %w", err)
	}
	own.key = nil // not kept beyond its use
	dialer, acceptor := own, other
	to, from := "cprun frames to the acceptor", "cprun frames to the dialer"
	if own.rank < other.rank { // this rank is the acceptor
		dialer, acceptor, to, from = other, own, from, to
	}
	salt := sha256.Sum256(slices.Concat(dialer.raw, acceptor.raw))
	cipherOf := func(info string) (cipher.AEAD, error) {
		key, err := hkdf.Key(sha256.New, slices.Concat(shared, id.secret), salt[:], info, 32)
		if err != nil {
			return nil, err
		}
		return newSeal(key)
	}
	if open, err = cipherOf(from); err != nil {
		return nil, nil, err
	}
	seal, err = cipherOf(to)
	return open, seal, err
}

// awaitTaken blocks until the peer's system has acknowledged all bytes of a TCP connection whose write side has
// been shut down, until the connection is lost, or until the given time. After that the peer can read the
// bytes, even if the connection ends. Without the wait, unread or late data from the peer would make this
// system reset the connection when the process exits, and drop undelivered bytes. A Unix socket
// delivers at once, so awaitTaken returns at once.
func awaitTaken(conn net.Conn, until time.Time) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	for look := (pace.Backoff{}); onTheWay(raw) && time.Now().Before(until); {
		look.Wait()
	}
}
