//go:build !portable && !cuda

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Four ranks train a model with more replicated state than the memory limit, and the losses are those of the same ranks
// without sharding and without a limit. The limit is the state itself, 16 bytes a parameter: of the data of each process
// (ulimit -d), and of all processes together (a control group) if this user can make one; in the short form, one of the
// two. For the first the model is larger: the Go runtime of a process reserves data for later.
func TestStateBeyondTheMemoryLimit(t *testing.T) {
	const few, many = 8, 28 // layers
	dir := controlGroup(t, ranksOfState*stateOf(few))
	if dir != "" {
		testMemoryLimit(t, few, "echo $$ >"+dir+"/cgroup.procs")
	}
	if dir == "" || !testing.Short() {
		testMemoryLimit(t, many, fmt.Sprintf("ulimit -s 1024 && ulimit -d %d", stateOf(many)>>10))
	}
}

const ranksOfState = 4

// stateOf returns the bytes of the weights, gradients and moments of a model of that many layers.
func stateOf(layers int) int64 {
	return 16 * int64(layers*(4*256*256+3*256*688+2*256)+2*256*256+256)
}

func testMemoryLimit(t *testing.T, layers int, limit string) {
	t.Helper()
	config := write(t, t.TempDir(), "train.yaml", fmt.Sprintf(`
model: {vocab_size: 256, hidden_size: 256, intermediate_size: 688, num_hidden_layers: %d, num_attention_heads: 8}
data: {path: %s, seq_len: 64}
train: {steps: 2, deterministic: true}
optimizer: {grad_clip: 0} # the norm's order of sums differs
memory: {recompute: none}
`, layers, gettysburg(t)))
	// run trains under a limit that a line of shell sets, and returns the losses.
	run := func(limit, shard string) (losses []string, said string, err error) {
		dir := filepath.Join(t.TempDir(), "run")
		c := process(t, "--device", "cpu", "--quiet", "--nproc", strconv.Itoa(ranksOfState), "--run-dir", dir,
			"--set", "memory.shard="+shard, config)
		within(c, limit)
		c.Env = append(c.Env, "GOMAXPROCS=2", "GOGC=") // each thread takes memory; Go's default
		out, err := c.CombinedOutput()
		if err == nil {
			for _, m := range metricsOf(t, dir) {
				losses = append(losses, string(m["loss"]))
			}
		}
		return losses, string(out), err
	}
	want, said, err := run("true", "none")
	if err != nil || len(want) != 2 {
		t.Fatalf("without a limit: %v, losses %v\n%s", err, want, said)
	}
	if _, said, err := run(limit, "none"); err == nil { // else the run is refused, or dies anywhere
		t.Errorf("limit %s: replicated state fits\n%s", limit, said)
	}
	got, said, err := run(limit, "parameters")
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("limit %s: %v, losses %v, want %v\n%s", limit, err, got, want, said)
	}
}

// controlGroup returns the directory of a new control group with a limit of memory; "" if this user cannot make one.
// Version 2 limits only groups beside this process's own.
func controlGroup(t *testing.T, limit int64) string {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(own)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		name := fmt.Sprintf("cprun-test-%d", os.Getpid())
		dir, file := filepath.Join("/sys/fs/cgroup", filepath.Dir(part[2]), name), "memory.max"
		switch part[1] {
		case "memory":
			dir, file = filepath.Join("/sys/fs/cgroup/memory", part[2], name), "memory.limit_in_bytes"
		case "":
		default:
			continue
		}
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		set := fmt.Sprintf("cd %s && test -f %s && echo %d >%[2]s && echo $$ >cgroup.procs", dir, file, limit)
		if exec.Command("sh", "-c", set).Run() == nil {
			return dir
		}
	}
	t.Log("this user cannot make a control group that limits memory")
	return ""
}
