package launch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch/waits"
)

func TestJudge(t *testing.T) {
	signalled := func(s syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(s) }
	exit := func(code int) syscall.WaitStatus { return syscall.WaitStatus(code << 8) }
	own, remote := &Failure{Cause: "bad shape"}, &Failure{Cause: "lost rank 1", Remote: true}
	for _, c := range []struct {
		name  string
		seen  evidence
		class Class
		cause string
	}{
		{"done", evidence{finished: EventDone}, classNone, ""},
		{"stopped", evidence{finished: EventStopped}, classNone, ""},
		{"stopped after the launcher's SIGTERM", evidence{finished: EventStopped, endedByUs: true}, classNone, ""},
		{"not started", evidence{startErr: errors.New("fork: no memory")}, classOwn, "fork: no memory"},
		{"oom", evidence{exit: signalled(syscall.SIGKILL), oomKilled: true}, classSignal,
			"out-of-memory killer: this control group"},
		{"kill", evidence{exit: signalled(syscall.SIGKILL)}, classSignal, "not by cprun"},
		{"segv", evidence{exit: signalled(syscall.SIGSEGV)}, classSignal, "killed by SIGSEGV (a crash in native code)"},
		{"bus", evidence{exit: signalled(syscall.SIGBUS)}, classSignal, "mapped file"},
		{"real time", evidence{exit: signalled(syscall.Signal(40))}, classSignal, "killed by signal 40"},
		{"kill after done", evidence{finished: EventDone, exit: signalled(syscall.SIGKILL)}, classSignal,
			"not by cprun"},
		{"kill after report", evidence{report: remote, exit: signalled(syscall.SIGKILL)}, classSignal,
			"before that: lost rank 1"},
		{"ours", evidence{endedByUs: true, exit: signalled(syscall.SIGKILL)}, classOurs,
			"after another rank had failed"},
		{"error after the launcher's SIGTERM", evidence{endedByUs: true, exit: exit(1)}, classOurs,
			"after another rank"},
		{"own, then ours", evidence{endedByUs: true, report: own, exit: signalled(syscall.SIGKILL)}, classOwn,
			"bad shape"},
		{"own", evidence{report: own, exit: exit(1)}, classOwn, "bad shape"},
		{"own but exit 0", evidence{report: own, finished: EventDone}, classOwn, "bad shape"},
		{"remote", evidence{report: remote, exit: exit(1)}, classRemote, "lost rank 1"},
		{"panic", evidence{crash: "panic: x", exit: exit(2)}, classOwn, "panic: x"},
		{"exit 0", evidence{}, classOwn, "exit status 0 before"},
		{"exit 9", evidence{exit: exit(9)}, classOwn, "exit status 9"},
		{"quit", evidence{crash: "SIGQUIT: quit", exit: exit(2)}, classOwn, "SIGQUIT: quit"},
	} {
		v := judge(c.seen)
		if v.class != c.class || !strings.Contains(v.cause, c.cause) {
			t.Errorf("%s: judge = %+v, want class %d, cause %q", c.name, v, c.class, c.cause)
		}
	}
}

// The hint of a rank that waited too long refers to the table of waits, which only time-outs print.
func TestHintOfATimeOut(t *testing.T) {
	for _, c := range []struct {
		report Failure
		class  Class
		table  bool
	}{
		{Failure{Remote: true, TimedOut: true}, classRemote, true},
		{Failure{Remote: true}, classRemote, false},
		{Failure{TimedOut: true}, classOwn, false},
	} {
		v := judge(evidence{report: &c.report, exit: 1 << 8})
		if v.class != c.class || strings.Contains(v.hint, "table") != c.table {
			t.Errorf("%+v: %+v", c.report, v)
		}
	}
}

// A worker that the launcher asked to end, and that ends without an error or before its work is done, has no excuse.
func TestEndedByUs(t *testing.T) {
	const term, kill = syscall.SIGTERM, syscall.SIGKILL
	for _, c := range []struct {
		sent []syscall.Signal
		exit syscall.WaitStatus
		want bool
	}{
		{[]syscall.Signal{term}, 1 << 8, true},
		{[]syscall.Signal{term}, 0, false},
		{[]syscall.Signal{kill}, 1 << 8, false},
		{nil, 1 << 8, false},
		{[]syscall.Signal{term, kill}, syscall.WaitStatus(kill), true},
		{[]syscall.Signal{term}, syscall.WaitStatus(kill), false},
	} {
		if got := (&child{sent: c.sent}).endedByUs(c.exit); got != c.want {
			t.Errorf("signals %v, then status %#x: %v, want %v", c.sent, int(c.exit), got, c.want)
		}
	}
}

func TestHintOfAProcessThatIsNotStarted(t *testing.T) {
	for err, want := range map[error]string{
		fmt.Errorf("pipe: %w", os.NewSyscallError("pipe2", syscall.EMFILE)): "ulimit -n",
		fmt.Errorf("start process: %w", syscall.EAGAIN):                     "ulimit -u",
	} {
		if v := judge(evidence{startErr: err}); !strings.Contains(v.hint, want) {
			t.Errorf("%v: hint %q, want %q", err, v.hint, want)
		}
	}
}

func TestRankFailures(t *testing.T) {
	fs := []Failure{
		{Rank: 0, Class: classRemote, Order: 1}, {Rank: 1, Class: classOurs, Order: 2}, {Rank: 2, Class: classOwn, Order: 4},
		{Rank: 3, Class: classOwn, Order: 3}, {Rank: 4, Class: classSignal, Order: 5},
	}
	sortFailures(fs)
	var got []int
	for _, f := range fs {
		got = append(got, f.Rank)
	}
	if want := []int{4, 3, 2, 0, 1}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

func TestReport(t *testing.T) {
	f := Failure{Rank: 2, Host: "node-a", PID: 4711, Cause: "killed by SIGKILL\nsecond line", Phase: "backward", Step: 12,
		Log: "runs/x/logs/rank-0002.log", Hint: "look at dmesg"}
	want := `cprun: rank 2 failed on host node-a (pid 4711): killed by SIGKILL
         second line
  at:    step 12, backward
  log:   runs/x/logs/rank-0002.log
  hint:  look at dmesg
`
	if got := f.Report(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	f = Failure{Rank: 1, Host: "b", Cause: "start process: no memory"}
	if got, want := f.Report(), "cprun: rank 1 failed on host b: start process: no memory\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestStopPolicy(t *testing.T) {
	const ms = time.Millisecond
	type at struct {
		sig  os.Signal
		when time.Duration
		want action
	}
	for name, calls := range map[string][]at{
		"ctrl-c twice":          {{syscall.SIGINT, 0, actStop}, {syscall.SIGINT, 150 * ms, actKill}},
		"one ctrl-c sent twice": {{syscall.SIGINT, 0, actStop}, {syscall.SIGINT, 1 * ms, actNone}},
		"term twice, late":      {{syscall.SIGTERM, 0, actStop}, {syscall.SIGTERM, 1500 * ms, actKill}},
		"term repeated at once": {{syscall.SIGTERM, 0, actStop}, {syscall.SIGTERM, 1 * ms, actNone},
			{syscall.SIGTERM, 90 * ms, actNone}},
		"slurm warns, then ends": {{syscall.SIGUSR1, 0, actStop}, {syscall.SIGTERM, 28000 * ms, actNone},
			{syscall.SIGTERM, 28050 * ms, actNone}},
		"warned, then interrupted": {{syscall.SIGUSR1, 0, actStop}, {syscall.SIGINT, 5000 * ms, actNone},
			{syscall.SIGINT, 6000 * ms, actKill}},
		"usr1 is never force": {{syscall.SIGTERM, 0, actStop}, {syscall.SIGUSR1, 5000 * ms, actNone},
			{syscall.SIGHUP, 6000 * ms, actNone}},
		"term, then ctrl-c": {{syscall.SIGTERM, 0, actStop}, {syscall.SIGINT, 0, actKill}},
		"ctrl-c, then term": {{syscall.SIGINT, 0, actStop}, {syscall.SIGTERM, 90 * ms, actNone},
			{syscall.SIGTERM, 110 * ms, actKill}},
		"quit does not count": {{syscall.SIGQUIT, 0, actStatus}, {syscall.SIGINT, 100 * ms, actStop}},
	} {
		var p stopPolicy
		start := time.Unix(0, 0)
		for i, c := range calls {
			if got := p.on(c.sig, start.Add(c.when)); got != c.want {
				t.Errorf("%s: call %d = %d, want %d", name, i, got, c.want)
			}
		}
	}
}

// Of a rank that waited too long and the one that it waited for, the second is blamed, also if another node ended it.
func TestTheRankThatHeldUpOthersIsBlamed(t *testing.T) {
	waiting := waits.WaitState{Waits: []waits.Wait{{Op: "exchange", Open: []waits.Open{{Peer: 1, Bytes: 8}}}}}
	late := Failure{Rank: 0, Class: classRemote, Order: 1, Remote: true, TimedOut: true, Cause: "no progress",
		WaitState: &waiting}
	ended := Failure{Rank: 1, Class: classOurs, Order: 1<<16 + 2, Remote: true, Cause: "ended",
		WaitState: &waits.WaitState{Rank: 1, State: "is stopped"}}
	e := Merge(Ending{Failures: []Failure{late}}, Ending{Failures: []Failure{ended}})
	for range 2 { // also if its result is merged again
		if f := e.Failures[0]; len(e.Failures) != 2 || f.Rank != 1 || f.Remote ||
			f.Cause != "it held up rank 0: it is stopped\nrank 0: no progress" {
			t.Errorf("%+v", e.Failures)
		}
		e = Merge(e)
	}
	ended.Remote, ended.Class, ended.Cause = false, classOwn, "a crash"
	if f := Merge(Ending{Failures: []Failure{late, ended}}).Failures[0]; f.Rank != 1 || f.Cause != "a crash" {
		t.Errorf("%+v", f)
	}
}
