package wire

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// tcpPair makes a connection over the loopback interface. There takes little at a time, and the rest
// of what here has written waits in here's buffer.
func tcpPair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	here = conn.(*net.TCPConn)
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	there = accepted.(*net.TCPConn)
	t.Cleanup(func() { here.Close(); there.Close() })
	if err := errors.Join(here.SetWriteBuffer(2<<20), there.SetReadBuffer(32<<10)); err != nil {
		t.Fatal(err)
	}
	return here, there
}

// told reads what a rank is sent up to its end, and returns the cause that an abort has told.
func told(conn net.Conn) error {
	in, payload := newPlainReader(conn), make([]byte, maxPayload)
	for {
		h, err := in.next()
		if err == nil {
			err = in.payload(payload[:h.length])
		}
		if err != nil {
			return err
		}
		if h.kind == frameAbort {
			cause, err := decodeNote(payload[:h.length], 2)
			if err != nil {
				return err
			}
			return cause
		}
	}
}

// TestAbortBehindData has a rank abort over TCP and exit as soon as it may, with data before the
// abort that the other rank has not read, and data of the other rank coming in. The other rank must
// learn the cause.
func TestAbortBehindData(t *testing.T) {
	here, there := tcpPair(t)
	s := newSockets(0, 2, "", defaultPairs)
	s.peer(1).reserve(0)
	s.attach(plainChannel(here, 1, "pid 1"))

	// All of this message goes into here's buffer, and less than half of it fits into there's.
	x, r := &link.Transfer{}, link.NewRound()
	r.Begin(1)
	x.Prepare(r, link.MsgID{}, 1, true, make([]byte, 256<<10))
	s.Post(x)
	there.Write(frame(header{kind: frameAccept, size: uint64(len(x.Buf))}, ""))
	<-r.Done()

	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		for waits := frame(header{kind: frameStatus, id: link.MsgID{Group: 1, Seq: 1}, size: 1}, ""); ; {
			if _, err := there.Write(waits); err != nil {
				return
			}
		}
	}()

	s.Fail(errors.New("the loss is not a number"))
	learned := make(chan error, 1)
	go func() {
		select { // read late, when a rank that does not wait for it is gone
		case <-flooded:
		case <-time.After(20 * time.Millisecond):
		}
		there.SetReadDeadline(time.Now().Add(10 * time.Second))
		learned <- told(there)
	}()
	s.AwaitTold()
	here.Close() // as the end of the process does
	if err := <-learned; !errors.Is(err, blame.ErrAborted) || !strings.Contains(err.Error(), "not a number") {
		t.Errorf("the other rank has learned %v, want the cause", err)
	}
	there.Close()
	<-flooded
	s.Close()
}
