package wire

import (
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// queued is how many frames wait for a peer at most.
	queued = 1024
	// wordsPerSilence is how often an agent speaks in the time that another waits for it.
	wordsPerSilence = 5
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
		frames: make(chan Frame, queued), closing: make(chan struct{}), sent: make(chan struct{}),
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
	word := time.NewTicker(l.silence / wordsPerSilence)
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

// flush writes what is queued, for a short while.
func (l *Link) flush() {
	for {
		select {
		case f := <-l.frames:
			if l.write(f, l.silence/wordsPerSilence) != nil {
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

// errSilent is how a link ends whose peer is gone without a word.
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

// Close ends the link when what is queued has been written, or cannot be. It does not wait.
func (l *Link) Close() { l.once.Do(func() { close(l.closing) }) }

// Closed returns a channel that is closed when nothing more is written.
func (l *Link) Closed() <-chan struct{} { return l.sent }
