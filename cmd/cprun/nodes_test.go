package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// agents starts one launcher for each list of flags, as nodes of one job on this host, and returns their
// exit statuses and what they have said.
func agents(t *testing.T, flags ...[]string) (codes []int, said []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	meet := l.Addr().String() // a free one, which is soon taken again
	l.Close()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("0123456789abcdef", 4)), 0o600); err != nil {
		t.Fatal(err)
	}
	var all []*started
	for rank, f := range flags {
		args := append([]string{"--nnodes", fmt.Sprint(len(flags)), "--node-rank", fmt.Sprint(rank), "--rendezvous", meet}, f...)
		s := &started{Cmd: process(t, args...), t: t}
		s.Stderr, s.Env = &s.stderr, append(s.Env, "CPRUN_KEY_FILE="+key)
		if err := s.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Process.Kill() })
		all = append(all, s)
	}
	for _, s := range all {
		codes, said = append(codes, s.wait()), append(said, s.said())
	}
	return codes, said
}

// Nodes of different sizes train as one node with as many processes does, bit for bit.
func TestNodesTrainAsOne(t *testing.T) {
	config, dir, one := small(t, 6), filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "one")
	codes, said := agents(t, []string{"--nproc", "1", "--run-dir", dir, config}, []string{"--nproc", "2", "--run-dir", dir, config})
	if codes[0] != 0 || codes[1] != 0 {
		t.Fatalf("statuses %v\n%s\n%s", codes, said[0], said[1])
	}
	must(t, "--nproc", "3", "--run-dir", one, config)
	if got, want := curve(metricsOf(t, dir)), curve(metricsOf(t, one)); got != want {
		t.Errorf("two nodes:\n%sone:\n%s", got, want)
	}
	for rank := range 3 {
		if _, err := os.Stat(filepath.Join(dir, "logs", fmt.Sprintf("rank-%04d.log", rank))); err != nil {
			t.Error(err)
		}
	}
	if strings.Contains(said[1], "step ") {
		t.Errorf("the second node shows steps, too:\n%s", said[1])
	}
}

// What one node finds wrong with the run ends all, and each says it once.
func TestNodesRefuseTogether(t *testing.T) {
	config := small(t, 6)
	full := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(full, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--nproc", "1", "--run-dir", filepath.Join(full, "run"), config}
	codes, said := agents(t, flags, flags)
	for i, code := range codes {
		if code != 2 || strings.Count(said[i], "not a directory") != 1 {
			t.Errorf("node %d: status %d, want 2\n%s", i, code, said[i])
		}
	}
}
