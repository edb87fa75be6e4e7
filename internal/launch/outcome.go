package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/launch/waits"
)

// ending returns how the start ended here.
func (t *attempt) ending(ctx context.Context) Ending {
	e := Ending{
		Failures: t.failures(), Asked: t.asked != "", Forced: t.forced, Hung: t.live > 0, Step: t.maxStep, Err: t.err,
		Stopped: slices.ContainsFunc(t.children, func(c *child) bool { return c.evidence.finished == EventStopped }),
	}
	// A request to stop at every process ends workers that do not handle it yet. No rank has trained then.
	own := func(f Failure) bool { return !f.Remote }
	early := slices.ContainsFunc(t.children, (*child).stoppedEarly)
	if early && !slices.ContainsFunc(e.Failures, own) {
		e.Failures, e.Asked, e.Stopped = nil, true, true
	}
	if t.err == nil && t.ended && len(e.Failures) > 0 {
		e.Err, e.Quiet = cmp.Or(context.Cause(ctx), errContextEnded), true
	}
	return e
}

// failures lists the failures of this node's workers, the likely cause first.
func (t *attempt) failures() []Failure {
	var fs []Failure
	for _, c := range t.children {
		v := judge(c.evidence)
		if c.stoppedEarly() {
			v.class = classNone
		}
		if !c.ended {
			v = verdict{classOurs, "does not end after SIGKILL: it hangs in the kernel",
				"ps -o stat,wchan shows where; it may still hold memory and devices"}
		}
		if v.class == classNone {
			continue
		}
		f := Failure{
			Rank: c.rank, Host: t.job.Node, PID: c.pid, Cause: v.cause, Hint: v.hint, Log: c.log,
			Remote: v.class == classRemote || v.class == classOurs,
			Class:  v.class, Order: c.evidence.order,
			// Only some ranks report steps; the others were at about the same one.
			Step: cmp.Or(c.lastStep, t.maxStep),
		}
		f.WaitState = new(t.waitState(c, t.failedAt))
		f.Tail, _ = c.relay.ended()
		if r := c.evidence.report; r != nil {
			f.TimedOut = r.TimedOut
			f.Phase, f.Step = r.Phase, cmp.Or(r.Step, f.Step)
		}
		fs = append(fs, f)
	}
	sortFailures(fs)
	return fs
}

// report prints how a start ended. The block about the first failed rank comes last.
func (t *attempt) report(v Verdict) {
	for _, note := range v.Notes {
		t.say("%s", note)
	}
	switch {
	case v.ReportedElsewhere && v.ExitCode == ExitFailed && v.First != nil:
		t.notice("%s; the node of rank 0 prints the details", v.First.Error())
	case v.ReportedElsewhere:
	case v.ExitCode == ExitStopped:
		t.notice("all workers have ended after a checkpoint")
	case v.Err != nil: // its caller prints it
		if t.ended {
			t.notice("ended by its caller")
		}
	case v.ExitCode == ExitInterrupted:
		if !v.First.Remote {
			t.print(v.First.lastLines() + v.First.Report())
		}
		by := "interrupted twice"
		if t.job.Stateless {
			by = "interrupted by " + t.asked
		}
		t.say("%s: all workers were ended at once", by)
	case v.ExitCode == ExitFailed:
		t.print(timeoutTable(v.Failures) + others(v.Failures[1:]) + v.First.lastLines() + v.First.Report())
	}
	for _, note := range v.Last {
		t.say("%s", note)
	}
}

// others returns one line for each further rank that failed by itself, and one line for the victims.
func others(fs []Failure) string {
	var b strings.Builder
	var victims []int
	for _, f := range fs {
		if f.Remote {
			victims = append(victims, f.Rank)
		} else {
			fmt.Fprintf(&b, "cprun: also %s\n", f.Error())
		}
	}
	if len(victims) > 0 {
		slices.Sort(victims)
		fmt.Fprintf(&b, "cprun: ended because of it: %s\n", waits.Ranks(victims))
	}
	return b.String()
}

// lastLines returns the end of the rank's output, in the form of live output.
func (f *Failure) lastLines() string {
	var b strings.Builder
	for _, line := range f.Tail {
		fmt.Fprintf(&b, "[rank %d] %s\n", f.Rank, line)
	}
	return b.String()
}

// An evidence value collects the launcher's observations about the end of one worker.
type evidence struct {
	order     int // of the first sign of failure among the ranks, from 1; 0: none
	startErr  error
	fault     error    // of its channel
	report    *Failure // as its worker knows it
	finished  string   // EventDone, EventStopped or ""
	exit      syscall.WaitStatus
	endedByUs bool          // it ended by a signal of the launcher
	overLimit time.Duration // the exceeded time limit, counted from its own or another rank's end of work; 0: none
	crash     string        // first line of a crash in its output
	oomKilled bool          // the out-of-memory count of this control group has risen
}

// Class orders failures, likely causes first.
type Class int

// The classes. A lost node has classSignal.
const (
	// A signal from outside is never a consequence of another rank's failure.
	classSignal Class = iota
	classOwn
	classRemote // it reports that the cause was in another rank
	classOurs   // ended by the launcher after another failure
	classNone   // no failure
)

type verdict struct {
	class       Class
	cause, hint string
}

// judge returns whether, why and in which class a worker failed.
func judge(s evidence) verdict {
	sig, code := max(0, s.exit.Signal()), s.exit.ExitStatus()
	switch {
	case s.startErr != nil:
		return verdict{classOwn, s.startErr.Error(), startHint(s.startErr)}
	case sig == 0 && code == 0 && s.finished != "" && s.fault == nil && s.report == nil && s.overLimit == 0:
		return verdict{class: classNone}
	case sig != 0 && !s.endedByUs:
		cause, hint := explainSignal(sig, s.oomKilled)
		if s.report != nil { // it reported before it was killed
			cause += "; before that: " + s.report.Cause
		}
		return verdict{classSignal, cause, hint}
	case s.overLimit > 0 && s.finished == "":
		return verdict{
			classOwn, fmt.Sprintf("was not done %v after another rank was, and was ended by the launcher", s.overLimit),
			"its log has the stacks of that time: they show the disk or device that it waits for",
		}
	case s.report != nil && s.report.Remote && s.report.TimedOut:
		return verdict{
			classRemote, s.report.Cause, "the table above names the rank that held up the others; see its log",
		}
	case s.report != nil && s.report.Remote:
		return verdict{classRemote, s.report.Cause, "the cause is in another rank; see the logs of the other ranks"}
	case s.report != nil:
		return verdict{classOwn, s.report.Cause, ""}
	case s.fault != nil:
		return verdict{classOwn, "channel to the launcher: " + s.fault.Error(),
			"launcher and worker must be the same build"}
	case s.overLimit > 0:
		return verdict{
			classOwn,
			fmt.Sprintf("did not exit after it was done, and was ended by the launcher %v later", s.overLimit),
			"its work is complete; its log has the stacks of that time",
		}
	case s.endedByUs:
		return verdict{classOurs, "ended by the launcher after another rank had failed", ""}
	case s.crash != "":
		return verdict{classOwn, s.crash, crashHint(s.crash)}
	case code == 0:
		return verdict{classOwn, "exit status 0 before its work was done", "see the last lines of its log"}
	}
	return verdict{classOwn, fmt.Sprintf("exit status %d", code), "see the last lines of its log"}
}

func crashHint(crash string) string {
	const hint = "the stack is in its log"
	if limit, ok := limitOf(unix.RLIMIT_AS); ok && strings.Contains(crash, "out of memory") {
		return fmt.Sprintf("the limit of address space is %d KiB: raise it (ulimit -v unlimited); %s", limit>>10, hint)
	}
	return hint
}

func startHint(err error) string {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return "raise the limit on open files (ulimit -n; sysctl fs.file-max for all of the system)"
	}
	return "check the limits on processes and memory (ulimit -u, cgroup pids.max)"
}

// outOfMemoryKiller is the cause of a SIGKILL if the control group's count of such kills has risen.
const outOfMemoryKiller = "the kernel's out-of-memory killer: this control group reached its memory limit"

func explainSignal(sig syscall.Signal, oomKilled bool) (cause, hint string) {
	cause = "killed by " + signalName(sig)
	switch {
	case sig == unix.SIGKILL && oomKilled:
		return cause + " (" + outOfMemoryKiller + ")",
			"lower train.micro_batch_size, data.seq_len or memory.loss_chunk, set memory.recompute: full, or raise " +
				"the limit"
	case sig == unix.SIGKILL:
		return cause + " (not by cprun: likely the kernel's out-of-memory killer, or a user)",
			"dmesg names the processes that the kernel has killed; cprun plan shows the memory that a rank needs"
	case sig == unix.SIGBUS:
		return cause + " (a file system in memory is full, or a mapped file was cut short)",
			"check free space on /dev/shm"
	case sig == unix.SIGSEGV || sig == unix.SIGILL || sig == unix.SIGABRT || sig == unix.SIGFPE:
		return cause + " (a crash in native code)", "the stack is in its log; please report it"
	case sig == unix.SIGXCPU:
		return cause + " (a limit on CPU time)", "ulimit -t shows it"
	}
	return cause + " (not by cprun)", ""
}

// sortFailures sorts the likely cause first: by class, then by the order of the first signs. If that rank waited too
// long, the rank that held it up is the cause, although the launcher ended it.
func sortFailures(fs []Failure) {
	slices.SortStableFunc(fs, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Order, b.Order))
	})
	if len(fs) == 0 || !fs[0].TimedOut {
		return
	}
	rank, why := waits.Holder(waitStates(fs))
	i := slices.IndexFunc(fs, func(f Failure) bool { return f.Rank == rank && f.Ranks == 0 })
	if i < 1 {
		return
	}
	f := fs[i]
	if f.TimedOut = true; f.Remote {
		f.Remote, f.Class, f.Hint = false, classOwn, fs[0].Hint
		f.Cause = fmt.Sprintf("%s\nrank %d: %s", why, fs[0].Rank, fs[0].Cause)
	}
	copy(fs[1:], fs[:i])
	fs[0] = f
}
