package wire

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// TestHearing counts silence from when the count last changed, over its wrap too, and from the first look.
func TestHearing(t *testing.T) {
	start := time.Date(2026, 11, 22, 14, 3, 0, 0, time.UTC)
	var h hearing
	for i, x := range []struct {
		count       uint32
		after, want time.Duration // in seconds
	}{{5, 0, 0}, {5, 3, 3}, {6, 4, 0}, {6, 9, 5}, {^uint32(0), 10, 0}, {0, 11, 0}, {0, 21, 10}} {
		if got := h.heard(x.count, start.Add(x.after*time.Second)); got != x.want*time.Second {
			t.Errorf("look %d: silent for %v, want %vs", i, got, int(x.want))
		}
	}
}

// TestSilence looks at a connection on which something comes, and then nothing.
func TestSilence(t *testing.T) {
	here, there := tcpPair(t)
	s := newSockets(0, 2, "", defaultPairs)
	s.peer(1).reserve(0)
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
	if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, blame.ErrPeerLost) || !strings.Contains(err.Error(), "rank 1 (pid 1): rank 0 hears nothing from 127.0.0.1:") {
		t.Errorf("after nothing: %v", err)
	}
	there.Close()
	s.Close()
}
