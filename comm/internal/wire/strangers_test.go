package wire

import (
	"fmt"
	"net"
	"testing"
)

// from is a connection from an address; it notes its end.
type from struct {
	net.Conn
	addr  string
	ended bool
}

func (f *from) Close() error         { f.ended = true; return nil }
func (f *from) RemoteAddr() net.Addr { return f }
func (f *from) Network() string      { return "tcp" }
func (f *from) String() string       { return f.addr }

// TestStrangersMakeRoom fills the room for strangers: the oldest of the same source goes first, then
// the oldest of all, and the one that has just come stays.
func TestStrangersMakeRoom(t *testing.T) {
	var s strangers
	var all []*from
	come := func(addr string) *from {
		f := &from{addr: addr}
		all = append(all, f)
		s.admit(f)
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
	for i := range strangersOf + 3 {
		come(fmt.Sprintf("10.0.0.1:%d", i))
	}
	for i := range strangersOf + 1 { // many addresses of one network of IPv6
		come(fmt.Sprintf("[2001:db8::%x]:7", i+1))
	}
	if got := fmt.Sprint(ended()); got != "[10.0.0.1:0 10.0.0.1:1 10.0.0.1:2 [2001:db8::1]:7]" {
		t.Errorf("%v had to go", got)
	}
	s.forget(honest) // it has proved itself, and is no stranger any more
	for i := range maxStrangers - 2*strangersOf + 1 {
		come(fmt.Sprintf("10.1.0.%d:1", i))
	}
	if last := ended(); len(last) != 5 || honest.ended || all[4].ended == all[5].ended {
		t.Errorf("%v had to go, want the oldest that is left besides", last)
	}
}

// TestSeldom logs the first lines of many and counts the rest.
func TestSeldom(t *testing.T) {
	var lines []string
	s := seldom{log: func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }}
	for i := range 100 {
		s.say("line %d", i)
	}
	if len(lines) != freeLines {
		t.Errorf("%d lines, want %d", len(lines), freeLines)
	}
	s.since = s.since.Add(-2 * linePause)
	s.say("another")
	if end := lines[freeLines:]; len(end) != 2 || end[0] != fmt.Sprintf("%d more lines like the last", 100-freeLines) || end[1] != "another" {
		t.Errorf("after a pause: %q", end)
	}
}
