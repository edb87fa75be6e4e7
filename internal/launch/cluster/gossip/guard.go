package gossip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/cprun/cprun/internal/base/admission"
)

// With a label and a key, memberlist's packets and streams have these formats:
//
//	packet               244 ‖ length of label (1) ‖ label ‖ 1 ‖ nonce (12) ‖ sealed ‖ tag (16)
//	stream of the dialer 244 ‖ length of label (1) ‖ label ‖ as the answer
//	stream, the answer   10 ‖ length of the rest (4) ‖ 1 ‖ nonce (12) ‖ sealed ‖ tag (16)
//
// The 1 is the version of the encryption. memberlist also accepts 0, with padding, and does not authenticate this byte:
// an attacker could change it to 0 in a captured packet, and the receiver would cut off padding that does not exist. So
// the guard accepts only 1.
const (
	labelled  = 244
	encrypted = 10
	sealing   = 1
	sealCost  = 1 + 12 + 16 // bytes added to the plaintext
)

// maxStreams bounds the incomplete streams of other agents.
const maxStreams = 128

var inboundLimits = admission.Limits{Most: maxStreams, Stay: 250 * time.Millisecond}

const (
	// headBound bounds the wait for a stream's first bytes, and handBound the wait until memberlist accepts it.
	headBound = time.Second
	handBound = time.Second
	// maxState bounds the bytes of a stream: the state of more than 10,000 agents.
	maxState = 8 << 20
	// heldState bounds the bytes held by all inbound streams. Above it, streams with more than their share are closed.
	heldState = 64 << 20
)

var (
	errForeign = errors.New("it belongs to another job or has another key")
	errShare   = errors.New("all inbound streams together hold too many bytes")
)

// A guard filters the traffic between a transport and memberlist. It passes only packets and streams that start with
// the job's header, and bounds the memory that other agents can occupy.
type guard struct {
	memberlist.Transport
	head    []byte // read from Conn, not yet returned
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{} // closed by Shutdown
	once    sync.Once
	err     error // of Shutdown
	wait    sync.WaitGroup
	inbound *admission.Door
	held    atomic.Int64 // bytes held by inbound streams

	mu     sync.Mutex
	closed bool             // guarded by mu
	dialed map[*stream]bool // guarded by mu
}

func newGuard(inner memberlist.Transport, label string) *guard {
	g := &guard{
		Transport: inner,
		head:      append([]byte{labelled, byte(len(label))}, label...),
		packets:   make(chan *memberlist.Packet),
		streams:   make(chan net.Conn),
		done:      make(chan struct{}),
		inbound:   admission.New(inboundLimits),
		dialed:    map[*stream]bool{},
	}
	g.wait.Go(g.passPackets)
	g.wait.Go(g.passStreams)
	return g
}

// PacketCh returns the job's packets.
func (g *guard) PacketCh() <-chan *memberlist.Packet { return g.packets }

// StreamCh returns the job's streams.
func (g *guard) StreamCh() <-chan net.Conn { return g.streams }

func (g *guard) passPackets() {
	for {
		select {
		case p := <-g.Transport.PacketCh():
			if !g.isOurs(p.Buf) {
				continue
			}
			select {
			case g.packets <- p:
			case <-g.done:
				return
			}
		case <-g.done:
			return
		}
	}
}

func (g *guard) isOurs(packet []byte) bool {
	rest, ok := bytes.CutPrefix(packet, g.head)
	return ok && len(rest) >= sealCost && rest[0] == sealing
}

func (g *guard) passStreams() {
	for {
		select {
		case conn := <-g.Transport.StreamCh():
			if g.inbound.Enter(conn) {
				g.wait.Go(func() { g.screen(&stream{Conn: conn, guard: g, inbound: true}) })
			}
		case <-g.done:
			return
		}
	}
}

// screen checks a stream's header, and passes the stream to memberlist.
func (g *guard) screen(s *stream) {
	_ = s.SetDeadline(time.Now().Add(headBound))
	if err := s.open(g.head); err != nil {
		s.Close()
		return
	}
	select {
	case g.streams <- s:
		return
	case <-time.After(handBound):
	case <-g.done:
	}
	s.Close()
}

// DialTimeout opens a stream. The stream checks the header of the answer.
func (g *guard) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	conn, err := g.Transport.DialTimeout(addr, timeout)
	if err != nil {
		return nil, err
	}
	s := &stream{Conn: conn, guard: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		conn.Close()
		return nil, net.ErrClosed
	}
	g.dialed[s] = true
	return s, nil
}

// Shutdown closes all streams and the transport, and waits for the guard's goroutines.
func (g *guard) Shutdown() error {
	g.once.Do(func() {
		close(g.done)
		g.inbound.Close()
		g.mu.Lock()
		g.closed = true
		for s := range g.dialed {
			s.Conn.Close()
		}
		g.mu.Unlock()
		g.err = g.Transport.Shutdown()
		g.wait.Wait()
	})
	return g.err
}

const answerHead = 1 + 4 + 1

// A stream limits reads to one encrypted message.
type stream struct {
	net.Conn
	guard   *guard
	inbound bool
	once    sync.Once

	opened  bool
	head    []byte // read and not handed on yet
	left    int64  // bytes of the message not yet read
	brought atomic.Int64
}

// open reads and checks the header. prefix precedes the header of an answer.
func (s *stream) open(prefix []byte) error {
	head := make([]byte, len(prefix)+answerHead)
	if _, err := io.ReadFull(s.Conn, head); err != nil {
		return err
	}
	rest, ok := bytes.CutPrefix(head, prefix)
	if !ok || rest[0] != encrypted || rest[5] != sealing {
		return errForeign
	}
	size := binary.BigEndian.Uint32(rest[1:])
	if size < sealCost || size > maxState {
		return errForeign
	}
	s.opened, s.head, s.left = true, head, int64(size)-1
	return nil
}

func (s *stream) Read(p []byte) (int, error) {
	if !s.opened {
		if err := s.open(nil); err != nil {
			return 0, err
		}
	}
	if len(s.head) > 0 {
		n := copy(p, s.head)
		s.head = s.head[n:]
		return n, nil
	}
	if s.left == 0 {
		return 0, io.EOF
	}
	n, err := s.Conn.Read(p[:min(int64(len(p)), s.left)])
	s.left -= int64(n)
	if s.inbound && s.overShare(int64(n)) {
		return n, errShare
	}
	return n, err
}

// overShare adds n received bytes. It reports whether all streams hold too much and this one more than its share.
func (s *stream) overShare(n int64) bool {
	held, own := s.guard.held.Add(n), s.brought.Add(n)
	return held > heldState && own > heldState/maxStreams
}

// Close closes the stream and frees its share. The reader calls it.
func (s *stream) Close() error {
	s.once.Do(func() {
		if s.inbound {
			s.guard.inbound.Leave(s.Conn)
			s.guard.held.Add(-s.brought.Load())
			return
		}
		s.guard.mu.Lock()
		delete(s.guard.dialed, s)
		s.guard.mu.Unlock()
	})
	return s.Conn.Close()
}

// A prefixedConn returns the bytes in head before those of Conn.
type prefixedConn struct {
	net.Conn
	head []byte // of a packet and of a dialer's stream: up to the label's end
}

func (b *prefixedConn) Read(p []byte) (int, error) {
	if len(b.head) > 0 {
		n := copy(p, b.head)
		b.head = b.head[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}
