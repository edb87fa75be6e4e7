package wire

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/admission"
)

const (
	// maxQueued bounds the frames that wait for a peer.
	maxQueued = 1024
	// keepalivesPerSilence is the number of keepalives within Config.Silence.
	keepalivesPerSilence = 5
)

// Goroutines of the package, and their ends:
//
//	accept   one per Acceptor, takes connections; ends with the listener
//	greet    one per connection in its handshake; ends after HandshakeTimeout at most
//	send     one per Link, writes its frames; ends with the link

// Link is an authenticated connection to another agent. Receive has one caller at a time; the other methods may be
// called from any goroutine.
type Link struct {
	Hello []byte // received from the peer

	conn    *tls.Conn
	silence time.Duration
	frames  chan Frame
	once    sync.Once
	closing chan struct{}
	sent    chan struct{} // closed when send has ended
}

func newLink(conn *tls.Conn, hello []byte, silence time.Duration) *Link {
	l := &Link{
		Hello: hello, conn: conn, silence: silence,
		frames: make(chan Frame, maxQueued), closing: make(chan struct{}), sent: make(chan struct{}),
	}
	go l.send()
	return l
}

// Send queues a frame without blocking. It returns false if the queue is full: such a peer is lost.
func (l *Link) Send(f Frame) bool {
	select {
	case l.frames <- f:
		return true
	default:
		return false
	}
}

// send writes frames, and an empty one as a keepalive. It closes the connection at the end.
func (l *Link) send() {
	defer close(l.sent)
	defer l.conn.NetConn().Close()
	empty := Frame(make([]byte, header))
	word := time.Tick(l.silence / keepalivesPerSilence)
	for {
		var f Frame
		select {
		case f = <-l.frames:
		case <-word:
			f = empty
		case <-l.closing:
			l.flush()
			return
		}
		if l.write(f, l.silence) != nil {
			return
		}
	}
}

// flush writes the queued frames, for a short time.
func (l *Link) flush() {
	for {
		select {
		case f := <-l.frames:
			_ = l.write(f, l.silence/keepalivesPerSilence) // after an error, further writes fail at once
		default:
			return
		}
	}
}

func (l *Link) write(f Frame, within time.Duration) error {
	l.conn.SetWriteDeadline(time.Now().Add(within))
	_, err := l.conn.Write(f)
	return err
}

// errSilent ends a link without keepalives.
var errSilent = errors.New("no word")

// Receive returns the next message. An error ends the link.
func (l *Link) Receive() ([]byte, error) {
	for {
		l.conn.SetReadDeadline(time.Now().Add(l.silence))
		message, err := readFrame(l.conn, MaxFrame)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, fmt.Errorf("%w for %v", errSilent, l.silence)
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
			return nil, errors.New("its agent has ended, or closed the connection")
		case err != nil:
			return nil, fmt.Errorf("lost the connection to its agent: %w", err)
		case len(message) > 0:
			return message, nil
		}
	}
}

// Close ends the link after the queued frames. It does not wait.
func (l *Link) Close() { l.once.Do(func() { close(l.closing) }) }

// Closed returns a channel that is closed after the last write.
func (l *Link) Closed() <-chan struct{} { return l.sent }

// handshakeLimits bound the connections in their handshake. A thousand agents may connect at once; the others wait in
// the listener's backlog.
var handshakeLimits = admission.Limits{Most: 64, Stay: 250 * time.Millisecond}

// Acceptor accepts the connections of other agents.
type Acceptor struct {
	ln        net.Listener
	admission *admission.Door
	group     sync.WaitGroup
}

// Open starts to accept agents. up gets the links of admitted agents, stream their streams, and refused the errors of
// the others. All are called from several goroutines.
func Open(ln net.Listener, p *Config, up func(*Link), stream func(net.Conn), refused func(error)) *Acceptor {
	a := &Acceptor{ln: ln, admission: admission.New(handshakeLimits)}
	greet := func(conn net.Conn) {
		secured := tls.Server(conn, p.Identity.tls(links, streams))
		hello, err := p.handshake(context.Background(), secured, false)
		known := a.admission.Leave(conn)
		switch {
		case err == nil && secured.ConnectionState().NegotiatedProtocol == streams:
			stream(secured)
		case err == nil:
			up(newLink(secured, hello, p.Silence))
		case known: // not closed by Close, or to make room for others
			refused(err)
		}
	}
	a.group.Go(func() { a.admission.Serve(ln, greet, refused) })
	return a
}

// Close closes the listener, and waits for the acceptor's goroutines.
func (a *Acceptor) Close() error {
	a.admission.Close()
	err := a.ln.Close()
	a.group.Wait()
	return err
}

const (
	// MaxFrame is the longest frame in bytes.
	MaxFrame = 1 << 20
	// maxGreeting bounds a frame of the handshake.
	maxGreeting = 16 << 10
	// header is the size of the length prefix.
	header = 4
)

// Frame is a message with its length prefix, encoded once for all recipients.
type Frame []byte

// NewFrame returns the frame of a message, in JSON.
func NewFrame(v any) (Frame, error) {
	message, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(message) > MaxFrame {
		return nil, fmt.Errorf("message of %d bytes: at most %d are allowed", len(message), MaxFrame)
	}
	f := binary.BigEndian.AppendUint32(make([]byte, 0, header+len(message)), uint32(len(message)))
	return append(f, message...), nil
}

// readFrame reads the next frame, of at most limit bytes. An empty frame is a keepalive.
func readFrame(r io.Reader, limit int) ([]byte, error) {
	var head [header]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > uint32(limit) {
		return nil, fmt.Errorf("frame of %d bytes: at most %d are allowed", n, limit)
	}
	message := make([]byte, n)
	_, err := io.ReadFull(r, message)
	return message, err
}
