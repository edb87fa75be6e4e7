package wire

import (
	"errors"
	"net"
	"testing"
)

// tcpPair makes a connection over the loopback interface. The system buffers little at there, and the rest of the
// output of here waits in the buffer of here.
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

// told reads the frames for a rank to the end, and returns the cause in the abort.
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
