package wire

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/binary"
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
	// queued bounds the frames that wait for a peer.
	maxQueued = 1024
	// wordsPerSilence counts an agent's messages within the peer's timeout.
	keepalivesPerSilence = 5
)

// Link is an authenticated connection to another agent. Receive has one caller at a time; the other
// methods may be called from any goroutine.
type Link struct {
	Key   ed25519.PublicKey // of the peer
	Hello []byte            // that it has sent

	conn    *tls.Conn
	silence time.Duration
	frames  chan Frame
	once    sync.Once
	closing chan struct{}
	sent    chan struct{} // closed when send has ended
}

func newLink(conn *tls.Conn, p peer, silence time.Duration) *Link {
	l := &Link{
		Key: p.key, Hello: p.hello, conn: conn, silence: silence,
		frames: make(chan Frame, maxQueued), closing: make(chan struct{}), sent: make(chan struct{}),
	}
	go l.send()
	return l
}

// Remote returns the peer's address.
func (l *Link) Remote() net.Addr { return l.conn.RemoteAddr() }

// Send queues a frame. It never blocks, and reports whether there was room: a peer that takes no more is
// as good as lost.
func (l *Link) Send(f Frame) bool {
	select {
	case l.frames <- f:
		return true
	default:
		return false
	}
}

// send writes frames, and an empty one where there is none, so that the peer knows that this agent is
// there. It closes the connection.
func (l *Link) send() {
	defer close(l.sent)
	defer l.conn.NetConn().Close()
	empty := Frame(make([]byte, header))
	word := time.NewTicker(l.silence / keepalivesPerSilence)
	defer word.Stop()
	for {
		var f Frame
		select {
		case f = <-l.frames:
		case <-word.C:
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

// flush writes the queue, for a short while.
func (l *Link) flush() {
	for {
		select {
		case f := <-l.frames:
			if l.write(f, l.silence/keepalivesPerSilence) != nil {
				return
			}
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

// errSilent ends a link after the peer's silence.
var errSilent = errors.New("no word")

// Receive returns the next message. An error ends the link.
func (l *Link) Receive() ([]byte, error) {
	for {
		l.conn.SetReadDeadline(time.Now().Add(l.silence))
		message, err := readFrame(l.conn, MaxFrame)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, fmt.Errorf("%w for %v", errSilent, l.silence)
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
			errors.Is(err, io.ErrClosedPipe):
			return nil, errors.New("its agent has ended, or closed the connection")
		case err != nil:
			return nil, fmt.Errorf("the connection to its agent is lost: %w", err)
		case len(message) > 0:
			return message, nil
		}
	}
}

// Close ends the link after its queue. It does not wait.
func (l *Link) Close() { l.once.Do(func() { close(l.closing) }) }

// Closed returns a channel that is closed when nothing more is written.
func (l *Link) Closed() <-chan struct{} { return l.sent }

// unproven bounds the connections in their handshake. A thousand agents may come in a moment; those that wait for
// a place do so in the system's queue.
var handshakeLimits = admission.Limits{Most: 64, Stay: 250 * time.Millisecond}

// Door takes the connections of other agents.
type Acceptor struct {
	ln        net.Listener
	admission *admission.Door
	cancel    context.CancelFunc
	group     sync.WaitGroup
}

// Open lets agents in: up gets the links of those that are welcome, refused the others' errors. Both are
// called from several goroutines.
func Open(ln net.Listener, p *Config, up func(*Link), refused func(error)) *Acceptor {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Acceptor{ln: ln, admission: admission.New(handshakeLimits), cancel: cancel}
	greet := func(conn net.Conn) {
		l, err := Accept(ctx, conn, p)
		known := d.admission.Leave(conn)
		switch {
		case err == nil:
			up(l)
		case known: // others have not pushed it out
			refused(err)
		}
	}
	d.group.Go(func() { d.admission.Serve(ln, greet, refused) })
	return d
}

// Close closes the listener, and waits until nothing of the door runs.
func (d *Acceptor) Close() error {
	d.cancel()
	d.admission.Close()
	err := d.ln.Close()
	d.group.Wait()
	return err
}

const (
	// MaxFrame is the longest frame that agents send each other.
	MaxFrame = 1 << 20
	// maxGreeting bounds a frame before a peer has proven the key.
	maxGreeting = 16 << 10
	// header is the size of the length before a frame.
	header = 4
)

// Frame is a message with its length before it, made once for all who get it.
type Frame []byte

// NewFrame makes a frame of a message.
func NewFrame(message []byte) (Frame, error) {
	if len(message) > MaxFrame {
		return nil, fmt.Errorf("message of %d bytes: at most %d are allowed", len(message), MaxFrame)
	}
	f := binary.BigEndian.AppendUint32(make([]byte, 0, header+len(message)), uint32(len(message)))
	return append(f, message...), nil
}

// readFrame reads the next frame, of at most limit bytes. An empty one is a word without news.
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
	if _, err := io.ReadFull(r, message); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return message, nil
}
