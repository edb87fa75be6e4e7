package gossip

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// bubble runs a test on a network with a latency of 1 ms.
func bubble(t *testing.T, test func(t *testing.T, n *Network)) {
	synctest.Test(t, func(t *testing.T) { test(t, NewNetwork(1, Conditions{Delay: time.Millisecond})) })
}

// meet opens a stream from host 1 to host 2.
func meet(t *testing.T, n *Network) (near, far net.Conn) {
	t.Helper()
	l, err := n.Host(2).Listen("10.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if near, err = n.Host(1).Dial(t.Context(), l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

func TestStreamsCarryBytesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(1, Conditions{Delay: time.Millisecond, Jitter: 20 * time.Millisecond, Loss: 0.3})
		near, far := meet(t, n)
		want := make([]byte, 3*window*segment+5)
		rand.NewChaCha8([32]byte{}).Read(want)
		go func() {
			near.Write(want)
			near.Close()
		}()
		got, err := io.ReadAll(far)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
		}
		if sent := n.Host(1).Sent(); sent.StreamBytes != int64(len(want)) {
			t.Errorf("counted %+v", sent)
		}
		if _, err := far.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("a write to a stream whose end was read: %v", err)
		}
	})
}

func TestStreamsTakeTime(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		begin := time.Now()
		near, far := meet(t, n)
		if d := time.Since(begin); d != 2*time.Millisecond {
			t.Errorf("opened after %v", d)
		}
		near.Write([]byte("x"))
		far.Read(make([]byte, 1))
		if d := time.Since(begin); d != 3*time.Millisecond {
			t.Errorf("read after %v", d)
		}
	})
}

func TestDeadlines(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		near, far := meet(t, n)
		begin := time.Now()
		near.SetDeadline(begin.Add(time.Second))
		_, err := near.Read(make([]byte, 1))
		var timeout net.Error
		if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() ||
			time.Since(begin) != time.Second {
			t.Errorf("read: %v after %v", err, time.Since(begin))
		}
		near.SetDeadline(time.Now().Add(time.Second))
		if _, err := near.Write(make([]byte, 2*window*segment)); !errors.Is(err, os.ErrDeadlineExceeded) ||
			time.Since(begin) != 2*time.Second {
			t.Errorf("write to one who does not read: %v after %v", err, time.Since(begin))
		}
		near.SetDeadline(time.Time{})
		go far.Write([]byte("x"))
		if _, err := near.Read(make([]byte, 1)); err != nil {
			t.Error(err)
		}
	})
}

func TestClosedLinksHoldStreamsUp(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		near, far := meet(t, n)
		n.SetLinks(func(from, to *Host) bool { return from.Number != 1 })
		near.Write([]byte("late"))
		far.Write([]byte("early"))
		near.Close()
		begin := time.Now()
		time.AfterFunc(time.Minute, func() { n.SetLinks(nil) })
		if got, err := io.ReadAll(far); string(got) != "late" || err != nil || time.Since(begin) != time.Minute {
			t.Errorf("%q, %v after %v", got, err, time.Since(begin))
		}
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		n.SetLinks(func(from, to *Host) bool { return from.Number != 2 })
		if _, err := n.Host(1).Dial(ctx, "10.0.0.2:1"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("opened over a closed link: %v", err)
		}
		n.SetLinks(nil)
		if _, err := n.Host(1).Dial(t.Context(), "10.0.0.2:1"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("opened to a free port: %v", err)
		}
	})
}

func TestKilledHostsEndStreamsAndCrashedOnesDoNot(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		near, far := meet(t, n)
		n.Host(1).Kill()
		if _, err := far.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("of a killed host: %v", err)
		}
		if _, err := near.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("on a killed host: %v", err)
		}
		if _, err := n.Host(1).Listen("10.0.0.1:0"); err == nil {
			t.Error("a killed host listens")
		}
	})
	bubble(t, func(t *testing.T, n *Network) {
		_, far := meet(t, n)
		n.Host(1).Crash()
		far.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("of a crashed host: %v", err)
		}
	})
}

func TestPacketsAreLost(t *testing.T) {
	for loss, want := range map[float64][2]int{0: {1000, 1000}, 0.1: {850, 950}} {
		synctest.Test(t, func(t *testing.T) {
			n := NewNetwork(1, Conditions{Loss: loss})
			from, to := packets(t, n.Host(1)), packets(t, n.Host(2))
			if _, err := n.Host(2).ListenPacket("10.0.0.2:7946"); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("a port was given twice: %v", err)
			}
			arrived := 0
			go func() {
				for b := make([]byte, 8); ; arrived++ {
					if k, at, err := to.ReadFrom(b); err != nil {
						return
					} else if k != 1 || at.String() != "10.0.0.1:7946" {
						t.Errorf("%d bytes from %v", k, at)
					}
				}
			}()
			send := func() (packets int) {
				before := arrived
				for range 1000 {
					from.WriteTo([]byte{1}, to.LocalAddr())
				}
				time.Sleep(time.Second)
				synctest.Wait()
				return arrived - before
			}
			if got := send(); got < want[0] || got > want[1] {
				t.Errorf("%d of 1000 packets arrived with a loss of %v", got, loss)
			}
			n.SetLinks(func(from, to *Host) bool { return false })
			if got := send(); got != 0 {
				t.Errorf("%d packets arrived over a closed link", got)
			}
			if sent := n.Host(1).Sent(); sent.Packets != 2000 || sent.PacketBytes != 2000 {
				t.Errorf("counted %+v", sent)
			}
		})
	}
}

// packets opens port 7946 of a host until the end of the test.
func packets(t *testing.T, h *Host) net.PacketConn {
	p, err := h.ListenPacket(h.Addr().String() + ":7946")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}
