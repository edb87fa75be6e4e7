package metrics

import (
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// Bounds on what strangers can take through the port: a scrape is one short request, and a run
// needs its descriptors for itself.
const (
	maxScrapes    = 16              // connections at once
	readTime      = 5 * time.Second // for a request, header and all
	writeTime     = 5 * time.Second // for the answer
	maxRequest    = 8 << 10         // bytes of the header
	shutdownTime  = 2 * time.Second // for a scrape under way when the run ends
	acceptBackoff = 100 * time.Millisecond
)

// newServer is a server of short requests: one for each connection, and each over in readTime and
// writeTime, whatever the other side does.
func newServer(h http.Handler) *http.Server {
	s := &http.Server{
		Handler: h, ReadTimeout: readTime, WriteTimeout: writeTime, MaxHeaderBytes: maxRequest,
		ErrorLog: log.New(io.Discard, "", 0), // strangers do not write to a run's log
	}
	s.SetKeepAlivesEnabled(false)
	return s
}

// limited is a listener that accepts no more than its tokens at once. Others wait in the kernel,
// where they cost the run nothing.
type limited struct {
	net.Listener
	tokens chan struct{}
	closed chan struct{}
	once   sync.Once
}

func limit(l net.Listener, most int) *limited {
	return &limited{Listener: l, tokens: make(chan struct{}, most), closed: make(chan struct{})}
}

// Accept waits for a token, then for a connection. Where there are no descriptors left it waits
// and tries again: the port is not worth the run.
func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.tokens <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	for {
		c, err := l.Listener.Accept()
		if err == nil {
			return &held{Conn: c, free: func() { <-l.tokens }}, nil
		}
		select {
		case <-l.closed:
			<-l.tokens
			return nil, err
		case <-time.After(acceptBackoff):
		}
	}
}

// Close ends Accept.
func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// held is a connection with a token.
type held struct {
	net.Conn
	free func()
	once sync.Once
}

// Close gives the token back.
func (h *held) Close() error {
	defer h.once.Do(h.free)
	return h.Conn.Close()
}
