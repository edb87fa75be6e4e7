//go:build cluster

package lan

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// ping reports whether one host gets an answer from another, and after how long.
func ping(t *testing.T, from, to *Host) (bool, string) {
	t.Helper()
	cmd := exec.Command(
		"bash",
		"-c",
		"echo hello >/dev/udp/"+to.Addr.String()+"/9; exec 3<>/dev/tcp/"+to.Addr.String()+"/7777",
	)
	var out strings.Builder
	cmd.Stderr = &out
	if err := from.Start(cmd); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- cmd.Wait() }()
	select {
	case <-over:
		return strings.Contains(out.String(), "refused"), out.String() // the answer of a host without a listener
	case <-time.After(1500 * time.Millisecond):
		cmd.Process.Kill()
		<-over
		return false, "no answer"
	}
}

func TestHostsReachEachOther(t *testing.T) {
	s := New(netip.MustParsePrefix("10.77.0.0/24"))
	defer s.Close()
	a, err := s.Host("node01")
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Host("node02")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("hostname")
	var name strings.Builder
	cmd.Stdout = &name
	if err := b.Start(cmd); err != nil || cmd.Wait() != nil || strings.TrimSpace(name.String()) != "node02" {
		t.Errorf("host %q, %v", name.String(), err)
	}
	for _, step := range []struct {
		name string
		do   func()
		want bool
	}{
		{"as they are", func() {}, true},
		{"cut", func() { s.Around(b, Path{Cut: true}) }, false},
		{"one way", func() { s.Around(b, Path{}); s.Set(b, a, Path{Cut: true}) }, false},
		{"late", func() { s.Around(b, Path{Delay: 100 * time.Millisecond}) }, true},
		{"whole", func() { s.Around(b, Path{}) }, true},
	} {
		step.do()
		if got, said := ping(t, a, b); got != step.want {
			t.Errorf("%s: answered %t, want %t: %s", step.name, got, step.want, said)
		}
	}
}
