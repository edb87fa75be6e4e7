//go:build !portable

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

// TestSilence looks at a connection on which something comes, and then nothing.
func TestSilence(t *testing.T) {
	here, there := tcpPair(t)
	c := plainChannel(here, 1, "pid 1")
	s := talk(c) // without c.raw, so that only this test looks
	p, now := s.peer(1), time.Now()
	p.mu.Lock()
	c.raw = tune(here)
	p.mu.Unlock()
	before, ok := segments(c.raw)
	if err := p.silent(now); err != nil || !ok {
		t.Fatalf("at first: %v, counted: %t", err, ok)
	}
	there.Write(frame(header{kind: frameCredit, size: 1, id: link.MsgID{Group: 9}}, ""))
	for n := before; n == before; n, _ = segments(c.raw) {
		time.Sleep(time.Millisecond)
	}
	now = now.Add(silenceBound)
	if err := p.silent(now); err != nil {
		t.Errorf("behind a frame: %v", err)
	}
	var err error
	for range 10 { // an answer of the system may come in between
		if now = now.Add(silenceBound); err == nil {
			err = p.silent(now)
		}
	}
	var pe *blame.PeerError
	if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, blame.ErrPeerLost) ||
		!strings.Contains(err.Error(), "rank 1 (pid 1): rank 0 hears nothing from 127.0.0.1:") {
		t.Errorf("after nothing: %v", err)
	}
	there.Close()
	s.Close()
}

// TestAbortBehindData aborts a rank over TCP and ends it at once, with unread data before the abort, and data of the
// other rank in flight. The other rank must learn the cause.
func TestAbortBehindData(t *testing.T) {
	here, there := tcpPair(t)
	s := talk(plainChannel(here, 1, "pid 1"))

	// All of this message goes into here's buffer, and less than half of it fits into there's.
	_, r := post(s, true, make([]byte, 256<<10))
	there.Write(frame(header{kind: frameAccept, size: 256 << 10}, ""))
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
	s.AwaitNotified()
	here.Close() // as the end of the process does
	if err := <-learned; !errors.Is(err, blame.ErrAborted) || !strings.Contains(err.Error(), "not a number") {
		t.Errorf("the other rank has learned %v, want the cause", err)
	}
	there.Close()
	<-flooded
	s.Close()
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
