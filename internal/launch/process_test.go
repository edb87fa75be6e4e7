package launch

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestAllDone(t *testing.T) {
	t.Parallel()
	r := play(t, "done", 3)
	if r.ExitCode != ExitDone || r.First != nil || r.Err != nil || r.stderr != "" {
		t.Errorf("%+v, stderr %q", r.Result, r.stderr)
	}
	slices.Sort(r.events)
	want := strings.Split("0 done 0,0 pid 0,0 ready 0,1 done 0,1 pid 0,1 ready 0,2 done 0,2 pid 0,2 ready 0", ",")
	if !slices.Equal(r.events, want) {
		t.Errorf("events %q", r.events)
	}
}

// TestLastRankHangs checks that the launcher ends and names a rank that hangs when the other is done: no peer waits for
// it.
func TestLastRankHangs(t *testing.T) {
	t.Parallel()
	r := play(t, "last", 2, func(j *Job) { j.times.last = 200 * time.Millisecond })
	if r.ExitCode != ExitFailed || r.First == nil || r.First.Rank != 1 || !strings.Contains(r.First.Cause, "200ms") ||
		r.First.Remote {
		t.Errorf("%+v", r.First)
	}
}

func TestFailures(t *testing.T) {
	for _, c := range []struct {
		scenario string
		n        int
		rank     int
		cause    string
		phase    string
		end      bool
	}{
		{"kill2", 4, 2, "killed by SIGKILL (not by cprun: likely the kernel's out-of-memory killer, or a user)",
			"", true},
		{"late-kill", 4, 2, "killed by SIGKILL (not by cprun: likely the kernel's out-of-memory killer, or a user)",
			"", true},
		{"meeting", 4, 1, "killed by SIGKILL", "", true}, // the others wait for the launcher's message
		{"sigsys", 2, 1, "SIGSYS: bad system call", "", false},
		{"own-late", 3, 1, "corpus.bin: short read\nat byte 12", "backward", true},
		{"stubborn", 3, 0, "wrong shape", "backward", false},
		{"early", 2, 1, "exit status 0 before its work was done", "", false},
		{"exit3", 2, 1, "exit status 3", "", false},
		{"panic", 2, 1, "panic: runtime error: invalid memory address or nil pointer dereference", "", false},
		{"garbage", 2, 1, "channel to the launcher: event frame:", "", false},
		{"linger", 2, 1, "did not exit after it was done", "", false},
		{"late-done", 2, 1, "exit status 5", "", true},
		{"big", 1, 0, "eeeeee", "", true},
		{"no-reason", 1, 0, "no reason given", "backward", true},
	} {
		t.Run(c.scenario, func(t *testing.T) {
			t.Parallel()
			r := play(t, c.scenario, c.n, func(j *Job) {
				if c.end {
					j.times.settle = time.Minute // not reached: all ranks end by themselves
				}
			})
			if r.ExitCode != ExitFailed || r.First == nil {
				t.Fatalf("%+v", r.Result)
			}
			f := r.First
			if f.Rank != c.rank || !strings.HasPrefix(f.Cause, c.cause) || f.Phase != c.phase || f.Remote ||
				f.PID == 0 {
				t.Errorf("first failure %+v", f)
			}
			if !strings.HasSuffix(r.stderr, f.Report()) || !strings.Contains(f.Report(), f.Log) {
				t.Errorf("stderr ends %q, want %q", r.stderr, f.Report())
			}
		})
	}
}

// TestAStoppedRankIsKilled checks that a stopped rank is killed without a grace period, since it cannot end by itself.
func TestAStoppedRankIsKilled(t *testing.T) {
	t.Parallel()
	r := play(t, "stopped", 3, func(j *Job) { j.times.settle = time.Hour })
	if r.ExitCode != ExitFailed || r.First == nil || !strings.Contains(r.First.Cause, "rank 1 stands still") {
		t.Errorf("%+v", r.Result)
	}
}

// TestTheStateOfAKilledRankIsKept checks that the report knows how a rank was before the launcher killed it.
func TestTheStateOfAKilledRankIsKept(t *testing.T) {
	for scenario, want := range map[string]string{"stopped-later": stateStopped, "mute": stateSilent} {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			r := play(t, scenario, 2, func(j *Job) {
				if j.times.grace = time.Second; scenario == "mute" {
					j.times.grace = time.Hour // not reached
				}
			})
			if n := len(r.Failures); n != 2 || r.Failures[1].Rank != 1 || r.Failures[1].WaitState.State != want {
				t.Errorf("%+v", r.Failures)
			}
		})
	}
}

func TestFailureBlock(t *testing.T) {
	t.Parallel()
	r := play(t, "exit3", 3)
	for _, want := range []string{
		"cprun: ended because of it: ranks 0, 2\n", "[rank 1] so long\n", "cprun: rank 1 failed on host ",
		"): exit status 3\n", "  log:   " + filepath.Join(r.logs, "rank-0001.log"), "  hint:  ",
	} {
		if !strings.Contains(r.stderr, want) {
			t.Errorf("%q is not in %q", want, r.stderr)
		}
	}
}

func TestWhatAWorkerStartedEndsWithIt(t *testing.T) {
	t.Parallel()
	if r := play(t, "grandchild", 1); r.ExitCode != ExitDone || len(r.pids) != 2 {
		t.Errorf("%+v, processes %v", r.Result, r.pids)
	}
}

func TestStopOfOneWorkerCounts(t *testing.T) {
	t.Parallel()
	r := play(t, "direct-stop", 2)
	if r.ExitCode != ExitStopped || !r.Stopped || r.First != nil {
		t.Errorf("%+v", r.Result)
	}
	if r := play(t, "int-ignored", 1); r.ExitCode != ExitDone {
		t.Errorf("%+v", r.Result)
	}
}

func TestPlace(t *testing.T) {
	type place struct {
		Env                         map[string]string
		Payload, Dir, Mode, Printed string
		Secret                      []byte
		Exposed                     bool
	}
	t.Setenv(envRank, "17") // of an outer launcher: must be overridden
	t.Setenv(envMaxProcs, "")
	read := func(change ...func(*Job)) []place {
		r := play(t, "place", 2, change...)
		if r.ExitCode != ExitDone || len(r.data) != 2 {
			t.Fatalf("%+v %q", r.Result, r.data)
		}
		var ps []place
		for _, d := range r.data {
			var p place
			if err := json.Unmarshal(d, &p); err != nil {
				t.Fatal(err)
			}
			ps = append(ps, p)
			if _, err := os.Stat(p.Dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("private directory after the job: %v", err)
			}
			if p.Mode != "drwx------" || p.Exposed || len(p.Secret) != 32 || p.Payload != "\x00opaque\xff" ||
				p.Printed != "(secret) (secret) (secret)" {
				// JSON replaces the byte that is invalid UTF-8.
				if p.Payload != "\x00opaque\ufffd" {
					t.Errorf("%+v", p)
				}
			}
			if len(p.Dir)+socketNameRoom > maxSocketPath {
				t.Errorf("directory %q leaves no room for names", p.Dir)
			}
		}
		return ps
	}
	payload := func(j *Job) { j.Payload = []byte("\x00opaque\xff") }
	a := read(payload, func(j *Job) {
		own := *j
		j.Membership = &placed{singleNode{job: &own}, RankRange{NodeRank: 1, FirstRank: 2, WorldSize: 6}}
	})
	slices.SortFunc(a, func(x, y place) int { return strings.Compare(x.Env[envRank], y.Env[envRank]) })
	for i, p := range a {
		want := map[string]string{
			envRank: string(rune('2' + i)), envLocalRank: string(rune('0' + i)), envWorldSize: "6", envLocalWorldSize: "2",
			envNodeRank: "1", envRestartCount: "0", envRunID: p.Env[envRunID], envMaxProcs: p.Env[envMaxProcs],
		}
		for name, value := range want {
			if p.Env[name] != value || value == "" {
				t.Errorf("%s=%q, want %q", name, p.Env[name], value)
			}
		}
	}
	t.Setenv(envMaxProcs, "3")
	b := read(payload)
	if b[0].Env[envMaxProcs] != "3" {
		t.Errorf("GOMAXPROCS of the user became %q", b[0].Env[envMaxProcs])
	}
	if string(a[0].Secret) != string(a[1].Secret) || string(a[0].Secret) == string(b[0].Secret) ||
		a[0].Env[envRunID] == b[0].Env[envRunID] {
		t.Error("secret and run id: one for all workers of a job, another for each job")
	}
}

func TestRestart(t *testing.T) {
	t.Parallel()
	r := play(t, "restart", 2, func(j *Job) { j.MaxRestarts = 5 })
	if r.ExitCode != ExitDone || r.Restarts != 2 || r.First != nil {
		t.Errorf("%+v", r.Result)
	}
	if dirs := r.dirs(); len(dirs) != 3 {
		t.Errorf("3 attempts had the directories %q: old sockets are in the way", dirs)
	}
	log, err := os.ReadFile(filepath.Join(r.logs, "rank-0000.log"))
	if err != nil || len(log) != 0 {
		t.Errorf("log %q, %v", log, err)
	}
	r = play(t, "restart", 1, func(j *Job) { j.MaxRestarts = 1 })
	if r.ExitCode != ExitFailed || r.Restarts != 1 {
		t.Errorf("%+v", r.Result)
	}
	r = play(t, "no-progress", 1, func(j *Job) { j.MaxRestarts = 5 })
	if r.ExitCode != ExitFailed || r.Restarts != 1 || !strings.Contains(r.stderr, "no step beyond 10 was reached") {
		t.Errorf("%+v %s", r.Result, r.stderr)
	}
	if r.First == nil || r.First.Step != 12 || !strings.HasSuffix(r.stderr, r.First.Report()) {
		t.Errorf("stderr %q", r.stderr)
	}
}

func TestContextEndsWorkers(t *testing.T) {
	t.Parallel()
	cause := errors.New("a test's reason")
	ctx, cancel := context.WithCancelCause(t.Context())
	var pid int
	r := Run(ctx, Job{
		NProc: 1, Argv: []string{"worker", "hang"}, Logs: logsIn(t, t.TempDir()),
		OnEvent: func(_ int, e Event) {
			if e.Kind == "pid" {
				json.Unmarshal(e.Data, &pid)
				cancel(cause)
			}
		},
	})
	if r.ExitCode != ExitFailed || !errors.Is(r.Err, cause) || alive(pid) {
		t.Errorf("%+v", r)
	}
}

func TestTwoJobsAtOnce(t *testing.T) {
	t.Parallel()
	results := make(chan Result)
	for range 2 {
		dir := logsIn(t, t.TempDir())
		go func() {
			results <- Run(t.Context(), Job{NProc: 2, Argv: []string{"worker", "done"}, Logs: dir})
		}()
	}
	for range 2 {
		if r := <-results; r.ExitCode != ExitDone {
			t.Errorf("%+v", r)
		}
	}
}

func TestLauncherSignals(t *testing.T) {
	// Under nohup SIGHUP is ignored, and child processes inherit that unless this process handles it.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	t.Cleanup(func() { signal.Reset(syscall.SIGHUP) })
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			a := startAgent(t, "stop", 2)
			a.signal(t, sig)
			if text := a.wait(t, ExitStopped); !strings.Contains(text, "ended after a checkpoint") {
				t.Errorf("stderr %q", text)
			}
		})
	}
}

func TestInterruptedTwice(t *testing.T) {
	t.Parallel()
	a := startAgent(t, "deaf", 2)
	a.signal(t, syscall.SIGTERM)
	a.await(t, "asked") // so that the second signal cannot overtake the first
	a.signal(t, syscall.SIGINT)
	if text := a.wait(t, ExitInterrupted); !strings.HasSuffix(text, "interrupted twice: all workers were ended at once\n") {
		t.Errorf("stderr %q", text)
	}
}

// Workers without state do not run on after a request to stop.
func TestStateless(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1} {
		t.Run(signalName(sig), func(t *testing.T) {
			t.Parallel()
			s := CatchSignals()
			defer s.Release()
			s.c <- sig
			r := play(t, "deaf", 2, func(j *Job) { j.Signals, j.Stateless = s, true })
			if r.ExitCode != ExitInterrupted || !strings.Contains(r.stderr, signalName(sig)) ||
				strings.Contains(r.stderr, "checkpoint") {
				t.Errorf("%+v, stderr %q", r.Result, r.stderr)
			}
		})
	}
}

// TestStderrIsGone covers "cprun | tee log", where Ctrl-C also ends tee.
func TestStderrIsGone(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer write.Close()
	a := startAgent(t, "stop", 1, func(c *exec.Cmd) { c.Stderr = write })
	read.Close()
	a.signal(t, syscall.SIGTERM)
	a.wait(t, ExitStopped)
}

func TestKilledLauncherLeavesNothing(t *testing.T) {
	for _, scenario := range []string{"hang", "spinning", "stop"} {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			a := startAgent(t, scenario, 2)
			if !slices.ContainsFunc(a.pids, alive) {
				t.Fatal("no worker before the kill")
			}
			a.signal(t, syscall.SIGKILL)
			a.wait(t, -1)
		})
	}
}

// A request to stop that reaches a worker before it handles signals stops the job; no rank has trained.
func TestASignalAtTheStartStops(t *testing.T) {
	t.Parallel()
	r := play(t, "hasty", 3, func(j *Job) { j.Argv = append(j.Argv, filepath.Join(t.TempDir(), "taken")) })
	if r.ExitCode != ExitStopped || !r.Stopped || r.First != nil || strings.Contains(r.stderr, "failed") {
		t.Errorf("%+v", r.Result)
	}
}
