package gossip

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = []byte("a key of thirty-two bytes, or so")

// config returns the config of an agent at a free loopback port.
func config(t testing.TB, name string, seeds ...string) Config {
	return at(t, "127.0.0.1:0", name, seeds...)
}

// at returns the config of an agent at an address.
func at(t testing.TB, addr, name string, seeds ...string) Config {
	t.Helper()
	port, err := Bind(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(port.Shutdown(), port.Close()); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return Config{
		Job:       "job",
		Key:       key,
		Seeds:     seeds,
		Self:      Peer{Name: name, Control: "127.0.0.1:4000"},
		Transport: port,
	}
}

// join returns a member that leaves at the end of the test.
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

// names returns the agents known to m.
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
	if want := (Peer{"n5", "127.0.0.1:4000"}); got != want {
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

// TestSeedsAreAskedUntilTheyAnswer checks that an agent may start long before its seed.
func TestSeedsAreAskedUntilTheyAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	seed := l.Addr().String()
	l.Close()
	early := join(t, config(t, "early", seed, "no-such-host.invalid:1"))
	time.Sleep(2 * seekPause)
	late := join(t, at(t, seed, "late", seed)) // its own address is among its seeds
	await(t, early, "early", "late")
	await(t, late, "early", "late")
}

func TestJobsDoNotMeet(t *testing.T) {
	first := join(t, config(t, "n0"))
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
}

// TestStreamsThatAreNotGossipReachTheListener checks that one port carries gossip and other streams.
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
		conn, err := net.Dial("tcp", m.Addr()) // the listener still accepts
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
	for want, change := range map[string]func(*Config){
		"it needs 16":                func(c *Config) { c.Key = c.Key[:15] },
		`the seed "node03:x" is not`: func(c *Config) { c.Seeds = []string{"node03:x"} },
		`the seed "node03" is not`:   func(c *Config) { c.Seeds = []string{"node03"} },
		"give at most 64":            func(c *Config) { c.Seeds = make([]string, 65) },
		`agent name ""`:              func(c *Config) { c.Self.Name = "" },
		"it must be host:port":       func(c *Config) { c.Self.Control = "node03" },
		`"\x1b[2J:1"`:                func(c *Config) { c.Self.Control = "\x1b[2J:1" },
		`hhhh`:                       func(c *Config) { c.Self.Control = strings.Repeat("h", 512) + ":1" },
		"its port must be":           func(c *Config) { c.Self.Control = "node03:0" },
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

func TestBindRefuses(t *testing.T) {
	busy, err := Bind("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	defer busy.Shutdown()
	for want, addr := range map[string]string{
		"cannot reach 0.0.0.0":             "0.0.0.0:0",
		"cannot reach fe80::1%lo":          "[fe80::1%lo]:0",
		`cannot listen at "node03:0"`:      "node03:0",
		"choose another":                   busy.Addr().String(),
		"bind: cannot assign requested ad": "192.0.2.1:0",
	} {
		p, err := Bind(addr)
		if err == nil {
			p.Shutdown()
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

// TestTwoOfOneName checks that a second agent with the same name does not replace the first.
func TestTwoOfOneName(t *testing.T) {
	first := join(t, config(t, "n0"))
	await(t, join(t, config(t, "n1", first.Addr())), "n0", "n1")
	await(t, first, "n0", "n1")
	c := config(t, "n1", first.Addr())
	c.Self.Control = "127.0.0.1:4001"
	await(t, join(t, c), "n0", "n1") // by then it has announced itself to the first
	await(t, first, "n0", "n1")
	if got := first.Peers()[1]; got.Control != "127.0.0.1:4000" {
		t.Errorf("the first is known as %+v", got)
	}
}
