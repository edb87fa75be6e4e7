package launch

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// until polls ok.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > 2*time.Minute {
			t.Fatal("it does not come")
		}
	}
}

// awaitFile polls a file until it matches, and returns its text.
func awaitFile(t *testing.T, path string, want string) (text string) {
	t.Helper()
	until(t, func() bool {
		b, err := os.ReadFile(path)
		text = string(b)
		return err == nil && regexp.MustCompile(want).Match(b)
	})
	return text
}

// quiet starts a launcher whose stderr can be read while it runs.
func quiet(t *testing.T, scenario string, n int) (a *agentProcess, stderr string) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return startAgent(t, scenario, n, func(c *exec.Cmd) { c.Stderr = f }), f.Name()
}

// askUntil sends SIGQUIT until stderr matches: workers may not have started to wait, or may be too busy to answer.
func askUntil(t *testing.T, a *agentProcess, stderr, want string) {
	t.Helper()
	asked := 0
	until(t, func() bool {
		b, err := os.ReadFile(stderr)
		if err != nil || regexp.MustCompile(want).Match(b) {
			return err == nil
		}
		if strings.Count(string(b), "cprun: what each rank waits for") >= asked {
			asked++
			a.signal(t, syscall.SIGQUIT)
		}
		return false
	})
}

// TestQuitShowsWhoWaitsForWhom checks that SIGQUIT prints the table of waits and writes stacks to the logs. The job
// continues, and answers again.
func TestQuitShowsWhoWaitsForWhom(t *testing.T) {
	t.Parallel()
	a, stderr := quiet(t, "chain", 3)
	const blame = "cprun: rank 2 holds up rank 1, and by that rank 0: it is at its own work for 60.0 s \\(step 7\\)\n"
	askUntil(t, a, stderr, blame)
	askUntil(t, a, stderr, "(?s)"+blame+".*"+blame)
	text := awaitFile(t, stderr, `(?m)^ +1  \S+ +`+"\\d+"+`  +7  forward +3 +1  exchange +2 +4,096  30.0$`)
	if regexp.MustCompile(`(?m)^ +99 `).MatchString(text) || strings.Contains(text, "goroutine ") {
		t.Errorf("stderr %s", text)
	}
	for _, log := range []string{"rank-0000.log", "rank-0002.log"} {
		awaitFile(t, filepath.Join(a.cmd.Args[4], log),
			`(?s)--- stacks of rank \d, .*launch\.workerMain\(.*--- end of the stacks ---`)
	}
	a.signal(t, syscall.SIGTERM)
	a.wait(t, ExitStopped)
}

// TestQuitShowsARankThatIsStopped checks that ranks without an account have a row: a stopped one, and ones without a
// state.
func TestQuitShowsARankThatIsStopped(t *testing.T) {
	t.Parallel()
	a, stderr := quiet(t, "stop", 3)
	if err := syscall.Kill(a.pids[1], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	askUntil(t, a, stderr, `(?s)  is stopped by a signal or a debugger.*cprun: no rank waits for another\n`)
	if err := syscall.Kill(a.pids[1], syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	a.signal(t, syscall.SIGTERM)
	a.wait(t, ExitStopped)
}

// TestATimeOutShowsWhoWaitedForWhom checks that the table precedes the report after a timeout. The blocking rank is
// stopped, or hangs and answers.
func TestATimeOutShowsWhoWaitedForWhom(t *testing.T) {
	for scenario, why := range map[string]string{"timeout": "is stopped by a signal or a debugger",
		"stuck": "is at its own work for 60.0 s (step 7)"} {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			r := play(t, scenario, 3, func(j *Job) { j.times.settle = 3 * time.Second }) // ranks 0 and 1 end by themselves
			table, report, ok := strings.Cut(r.stderr, "cprun: rank 2 holds up rank 1, and by that rank 0: it "+why+"\n")
			if r.ExitCode != ExitFailed || !ok ||
				!strings.HasPrefix(table, "cprun: what each rank waited for\n  rank ") ||
				!strings.HasSuffix(report, r.First.Report()) {
				t.Errorf("%+v\n%s", r.Result, r.stderr)
			}
			if f := r.First; f.Rank != 2 || f.Remote || !f.TimedOut || !strings.HasPrefix(f.Cause, "it held up rank 1: it "+why+"\n") ||
				f.WaitState == nil || f.WaitState.PID != f.PID {
				t.Errorf("%+v", f)
			}
		})
	}
	if r := play(t, "stubborn", 2); strings.Contains(r.stderr, "what each rank waited for") {
		t.Errorf("a table without a wait:\n%s", r.stderr)
	}
}

// A placed is a node with other ranks.
type placed struct {
	singleNode
	place RankRange
}

func (p *placed) Next(ctx context.Context) (Start, error) {
	s, err := p.singleNode.Next(ctx)
	s.Ranks = p.place
	return s, err
}

// A halfJob is one of two nodes that exchange all news.
type halfJob struct {
	placed
	news, say chan News
}

func (h *halfJob) News() <-chan News { return h.news }

func (h *halfJob) Publish(n News) { h.say <- n }

// TestQuitShowsTheRanksOfOtherNodes checks that a node's table has the rows of the others, and follows waits across
// nodes.
func TestQuitShowsTheRanksOfOtherNodes(t *testing.T) {
	t.Parallel()
	ways := [2]chan News{make(chan News, 16), make(chan News, 16)}
	signals := CatchSignals()
	defer signals.Release()
	var results [2]chan Result
	stderr := filepath.Join(t.TempDir(), "stderr")
	f, err := os.Create(stderr)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range results {
		results[i] = make(chan Result, 1)
		job := Job{
			NProc: 2, Argv: []string{"worker", "chain"}, Logs: logsIn(t, t.TempDir()),
			Node:  []string{"node-a", "node-b"}[i],
			times: quick,
		}
		if i == 0 {
			job.Stderr, job.Signals = f, signals
		}
		h := &halfJob{
			placed: placed{singleNode{job: &job}, RankRange{NodeRank: i, FirstRank: 2 * i, WorldSize: 4}},
			news:   ways[i],
			say:    ways[1-i],
		}
		job.Membership = h
		go func() { results[i] <- Run(t.Context(), job) }()
	}
	until(t, func() bool {
		signals.c <- syscall.SIGQUIT
		time.Sleep(50 * time.Millisecond)
		b, err := os.ReadFile(stderr)
		return err == nil && regexp.MustCompile(`(?s)  node-a  .*  node-b .*`+
			`cprun: rank 2 holds up rank 1, and by that rank 0: it is at its own work`).Match(b)
	})
	signals.c <- syscall.SIGTERM
	for _, r := range results {
		if got := <-r; got.ExitCode != ExitStopped {
			t.Errorf("%+v", got)
		}
	}
}
