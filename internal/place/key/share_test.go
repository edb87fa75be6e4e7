package key

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/place"
)

// pair is an even port of this host that is free together with the next one.
func pair(t *testing.T) int {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		next, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+1))
		l.Close()
		if err == nil {
			next.Close()
			return port
		}
	}
	t.Fatal("no two ports are free")
	return 0
}

func TestShare(t *testing.T) {
	r := newRealm()
	s := Source{Munge: r.me()}
	p := place.Place{Source: place.Slurm, Job: "slurm:7.0:0", Rendezvous: fmt.Sprintf("127.0.0.1:%d", pair(t)), LocalAgents: 1, MaxAgents: 2}
	first, server, err := s.Share(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Share(t.Context(), p); err == nil || !strings.Contains(err.Error(), "--resv-ports") {
		t.Errorf("two agents are the first: %v", err)
	}
	p.Rank = 1
	if second, _, err := s.Share(t.Context(), p); err != nil || second != first {
		t.Errorf("another key, %v", err)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}

	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if k, closer, err := (Source{File: path}).Share(t.Context(), p); err != nil || k == first || closer.Close() != nil {
		t.Errorf("the file was not read: %v", err)
	}
	p.Source = place.ByFlags
	if _, _, err := s.Share(t.Context(), p); err == nil || !strings.Contains(err.Error(), "CPRUN_KEY_FILE") {
		t.Error(err)
	}
	t.Setenv("PATH", t.TempDir())
	p.Source = place.Slurm
	if _, _, err := (Source{}).Share(t.Context(), p); err == nil || !strings.Contains(err.Error(), "munge is not on this node") {
		t.Error(err)
	}
}

// Agents of one host get the key through the kernel, whoever has started them.
func TestShareOnOneHost(t *testing.T) {
	p := place.Place{Source: place.Torchrun, Job: "torchrun:" + rand.Text(), Rank: 1, LocalAgents: 3, MaxAgents: 3}
	later := make(chan Key)
	go func() { // begins before there is a first agent
		k, _, err := Source{}.Share(t.Context(), p)
		if err != nil {
			t.Error(err)
		}
		later <- k
	}()
	q := p
	q.Rank = 0
	first, server, err := Source{Refused: func(err error) { t.Error(err) }}.Share(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	if second, _, err := (Source{}).Share(t.Context(), p); err != nil || second != first {
		t.Errorf("another key, %v", err)
	}
	if third := <-later; third != first {
		t.Error("another key for one that came early")
	}
	if _, _, err := (Source{}).Share(t.Context(), q); err == nil || !strings.Contains(err.Error(), p.Job) {
		t.Errorf("two agents are the first: %v", err)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if _, _, err := (Source{Patience: time.Millisecond}).Share(t.Context(), p); err == nil || !strings.Contains(err.Error(), "CPRUN_KEY_FILE") {
		t.Errorf("nobody serves: %v", err)
	}
}

func TestLocal(t *testing.T) {
	for address, want := range map[string]string{
		"node01:20001": ":20001", "10.0.0.1:20001": ":20001", "127.0.0.1:20001": "127.0.0.1:20001", "localhost:1": "localhost:1", "[::1]:1": "[::1]:1",
	} {
		if got := local(address); got != want {
			t.Errorf("local(%q) = %q, want %q", address, got, want)
		}
	}
}
