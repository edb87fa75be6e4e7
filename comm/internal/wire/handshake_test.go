package wire

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

var testSecret = []byte("0123456789abcdef")

func testIdentity(rank int) *identity {
	c := Config{Rank: rank, Size: 3, Secret: testSecret, RunID: "run", Name: fmt.Sprintf("pid %d", rank)}
	return c.identity()
}

// shake runs both sides of a handshake on a connection from a to b, and leaves the connection open.
func shake(dialer, acceptor *identity, a, b net.Conn, say [2]Mode) (dialed, accepted *channel, dialErr, acceptErr error) {
	done := make(chan struct{})
	go func() {
		if accepted, acceptErr = acceptor.accept(b, say[1], func() {}, func(int) error { return nil }); acceptErr != nil {
			b.Close()
		}
		close(done)
	}()
	if dialed, dialErr = dialer.dial(a, say[0], 1, func() bool { return true }); dialErr != nil {
		a.Close()
	}
	<-done
	return
}

// both returns one mode for both sides.
func both(mode Mode) [2]Mode { return [2]Mode{mode, mode} }

// A relay copies bytes from one end of a connection to the other.
type relay func(to io.Writer, from io.Reader)

// through returns both ends of a connection through relays, and a function that closes it and waits for them.
func through(up, down relay) (here, there net.Conn, end func()) {
	here, near := net.Pipe()
	far, there := net.Pipe()
	var relays sync.WaitGroup
	relays.Go(func() { up(far, near); far.Close() })
	relays.Go(func() { down(near, far); near.Close() })
	return here, there, func() {
		here.Close()
		there.Close()
		relays.Wait()
	}
}

// changing copies bytes after a change of the first hello.
func changing(change func(hello []byte)) relay {
	return func(to io.Writer, from io.Reader) {
		raw := make([]byte, helloFixed)
		if _, err := io.ReadFull(from, raw); err == nil {
			change(raw)
			to.Write(raw)
			io.Copy(to, from)
		}
	}
}

func TestHandshake(t *testing.T) {
	for _, mode := range []Mode{Plain, Sealed} {
		here, there := net.Pipe()
		d, a, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, both(mode))
		if err1 != nil || err2 != nil {
			t.Fatalf("%v: %v, %v", mode, err1, err2)
		}
		if d.rank != 1 || d.name != "pid 1" || a.rank != 2 || a.name != "pid 2" {
			t.Errorf("the dialer met rank %d (%s), the acceptor rank %d (%s)", d.rank, d.name, a.rank, a.name)
		}
		if mode == Sealed && reflect.DeepEqual(a.out.(*sealedWriter).aead, d.out.(*sealedWriter).aead) {
			t.Error("both directions have one key")
		}
	}
}

func TestHandshakeRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(dialer, acceptor *identity)
		dialer   string // in the dialer's error
		acceptor string // in the acceptor's
	}{
		"secret":       {func(d, _ *identity) { d.secret = []byte("another secret!!") }, "hung up", "secret"},
		"run":          {func(d, _ *identity) { d.run[0]++ }, "", "another run"},
		"size":         {func(d, _ *identity) { d.size = 4 }, "", "world of 4 ranks, this is one of 3"},
		"lower rank":   {func(d, _ *identity) { d.rank = 0 }, "", "rank 0"},
		"own rank":     {func(d, _ *identity) { d.rank = 1 }, "", "rank 1"},
		"other server": {func(_, a *identity) { a.rank = 0 }, "rank 0", ""},
		"beyond":       {func(d, _ *identity) { d.rank = 9 }, "", "rank 9 of 3"},
		"name":         {func(d, _ *identity) { d.name = "a\x1b[2Jb" }, "", "cannot be printed"},
	} {
		d, a := testIdentity(2), testIdentity(1)
		c.change(d, a)
		here, there := net.Pipe()
		_, _, err1, err2 := shake(d, a, here, there, both(Plain))
		if err1 == nil || err2 == nil || !strings.Contains(err1.Error(), c.dialer) ||
			!strings.Contains(err2.Error(), c.acceptor) {
			t.Errorf("%s: dialer %v, want %q; acceptor %v, want %q", name, err1, c.dialer, err2, c.acceptor)
		}
	}
}

// TestModesMustAgree makes one side seal and the other not: they refuse each other. A relay that shows each side its
// own mode breaks the proofs.
func TestModesMustAgree(t *testing.T) {
	for _, modes := range [][2]Mode{{Sealed, Plain}, {Plain, Sealed}} {
		here, there := net.Pipe()
		_, _, _, err := shake(testIdentity(2), testIdentity(1), here, there, modes)
		if want := fmt.Sprintf("its frames are %v, on this connection they are %v", modes[0], modes[1]); err == nil ||
			err.Error() != want {
			t.Errorf("%v: %v, want %q", modes, err, want)
		}
		saying := func(mode Mode) relay { return changing(func(hello []byte) { hello[helloMode] = byte(mode) }) }
		here, there, end := through(saying(modes[1]), saying(modes[0]))
		_, _, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, modes)
		end()
		if err1 == nil || err2 != errProof {
			t.Errorf("%v through a relay: dialer %v; acceptor %v, want %v", modes, err1, err2, errProof)
		}
	}
}

// TestKeyReplaced replaces the key in a relay without the secret: the code of the hello reveals it.
func TestKeyReplaced(t *testing.T) {
	here, there, end := through(changing(func(hello []byte) { hello[helloFresh] ^= 1 }), changing(func([]byte) {}))
	defer end()
	_, _, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, both(Sealed))
	if err1 == nil || err2 != errProof {
		t.Errorf("dialer %v; acceptor %v, want %v", err1, err2, errProof)
	}
}

// TestRecordedTrafficStaysClosed records a connection and later learns the job's secret: no key derived from both opens
// the record.
func TestRecordedTrafficStaysClosed(t *testing.T) {
	var records [2]bytes.Buffer
	recording := func(to *bytes.Buffer) relay {
		return func(w io.Writer, r io.Reader) { io.Copy(io.MultiWriter(w, to), r) }
	}
	here, there, end := through(recording(&records[0]), recording(&records[1]))
	d, a, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, both(Sealed))
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	go func() {
		d.out.add(header{kind: frameData, length: 6, size: 6}, []byte("secret"))
		d.out.flush()
	}()
	h, err := a.in.next()
	b := make([]byte, h.length)
	if err == nil {
		err = a.in.payload(b)
	}
	if err != nil || string(b) != "secret" {
		t.Fatalf("%q, %v", b, err)
	}
	end()
	up, id := records[0].Bytes(), testIdentity(1)
	if bytes.Contains(up, []byte("secret")) {
		t.Fatal("the frame can be read as it is")
	}
	dialer, err1 := id.readHello(bytes.NewReader(up))
	acceptor, err2 := id.readHello(&records[1])
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	frames := up[len(dialer.raw)+sha256.Size:]
	salt := sha256.Sum256(slices.Concat(dialer.raw, acceptor.raw))
	for _, known := range [][]byte{
		id.secret, slices.Concat(make([]byte, freshSize), id.secret), slices.Concat(dialer.fresh[:], id.secret),
		slices.Concat(acceptor.fresh[:], id.secret),
	} {
		key, err := hkdf.Key(sha256.New, known, salt[:], "cprun frames to the acceptor", 32)
		if err != nil {
			t.Fatal(err)
		}
		aead, err := newSeal(key)
		if err != nil {
			t.Fatal(err)
		}
		if h, err := newOpeningReader(bytes.NewReader(frames), aead).next(); err == nil {
			t.Errorf("of what is known comes a key that opens %+v", h)
		}
	}
}

// TestKeysAreNeverTheSame makes the same connection again and again.
func TestKeysAreNeverTheSame(t *testing.T) {
	seen := map[[freshSize]byte]bool{}
	for range 10 {
		for _, mode := range []Mode{Plain, Sealed} {
			h, err := testIdentity(1).hello(mode)
			if err != nil || seen[h.fresh] {
				t.Fatalf("%v: %x again, %v", mode, h.fresh, err)
			}
			seen[h.fresh] = true
		}
	}
}

// TestKeysOfSmallOrder sends a key that gives the same common secret with any other key. The other side refuses it,
// even with the job's secret.
func TestKeysOfSmallOrder(t *testing.T) {
	id := testIdentity(1)
	own, err := id.hello(Sealed)
	if err != nil {
		t.Fatal(err)
	}
	other := &hello{rank: 2, raw: own.raw} // its key is 0
	if _, _, err := id.keys(own, other); err == nil {
		t.Error("a key of zeros was accepted")
	}
}

// Frames that are not sealed go over Unix sockets alone, whatever the config says.
func TestPlainOverTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 1)
	c := Config{Size: 2, Secret: testSecret, Timeout: 200 * time.Millisecond, Log: func(format string, args ...any) {
		select {
		case said <- fmt.Sprintf(format, args...):
		default:
		}
	}}
	dialer := c
	c.Listeners = []Listener{{ln, Plain}}
	dialer.Rank, dialer.Dial = 1, func(ctx context.Context, _ int) (net.Conn, Mode, error) {
		conn, err := DialTCP(ctx, ln.Addr().String())
		return conn, Plain, err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := Connect(t.Context(), c); !errors.Is(err, blame.ErrDeadline) {
			t.Errorf("the listener: %v", err)
		}
	})
	const refused = "plain frames over tcp"
	if _, err := Connect(t.Context(), dialer); !errors.Is(err, blame.ErrDeadline) || !strings.Contains(err.Error(), refused) {
		t.Errorf("the dialer: %v", err)
	}
	wg.Wait()
	if text := <-said; !strings.Contains(text, refused) {
		t.Errorf("the listener said %q", text)
	}
}

// FuzzHandshake plays a dialer without the secret, and an acceptor, to each side.
func FuzzHandshake(f *testing.F) {
	good, err1 := testIdentity(2).hello(Sealed)
	server, err2 := testIdentity(1).hello(Sealed)
	if err := errors.Join(err1, err2); err != nil {
		f.Fatal(err)
	}
	f.Add(good.raw)
	f.Add(append(bytes.Clone(good.raw), make([]byte, 32)...))
	f.Add(good.raw[:20])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(append(bytes.Clone(server.raw), make([]byte, 32)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := testIdentity(0).readHello(bytes.NewReader(b)); err == nil {
			again := h.encode()
			if again = append(again, testIdentity(0).code("hello", again)...); !bytes.Equal(again, h.raw) ||
				!bytes.HasPrefix(b, again) {
				t.Fatalf("%x is read as %+v", b, h)
			}
		}
		if p, err := testIdentity(1).accept(&script{in: bytes.NewReader(b)}, Sealed, func() {}, func(int) error { return nil }); err == nil {
			t.Fatalf("accepted %+v without a proof", p)
		}
		if p, err := testIdentity(2).dial(&script{in: bytes.NewReader(b)}, Sealed, 1, func() bool { return true }); err == nil {
			t.Fatalf("dialed %+v without a proof", p)
		}
	})
}

// A script is a connection with given input.
type script struct {
	net.Conn
	in *bytes.Reader
}

func (s *script) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error) { return len(b), nil }
