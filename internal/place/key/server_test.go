package key

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
)

// Somebody who opens many connections and says nothing keeps nobody out.
func TestSilentConnections(t *testing.T) {
	r := newRealm()
	want, address := serving(t, "job", r.me(), nil)
	silent := make([]net.Conn, 3*perSource)
	for i := range silent {
		silent[i] = dial(t, address)
	}
	for range 3 {
		if got, err := Ask(t.Context(), address, "job", r.me()); err != nil || got != want {
			t.Fatal(got != want, err)
		}
	}
	// The oldest made way.
	if n, err := silent[0].Read(make([]byte, 1)); n != 0 || !closed(err) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// closed tells whether the other end has closed a connection, or reset it for bytes that it did not read.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// A connection is closed without an answer when its message is none, or does not come.
func TestGarbage(t *testing.T) {
	_, address := serving(t, "job", newRealm().me(), nil)
	whole := func(sealed, size int) string {
		var b bytes.Buffer
		message{public: make([]byte, publicSize), sealed: make([]byte, sealed), credential: make([]byte, size)}.write(&b)
		return b.String()
	}
	for name, data := range map[string]string{
		"nothing":                "",
		"HTTP":                   "GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("x", headSize),
		"no credential":          whole(0, 0),
		"a long credential":      whole(0, maxCredential+1),
		"a second message":       whole(sealedSize, 8),
		"an unknown credential":  whole(0, 8),
		"half a message":         whole(0, 8)[:headSize+4],
		"a magic of another day": strings.Replace(whole(0, 8), "1\n", "2\n", 1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, address)
			io.WriteString(c, data)
			if rest, err := io.ReadAll(c); len(rest) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%d bytes, %v", len(rest), err)
			}
		})
	}
}

// Close ends what waits for a peer.
func TestClose(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(l, New(), "job", newRealm().me(), nil)
	c := dial(t, l.Addr().String())
	io.WriteString(c, magic)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Read(make([]byte, 1)); !closed(err) {
		t.Error(err)
	}
}

// The bound of all connections holds for many sources, too, and those that were heard stay.
func TestSlots(t *testing.T) {
	s := &slots{}
	conns := make([]*fakeConn, maxConns+1)
	for i := range conns {
		conns[i] = &fakeConn{addr: &net.TCPAddr{IP: net.IPv4(10, 0, byte(i/perSource), 1), Port: i + 1}}
	}
	for i, c := range conns[:maxConns] {
		n := s.add(c)
		if n == nil {
			t.Fatalf("connection %d has no room", i)
		}
		if i != 1 {
			s.hear(n)
		}
	}
	if s.add(conns[maxConns]) == nil || !conns[1].closed {
		t.Error("the one that was not heard did not make way")
	}
	s.hear(s.list[len(s.list)-1])
	if s.add(&fakeConn{addr: &net.TCPAddr{IP: net.IPv4(10, 1, 0, 1)}}) != nil {
		t.Error("one was heard, and made way")
	}
	if s.add(&fakeConn{addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1)}}) != nil {
		t.Error("a source has too many")
	}
	for len(s.list) > 0 {
		s.remove(s.list[0])
	}
}

type fakeConn struct {
	net.Conn
	addr   net.Addr
	closed bool
}

func (c *fakeConn) RemoteAddr() net.Addr { return c.addr }
func (c *fakeConn) Close() error         { c.closed = true; return nil }

// A listener that fails, as where descriptors run out, is asked again.
func TestListenerFails(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, says := newRealm(), make(told, 1)
	want := New()
	s := Serve(&failing{Listener: l, left: 2}, want, "job", r.me(), says.refused)
	defer s.Close()
	if got, err := Ask(t.Context(), l.Addr().String(), "job", r.me()); err != nil || got != want {
		t.Fatal(got != want, err)
	}
	if got := <-says; !strings.Contains(got, "too many open files") {
		t.Error(got)
	}
}

type failing struct {
	net.Listener
	left int
}

func (f *failing) Accept() (net.Conn, error) {
	if f.left > 0 {
		f.left--
		return nil, fmt.Errorf("accept: too many open files")
	}
	return f.Listener.Accept()
}
