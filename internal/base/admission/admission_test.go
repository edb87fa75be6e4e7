package admission

import (
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// A from is a connection from an address. It records its end.
type from struct {
	net.Conn
	addr  string
	ended bool
}

func (f *from) Close() error         { f.ended = true; return nil }
func (f *from) RemoteAddr() net.Addr { return f }
func (f *from) Network() string      { return "tcp" }
func (f *from) String() string       { return f.addr }

// TestStrangersMakeRoom fills all places. The oldest connection of the same source ends first, then the oldest of all.
// The newest stays.
func TestStrangersMakeRoom(t *testing.T) {
	const most, each = 128, 32
	d := New(Limits{Most: most, Each: each})
	var all []*from
	come := func(addr string) *from {
		f := &from{addr: addr}
		all = append(all, f)
		if !d.Enter(f) {
			t.Errorf("%s found no place", addr)
		}
		return f
	}
	ended := func() (ends []string) {
		for _, f := range all {
			if f.ended {
				ends = append(ends, f.addr)
			}
		}
		return ends
	}
	honest := come("10.0.0.2:1")
	for i := range each + 3 {
		come(fmt.Sprintf("10.0.0.1:%d", i))
	}
	for i := range each + 1 { // many addresses of one IPv6 network
		come(fmt.Sprintf("[2001:db8::%x]:7", i+1))
	}
	if got := fmt.Sprint(ended()); got != "[10.0.0.1:0 10.0.0.1:1 10.0.0.1:2 [2001:db8::1]:7]" {
		t.Errorf("%v had to go", got)
	}
	if !d.Leave(honest) || d.Leave(honest) || d.Leave(all[1]) {
		t.Error("who has left, or had to go, has a place")
	}
	for i := range most - 2*each + 1 {
		come(fmt.Sprintf("10.1.0.%d:1", i))
	}
	if last := ended(); len(last) != 5 || honest.ended || all[4].ended == all[5].ended {
		t.Errorf("%v had to go, want the oldest that is left besides", last)
	}
}

// TestStay checks that a connection without a free place waits until one leaves, or until the oldest has used up Stay.
func TestStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const stay = time.Second
		d := New(Limits{Most: 2, Stay: stay})
		a, b, c, e := &from{}, &from{}, &from{}, &from{}
		start := time.Now()
		d.Enter(a)
		d.Enter(b)
		go func() {
			time.Sleep(stay / 4)
			d.Leave(a)
		}()
		if d.Enter(c); time.Since(start) != stay/4 || a.ended || b.ended {
			t.Errorf("a place that was left was taken after %v", time.Since(start))
		}
		if d.Enter(e); time.Since(start) != stay || !b.ended || c.ended {
			t.Errorf("that of the oldest was taken after %v", time.Since(start))
		}
		go d.Close()
		late := &from{}
		entered := d.Enter(late)
		synctest.Wait() // Close may still be ending c and e
		if entered || !late.ended || !c.ended || !e.ended {
			t.Error("a door that is closed has connections")
		}
	})
}

// A failing listener returns an error from Accept, as without free file descriptors.
type failing struct{ net.Listener }

func (failing) Accept() (net.Conn, error) { return nil, fmt.Errorf("no descriptors") }

// TestServeGoesOn checks that Serve retries a failing listener, with pauses, until the door is closed.
func TestServeGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, n := New(Limits{Most: 1}), 0
		time.AfterFunc(10*acceptPause+acceptPause/2, d.Close)
		d.Serve(failing{}, nil, func(error) { n++ })
		if n != 10 {
			t.Errorf("%d failures, want 10", n)
		}
	})
}

// TestLog checks that Log prints the first lines and counts the others.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines []string
		l := NewLog(func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) })
		for i := range 100 {
			l.Printf("line %d", i)
		}
		if len(lines) != freeLines {
			t.Errorf("%d lines, want %d", len(lines), freeLines)
		}
		time.Sleep(2 * linePause)
		l.Printf("another")
		if end := lines[freeLines:]; len(end) != 2 ||
			end[0] != fmt.Sprintf("%d more lines were left out", 100-freeLines) ||
			end[1] != "another" {
			t.Errorf("after a pause: %q", end)
		}
	})
}
