package launch

import (
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

const (
	// answerTime bounds the workers' answers about their waits. Their own goroutines answer, so a slower worker is
	// stopped or gets no processor.
	answerTime = 1500 * time.Millisecond
	// tableTime bounds the answers of other nodes.
	tableTime = 2 * time.Second
	// freshPeriods counts the Job.Watch periods for which an answer is valid, since a busy worker may be late.
	freshPeriods = 3
)

// ask asks the workers for their waits and, optionally, the stacks of all goroutines. Requests must not pile up at a
// stopped worker.
func (t *attempt) ask(stacks bool) {
	frame, err := encodeFrame(command{Tell: true, Stacks: stacks})
	for _, c := range t.children {
		if err == nil && len(c.commands) == 0 && (stacks || !c.awaiting) {
			c.awaiting = true
			c.post(frame)
		}
	}
}

// onStatus records a worker's answer about its waits. It describes the moment of the answer, whatever the request.
func (t *attempt) onStatus(c *child, e Event) {
	if s, err := waits.Decode(e.Data); err == nil {
		c.awaiting, c.answer, c.answered = false, &s, time.Now()
		t.showTableIfComplete()
	}
}

// onFault asks for the waits at the first sign of a failure, and again if stacks are wanted.
func (t *attempt) onFault(stacks bool) {
	first := t.failedAt.IsZero()
	if first {
		t.failedAt = time.Now()
	}
	if first || stacks {
		t.ask(stacks)
	}
}

// onTimeout asks for stacks after the first report of a rank that waited for too long.
func (t *attempt) onTimeout(timedOut bool) {
	if timedOut && !t.timedOut {
		t.timedOut = true
		t.onFault(true)
	}
}

// watch starts to poll the workers if Job.OnStatus is set, and reports the start. end stops that, and reports that no
// worker is left.
func (t *attempt) watch() (look <-chan time.Time, end func()) {
	if t.job.OnStatus == nil || t.job.Watch <= 0 {
		return nil, func() {}
	}
	none := func() { t.job.OnStatus(&t.Start, nil) }
	t.con.put(false, none)
	ticker := time.NewTicker(t.job.Watch)
	return ticker.C, func() {
		ticker.Stop()
		t.con.put(false, none)
	}
}

// poll publishes the latest answers, and asks again.
func (t *attempt) poll() {
	rows := t.waitStates(time.Now().Add(-freshPeriods * t.job.Watch))
	t.con.put(true, func() { t.job.OnStatus(&t.Start, rows) })
	t.ask(false)
}

// A waitTable is a table in progress; the zero value is none.
type waitTable struct {
	begun         time.Time
	timer         <-chan time.Time  // when to print an incomplete table
	local, remote bool              // requested by this node's user; by another node, which gets the rows
	remoteRows    []waits.WaitState // of other nodes' ranks
}

// startTable requests the rows of a table, which is printed when all have arrived, or after a timeout.
func (t *attempt) startTable(ours bool) {
	i, after := &t.waitTable, answerTime
	if ours && !i.local {
		t.membership.Publish(News{Ask: true})
		if t.Ranks.WorldSize > t.job.NProc {
			after = tableTime
		}
	}
	i.local, i.remote = i.local || ours, i.remote || !ours
	if i.timer == nil {
		i.begun, i.timer = time.Now(), time.After(after)
		t.ask(true)
	}
}

// addRemoteRows adds the rows of another node.
func (t *attempt) addRemoteRows(rows []waits.WaitState) {
	if t.waitTable.timer == nil {
		return
	}
	for i := range rows {
		rows[i].Clean()
	}
	all := &t.waitTable.remoteRows
	*all = append(*all, rows[:min(len(rows), t.Ranks.WorldSize-len(*all))]...)
	t.showTableIfComplete()
}

// showTableIfComplete prints the table once every live worker has answered.
func (t *attempt) showTableIfComplete() {
	i := &t.waitTable
	silent := func(c *child) bool { return !c.ended && !c.answeredSince(i.begun) }
	if i.timer != nil && !slices.ContainsFunc(t.children, silent) &&
		(!i.local || len(i.remoteRows)+t.job.NProc >= t.Ranks.WorldSize) {
		t.showTable()
	}
}

// showTable prints the table with the rows so far, or sends this node's rows to the other node.
func (t *attempt) showTable() {
	i := t.waitTable
	t.waitTable = waitTable{}
	rows := t.waitStates(i.begun)
	if i.remote {
		t.membership.Publish(News{WaitStates: rows})
	}
	if i.local {
		t.print(fmt.Sprintf("cprun: what each rank waits for (stacks of all goroutines: %s)\n%s",
			terminal.Name(t.Logs.Name()), waits.Table(append(rows, i.remoteRows...))))
	}
}

func (t *attempt) waitStates(since time.Time) (rows []waits.WaitState) {
	for _, c := range t.children {
		rows = append(rows, t.waitState(c, since))
	}
	return rows
}

// waitState returns a worker's own account, from its failure report or an answer since that time, else the launcher's
// observation.
func (t *attempt) waitState(c *child, since time.Time) waits.WaitState {
	s := waits.WaitState{Step: c.lastStep}
	switch {
	case c.evidence.report != nil && c.evidence.report.WaitState != nil:
		s = *c.evidence.report.WaitState
	case c.answeredSince(since) && c.killed != stateStopped:
		s = *c.answer
	default:
		s.State = c.observe()
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}

// timeoutTable returns the table of a start in which a rank waited for too long, else "".
func timeoutTable(fs []Failure) string {
	rows := waitStates(fs)
	if len(rows) == 0 || !slices.ContainsFunc(fs, func(f Failure) bool { return f.TimedOut }) {
		return ""
	}
	return "cprun: what each rank waited for\n" + waits.Table(rows)
}

func waitStates(fs []Failure) (all []waits.WaitState) {
	for i := range fs {
		if s := fs[i].WaitState; s != nil {
			s.Clean() // it may come from another node
			all = append(all, *s)
		}
	}
	return all
}
