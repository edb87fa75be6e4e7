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
func agents(t *testing.T, env string, flags ...[]string) (codes []int, said []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	meet := l.Addr().String() // a free port, soon in use again
	l.Close()
	var all []*started
	for rank, f := range flags {
		c := process(t, append([]string{"--nnodes", fmt.Sprint(len(flags)), "--node-rank", fmt.Sprint(rank), "--rendezvous",
			meet}, f...)...)
		c.Dir, c.Env = t.TempDir(), append(c.Env, env)
		all = append(all, launched(t, c))
	}
	for _, s := range all {
		codes, said = append(codes, s.wait()), append(said, s.said())
	}
	return codes, said
}

// Nodes of different sizes train like one node with the same number of processes, bit for bit.
func TestNodesTrainAsOne(t *testing.T) {
	t.Parallel()
	config, dir := small(t, 6), filepath.Join(t.TempDir(), "run")
	codes, said := agents(t, "", []string{"--nproc", "1", "--run-dir", dir, config},
		[]string{"--nproc", "2", "--run-dir", dir, config})
	if codes[0] != 0 || codes[1] != 0 {
		t.Fatalf("statuses %v\n%s\n%s", codes, said[0], said[1])
	}
	one, _ := trains(t, "--nproc", "3", config)
	alike(t, "two nodes", dir, one)
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
	// Each node writes the status of its ranks into the shared run directory.
	for node, want := range []string{`"node_rank":0,"first_rank":0,"ranks":1,"world_size":3,`,
		`"node_rank":1,"first_rank":1,"ranks":2,"world_size":3,`} {
		contains(t, "the status", content(t, dir, "logs", fmt.Sprintf("status-%04d.json", node)), want,
			`"state":"ended","exit_code":0`)
	}
	if out, _ := must(t, "top", dir); !strings.HasPrefix(out, "run  done ") || !strings.Contains(out, "nodes   2: ") {
		t.Errorf("\n%s", out)
	}
}

// refuseTogether fails unless two nodes with the same flags end with status 2, and each prints a text once.
func refuseTogether(t *testing.T, keyFile string, flags []string, want string) {
	t.Helper()
	codes, said := agents(t, "CPRUN_KEY_FILE="+keyFile, flags, flags)
	for i, code := range codes {
		if code != 2 || strings.Count(said[i], want) != 1 {
			t.Errorf("node %d: status %d, want 2, and once %q\n%s", i, code, want, said[i])
		}
	}
}

// A fault found by one node ends all, and each prints it once.
func TestNodesRefuseTogether(t *testing.T) {
	t.Parallel()
	full := write(t, t.TempDir(), "file", "")
	flags := []string{"--nproc", "1", "--run-dir", filepath.Join(full, "run"), small(t, 6)}
	refuseTogether(t, privateKey(t), flags, "not a directory")
}

// Nodes that do not share the run directory end with status 2 and the fix.
func TestNodesWithoutASharedDirectory(t *testing.T) {
	t.Parallel()
	refuseTogether(t, privateKey(t), []string{"--nproc", "1", "--max-restarts", "3", "--run-dir", "/proc/self/cwd/run",
		small(t, 600)}, "name a --run-dir on a file system that all nodes share")
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
	t.Parallel()
	config, dir := small(t, 6), t.TempDir()
	wrong, open, none := filepath.Join(dir, ".key"), filepath.Join(dir, "open"), filepath.Join(dir, "none")
	if err := errors.Join(os.WriteFile(wrong, []byte("garbage\n"), 0o600), os.WriteFile(open, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		keyFile string
		flags   []string
		want    []string
	}{
		{"", []string{config}, []string{"--run-dir", "CPRUN_KEY_FILE"}},
		{"", []string{"--run-dir", dir, config}, []string{wrong, "8 bytes", "CPRUN_KEY_FILE"}},
		{open, []string{"--run-dir", dir, config}, []string{open, "0644"}},
		{none, []string{config}, []string{none, "openssl rand"}},
	} {
		codes, said := agents(t, "CPRUN_KEY_FILE="+c.keyFile, c.flags, c.flags)
		for i, code := range codes {
			if code != 2 || strings.Contains(said[i], "run directory ") {
				t.Errorf("%q, node %d: status %d, want 2\n%s", c.want, i, code, said[i])
			}
			contains(t, fmt.Sprintf("node %d", i), said[i], c.want...)
		}
	}
}

// Tasks of another launcher need no flag: the key file is in runs, with the name of the job.
func TestTasksWithoutRunDir(t *testing.T) {
	t.Parallel()
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
			c := process(t, "--device", "cpu", config)
			c.Dir, c.Env = dir, append(c.Env, strings.Fields(fmt.Sprintf(env, rank))...)
			all = append(all, launched(t, c))
		}
		for _, s := range all {
			s.ends(0)
		}
		keys, _ := filepath.Glob(filepath.Join(dir, "runs", ".*"))
		if match, _ := filepath.Match(name, filepath.Base(strings.Join(keys, " "))); !match || len(keys) != 1 {
			t.Errorf("keys %q, want %s", keys, name)
		}
	}
}

// An operator states the processes of a job of one node too.
func TestProcessesOfOneNode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if code, _, stderr := with(t, []string{"PET_NPROC_PER_NODE=2"}, "--run-dir", dir, small(t, 1)); code != 0 {
		t.Errorf("exit status %d\n%s", code, stderr)
	}
	if logs, err := filepath.Glob(filepath.Join(dir, "logs", "rank-*.log")); err != nil || len(logs) != 2 {
		t.Errorf("logs %v, %v: want 2", logs, err)
	}
}
