//go:build !portable

package wire

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// TestSilence looks at a connection on which something comes, and then nothing.
func TestSilence(t *testing.T) {
	here, there := tcpPair(t)
	s := newSockets(0, 2, "", defaultPairs)
	s.peer(1).reserve()
	c := plainChannel(here, 1, "pid 1")
	s.attach(c) // without c.raw, so that only this test looks
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

// TestAbortBehindData has a rank abort over TCP and exit as soon as it may, with data before the
// abort that the other rank has not read, and data of the other rank coming in. The other rank must
// learn the cause.
func TestAbortBehindData(t *testing.T) {
	here, there := tcpPair(t)
	s := newSockets(0, 2, "", defaultPairs)
	s.peer(1).reserve()
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
	s.AwaitNotified()
	here.Close() // as the end of the process does
	if err := <-learned; !errors.Is(err, blame.ErrAborted) || !strings.Contains(err.Error(), "not a number") {
		t.Errorf("the other rank has learned %v, want the cause", err)
	}
	there.Close()
	<-flooded
	s.Close()
}
