package gossip

import (
	"net"
	"slices"
	"sync"
	"time"
)

const (
	// maxStreams bounds the streams from others that have not brought all they have to. When there
	// are more, each may stay for streamTurn before the next takes its place, so nobody waits long
	// behind a thousand who say nothing.
	maxStreams = 128
	streamTurn = 250 * time.Millisecond
)

// turns are the streams that have a turn.
type turns struct {
	room chan struct{} // has something to read after one has left
	done chan struct{} // closed by end

	mu     sync.Mutex
	closed bool   // guarded by mu
	here   []turn // guarded by mu; the oldest first
}

// turn is a stream and when it came.
type turn struct {
	conn  net.Conn
	since time.Time
}

func newTurns() *turns {
	return &turns{room: make(chan struct{}, 1), done: make(chan struct{})}
}

// enter waits until there is room for a stream. After end it closes it and returns false.
func (t *turns) enter(conn net.Conn) bool {
	for {
		wait, ok := t.take(conn)
		if ok {
			return true
		}
		if wait == 0 {
			conn.Close()
			return false
		}
		select {
		case <-t.room:
		case <-time.After(wait):
		case <-t.done:
		}
	}
}

// take gives conn a turn, that of the oldest if need be. Otherwise it returns how long the oldest may
// stay, 0 after end.
func (t *turns) take(conn net.Conn) (wait time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return 0, false
	}
	if len(t.here) >= maxStreams {
		if stay := streamTurn - time.Since(t.here[0].since); stay > 0 {
			return stay, false
		}
		t.here[0].conn.Close()
		t.here = slices.Delete(t.here, 0, 1)
	}
	t.here = append(t.here, turn{conn, time.Now()})
	return 0, true
}

// leave ends the turn of a stream, if it still has it.
func (t *turns) leave(conn net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.here = slices.DeleteFunc(t.here, func(x turn) bool { return x.conn == conn })
	select {
	case t.room <- struct{}{}:
	default:
	}
}

// end closes all streams that have a turn, and lets none in any more.
func (t *turns) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.closed = true
	close(t.done)
	for _, x := range t.here {
		x.conn.Close()
	}
	t.here = nil
}
