package wire

import (
	"bytes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"io"
	"net"
	"slices"
	"testing"
)

// tap copies one end's bytes to the other end, and keeps them.
func tap(from, to net.Conn, kept *bytes.Buffer, done chan<- struct{}) {
	io.Copy(io.MultiWriter(to, kept), from)
	to.Close()
	done <- struct{}{}
}

// record runs a handshake, has the dialer send a frame, and returns all that went by in each direction.
func record(t *testing.T, mode Mode) (toAcceptor, toDialer []byte) {
	t.Helper()
	here, near := net.Pipe()
	far, there := net.Pipe()
	var up, down bytes.Buffer
	done := make(chan struct{})
	go tap(near, far, &up, done)
	go tap(far, near, &down, done)
	d, a, err1, err2 := shakeOpen(testIdentity(2), testIdentity(1), here, there, both(mode), 1)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
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
	here.Close()
	there.Close()
	<-done
	<-done
	return up.Bytes(), down.Bytes()
}

// shakeOpen is like shake, but leaves the connections open.
func shakeOpen(
	dialer, acceptor *identity,
	a, b net.Conn,
	say [2]Mode,
	want int,
) (dialed, accepted *channel, dialErr, acceptErr error) {
	done := make(chan struct{})
	go func() {
		accepted, acceptErr = acceptor.accept(b, say[1], func() {}, func(int) error { return nil })
		close(done)
	}()
	dialed, dialErr = dialer.dial(a, say[0], want, func() bool { return true })
	<-done
	return
}

// TestRecordedTrafficStaysClosed has somebody record a connection who later learns the job's secret: none
// of the keys that he can make of all that he has opens it.
func TestRecordedTrafficStaysClosed(t *testing.T) {
	up, down := record(t, Sealed)
	if bytes.Contains(up, []byte("secret")) {
		t.Fatal("the frame can be read as it is")
	}
	id := testIdentity(1)
	dialer, err := id.readHello(bytes.NewReader(up))
	if err != nil {
		t.Fatal(err)
	}
	acceptor, err := id.readHello(bytes.NewReader(down))
	if err != nil {
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
		var aead cipher.AEAD
		if aead, err = newSeal(key); err != nil {
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

// TestKeysOfSmallOrder has a side say a key that gives the same common secret whatever the other's is: it
// is refused, also with the job's secret.
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

// TestKeyReplaced has a relay without the secret put in a key of its own: the code of the hello tells.
func TestKeyReplaced(t *testing.T) {
	here, near := net.Pipe()
	far, there := net.Pipe()
	go func() {
		raw := make([]byte, helloFixed)
		if _, err := io.ReadFull(near, raw); err == nil {
			raw[helloFresh] ^= 1
			far.Write(raw)
			io.Copy(far, near)
		}
		far.Close()
	}()
	go func() {
		io.Copy(near, far)
		near.Close()
	}()
	_, _, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, both(Sealed), 1)
	if err1 == nil || err2 != errProof {
		t.Errorf("dialer %v; acceptor %v, want %v", err1, err2, errProof)
	}
}
