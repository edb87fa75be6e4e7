package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// agents starts a launcher for each list of flags, as nodes of one job on this host. It returns their exit statuses and
// output.
func agents(t *testing.T, flags ...[]string) (codes []int, said []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	meet := l.Addr().String() // a free port, soon in use again
	l.Close()
	var all []*started
	for rank, f := range flags {
		args := append([]string{"--nnodes", fmt.Sprint(len(flags)), "--node-rank", fmt.Sprint(rank), "--rendezvous",
			meet}, f...)
		s := &started{Cmd: process(t, args...), t: t}
		s.Stderr, s.Dir = &s.stderr, t.TempDir()
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

// Nodes of different sizes train like one node with the same number of processes, bit for bit.
func TestNodesTrainAsOne(t *testing.T) {
	config, dir, one := small(t, 6), filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "one")
	codes, said := agents(t, []string{"--nproc", "1", "--run-dir", dir, config},
		[]string{"--nproc", "2", "--run-dir", dir, config})
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
	if st, err := os.Stat(filepath.Join(dir, ".key")); err != nil || st.Mode() != 0o600 {
		t.Errorf("the key: %v, %v", st, err)
	}
	if strings.Contains(said[1], "step ") {
		t.Errorf("the second node shows steps, too:\n%s", said[1])
	}
}

// A fault found by one node ends all, and each prints it once.
func TestNodesRefuseTogether(t *testing.T) {
	config := small(t, 6)
	full := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(full, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CPRUN_KEY_FILE", privateKey(t))
	flags := []string{"--nproc", "1", "--run-dir", filepath.Join(full, "run"), config}
	codes, said := agents(t, flags, flags)
	for i, code := range codes {
		if code != 2 || strings.Count(said[i], "not a directory") != 1 {
			t.Errorf("node %d: status %d, want 2\n%s", i, code, said[i])
		}
	}
}

// Nodes that do not share the run directory end with status 2 and the fix.
func TestNodesWithoutASharedDirectory(t *testing.T) {
	t.Setenv("CPRUN_KEY_FILE", privateKey(t))
	flags := []string{"--nproc", "1", "--max-restarts", "3", "--run-dir", "/proc/self/cwd/run", small(t, 600)}
	codes, said := agents(t, flags, flags)
	for i, code := range codes {
		if code != 2 || strings.Count(said[i], "name a --run-dir on a file system that all nodes share") != 1 {
			t.Errorf("node %d: status %d, want 2\n%s", i, code, said[i])
		}
	}
}

// privateKey writes a file for CPRUN_KEY_FILE.
func privateKey(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(strings.Repeat("0123456789abcdef", 4)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Nodes without a place for the key, or with an invalid key file, end with status 2, the path and the fix before
// anything runs.
func TestNodesWithoutKey(t *testing.T) {
	config, dir := small(t, 6), t.TempDir()
	wrong := filepath.Join(dir, ".key")
	if err := errors.Join(os.WriteFile(wrong, []byte("garbage\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "open"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env   string
		flags []string
		want  []string
	}{
		"no directory": {flags: []string{config}, want: []string{"--run-dir", "CPRUN_KEY_FILE"}},
		"a garbage key": {flags: []string{"--run-dir", dir, config},
			want: []string{wrong, "8 bytes", "CPRUN_KEY_FILE"}},
		"an open file": {env: filepath.Join(dir, "open"), flags: []string{"--run-dir", dir, config},
			want: []string{filepath.Join(dir, "open"), "0644"}},
		"a file that is not there": {env: filepath.Join(dir, "none"), flags: []string{config},
			want: []string{filepath.Join(dir, "none"), "openssl rand"}},
	} {
		t.Setenv("CPRUN_KEY_FILE", c.env)
		codes, said := agents(t, c.flags, c.flags)
		for i, code := range codes {
			if code != 2 || strings.Contains(said[i], "run directory ") {
				t.Errorf("%s, node %d: status %d, want 2\n%s", name, i, code, said[i])
			}
			for _, w := range c.want {
				if strings.Count(said[i], w) < 1 {
					t.Errorf("%s, node %d does not name %s\n%s", name, i, w, said[i])
				}
			}
		}
	}
}

// Tasks of another launcher need no flag: the key file is in runs, with the name of the job.
func TestTasksWithoutRunDir(t *testing.T) {
	config := small(t, 2)
	for name, env := range map[string]string{
		".job-7.key": "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 " +
			"SLURM_STEP_NODELIST=here SLURMD_NODENAME=here" +
			" SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 SLURM_PROCID=%d SLURM_LOCALID=%[1]d",
		".job-*.key": "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prte-1@1 " +
			"OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_LOCAL_RANK=%[1]d",
	} {
		dir := t.TempDir()
		var all []*started
		for rank := range 2 {
			s := &started{Cmd: process(t, "--device", "cpu", config), t: t}
			s.Stderr, s.Dir, s.Env = &s.stderr, dir, append(s.Env, strings.Fields(fmt.Sprintf(env, rank))...)
			if err := s.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Process.Kill() })
			all = append(all, s)
		}
		for rank, s := range all {
			if code := s.wait(); code != 0 {
				t.Errorf("%s, rank %d: status %d\n%s", name, rank, code, s.said())
			}
		}
		keys, _ := filepath.Glob(filepath.Join(dir, "runs", ".*"))
		if match, _ := filepath.Match(name, filepath.Base(strings.Join(keys, " "))); !match || len(keys) != 1 {
			t.Errorf("keys %q, want %s", keys, name)
		}
	}
}

// An operator states the processes of a job of one node too.
func TestProcessesOfOneNode(t *testing.T) {
	t.Setenv("PET_NPROC_PER_NODE", "2")
	dir := t.TempDir()
	must(t, "--run-dir", dir, small(t, 1))
	if logs, err := filepath.Glob(filepath.Join(dir, "logs", "rank-*.log")); err != nil || len(logs) != 2 {
		t.Errorf("logs %v, %v: want 2", logs, err)
	}
}
