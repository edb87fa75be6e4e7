package gossip

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = []byte("a key of thirty-two bytes, or so")

// logUntilEnd is t.Logf until the test has ended: a packet that memberlist sends while it is closed is told of afterwards.
func logUntilEnd(t testing.TB) func(format string, args ...any) {
	var mu sync.Mutex
	ended := false
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		ended = true
	})
	return func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			t.Logf(format, args...)
		}
	}
}

// config is that of an agent on the loopback.
func config(t testing.TB, name string, seeds ...string) Config {
	return Config{
		Job: "job", Key: key, Listen: "127.0.0.1", Seeds: seeds, Log: logUntilEnd(t),
		Self: Peer{Name: name, Host: "host-of-" + name, Control: "127.0.0.1:4000", NodeRank: -1, Identity: make([]byte, 32)},
	}
}

// join makes a member that leaves when the test ends.
func join(t testing.TB, c Config) *Members {
	t.Helper()
	m, err := Join(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("%s: %v", c.Self.Name, err)
		}
	})
	return m
}

// names are those of the agents that m knows of.
func names(m *Members) []string {
	var list []string
	for _, p := range m.Peers() {
		list = append(list, p.Name)
	}
	return list
}

// await waits until m knows exactly these agents.
func await(t testing.TB, m *Members, want ...string) {
	t.Helper()
	slices.Sort(want)
	for late := time.After(30 * time.Second); ; {
		got := names(m)
		if slices.Equal(got, want) {
			return
		}
		select {
		case <-m.Changed():
		case <-late:
			t.Fatalf("%s knows %q, not %q", m.self, got, want)
		}
	}
}

func TestAgentsFindEachOther(t *testing.T) {
	first := join(t, config(t, "n0"))
	all, list := []*Members{first}, []string{"n0"}
	for i := 1; i < 8; i++ {
		name := fmt.Sprintf("n%d", i)
		all, list = append(all, join(t, config(t, name, first.Addr()))), append(list, name)
	}
	for _, m := range all {
		await(t, m, list...)
	}
	got := all[3].Peers()[5]
	if want := config(t, "n5").Self; got.Host != want.Host || got.Control != want.Control || got.NodeRank != -1 || !slices.Equal(got.Identity, want.Identity) {
		t.Errorf("n3 knows n5 as %+v", got)
	}
	if err := all[2].Close(); err != nil {
		t.Error(err)
	}
	list = slices.Delete(list, 2, 3)
	for i, m := range all {
		if i != 2 {
			await(t, m, list...)
		}
	}
}

// An agent may come long before its seed does.
func TestSeedsAreAskedUntilTheyAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr)
	l.Close()
	early := join(t, config(t, "early", at.String(), "no-such-host.invalid:1"))
	time.Sleep(2 * seekPause)
	c := config(t, "late", at.String()) // itself among its seeds
	c.Port = at.Port
	late := join(t, c)
	await(t, early, "early", "late")
	await(t, late, "early", "late")
}

func TestJobsDoNotMeet(t *testing.T) {
	c := config(t, "n0")
	lines := make(chan string, 100)
	c.Log = func(f string, args ...any) { lines <- fmt.Sprintf(f, args...) }
	first := join(t, c)
	other, wrong := config(t, "other-job", first.Addr()), config(t, "other-key", first.Addr())
	other.Job = "another"
	wrong.Key = []byte("another key that is long enough")
	strangers := []*Members{join(t, other), join(t, wrong)}
	time.Sleep(4 * seekPause)
	await(t, join(t, config(t, "n1", first.Addr())), "n0", "n1")
	await(t, first, "n0", "n1")
	for _, s := range strangers {
		if len(s.Peers()) != 1 {
			t.Errorf("%s knows %q", s.self, names(s))
		}
	}
	if line := <-lines; !strings.Contains(line, "closed a stream from 127.0.0.1:") || !strings.Contains(line, "it is of another job, or has another key") {
		t.Errorf("the log says %q", line)
	}
}

// One port is enough for gossip and for what else agents say to each other.
func TestStreamsThatAreNotGossipReachTheListener(t *testing.T) {
	port, err := Bind("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := config(t, "n0")
	c.Transport = port
	m := join(t, c)
	if m.Addr() != port.Addr().String() {
		t.Errorf("gossip is at %s, the port at %s", m.Addr(), port.Addr())
	}
	for _, silent := range []bool{true, false} {
		conn, err := net.Dial("tcp", m.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if silent {
			continue
		}
		if _, err := conn.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
	}
	other, err := port.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	word := make([]byte, 5)
	if n, err := io.ReadFull(other, word); err != nil || string(word) != "hello" {
		t.Errorf("read %q, %v", word[:n], err)
	}
	await(t, join(t, config(t, "n1", m.Addr())), "n0", "n1")
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	conn, err := net.Dial("tcp", m.Addr()) // the listener stays
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := port.Close(); err != nil {
		t.Error(err)
	}
	if _, err := port.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
}

func TestJoinRefuses(t *testing.T) {
	busy := join(t, config(t, "n0"))
	for want, change := range map[string]func(*Config){
		"it needs 16":                    func(c *Config) { c.Key = c.Key[:15] },
		"others cannot reach 0.0.0.0":    func(c *Config) { c.Listen = "0.0.0.0" },
		"others cannot reach fe80::1%lo": func(c *Config) { c.Listen = "fe80::1%lo" },
		`cannot listen at "node03:0"`:    func(c *Config) { c.Listen = "node03" },
		"so choose another":              func(c *Config) { c.Port = int(busy.addr.Port()) },
		`the seed "node03:x" is not`:     func(c *Config) { c.Seeds = []string{"node03:x"} },
		`the seed "node03" is not`:       func(c *Config) { c.Seeds = []string{"node03"} },
		"give at most 64":                func(c *Config) { c.Seeds = make([]string, 65) },
		"an agent's name is":             func(c *Config) { c.Self.Name = "" },
		"cannot be printed":              func(c *Config) { c.Self.Host = "\x1b[2J" },
		"it must be host:port":           func(c *Config) { c.Self.Control = "node03" },
		"its port must be":               func(c *Config) { c.Self.Control = "node03:0" },
		"asks for node rank -2":          func(c *Config) { c.Self.NodeRank = -2 },
		"has 31 bytes":                   func(c *Config) { c.Self.Identity = make([]byte, 31) },
		"have 506 bytes together": func(c *Config) {
			c.Self.Host, c.Self.Control = strings.Repeat("h", 253), strings.Repeat("c", 248)+":4000"
		},
		"has 256 bytes; 255 is the most":   func(c *Config) { c.Self.Host = strings.Repeat("h", 256) },
		"bind: cannot assign requested ad": func(c *Config) { c.Listen = "192.0.2.1" },
	} {
		c := config(t, "n1")
		change(&c)
		m, err := Join(context.Background(), c)
		if err == nil {
			m.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

func TestTwoOfOneName(t *testing.T) {
	first := join(t, config(t, "n0"))
	lines := make(chan string, 100)
	c := config(t, "n1", first.Addr())
	await(t, join(t, c), "n0", "n1")
	await(t, first, "n0", "n1")
	c.Log = func(f string, args ...any) { lines <- fmt.Sprintf(f, args...) }
	second := join(t, c)
	for line := range lines {
		if strings.Contains(line, "two agents are called n1") {
			break
		}
	}
	await(t, first, "n0", "n1")
	_ = second
}
