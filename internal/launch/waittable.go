package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

const (
	// answerTime bounds the workers' answers about their waits. Their own goroutines answer, so a slower worker is
	// stopped or gets no processor.
	answerTime = 1500 * time.Millisecond
	// tableTime bounds the answers of other nodes.
	tableTime = 2 * time.Second
)

// A waitTable is a table in progress; the zero value is none.
type waitTable struct {
	timer         <-chan time.Time  // when to print an incomplete table
	local, remote bool              // requested by this node's user; by another node, which gets the rows
	remoteRows    []waits.WaitState // of other nodes' ranks
}

// requestStatus asks the workers for their waits and, optionally, the stacks of all goroutines. Any answer describes
// the moment of the answer, whatever the request.
func (t *attempt) requestStatus(stacks bool) {
	frame, err := encodeFrame(command{Kind: commandStatus, Stacks: stacks})
	for _, c := range t.children {
		if err == nil && !c.ended && len(c.commands) == 0 { // a worker with an unread request gets no second one
			c.commands <- frame
		}
	}
}

// requestFreshStatus discards the answers so far, and asks again.
func (t *attempt) requestFreshStatus(stacks bool) {
	for _, c := range t.children {
		c.answer = nil
	}
	t.requestStatus(stacks)
}

// timeOut also requests stacks, at the first report of a rank that waited for too long.
func (t *attempt) timeOut(r *FailureReport) {
	switch {
	case !r.TimedOut || t.timedOut:
		return
	case t.failing:
		t.requestStatus(true)
	default:
		t.requestFreshStatus(true)
	}
	t.timedOut = true
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
	begun := i.local || i.remote
	i.local, i.remote = i.local || ours, i.remote || !ours
	if !begun {
		i.timer = time.After(after)
		t.requestFreshStatus(true)
	}
}

// onStatus records a worker's answer about its waits.
func (t *attempt) onStatus(c *child, e Event) {
	if s, err := waits.Decode(e.Data); err == nil {
		c.answer, c.awaiting = &s, false
		c.lastAnswer, c.lastAnswerAt = &s, time.Now()
		t.publishIfComplete()
		t.showTableIfComplete()
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
	if t.waitTable.timer == nil {
		return
	}
	for _, c := range t.children {
		if !c.ended && c.answer == nil {
			return
		}
	}
	if !t.waitTable.local || len(t.waitTable.remoteRows)+t.job.NProc >= t.Ranks.WorldSize {
		t.showTable()
	}
}

// showTable prints the table with the rows so far, or sends this node's rows to the other node.
func (t *attempt) showTable() {
	var rows []waits.WaitState
	for _, c := range t.children {
		rows = append(rows, t.waitState(c))
	}
	i := t.waitTable
	t.waitTable = waitTable{}
	if i.remote {
		t.membership.Publish(News{WaitStates: rows})
	}
	if !i.local {
		return
	}
	rows = append(rows, i.remoteRows...)
	t.say(fmt.Sprintf("cprun: what each rank waits for (stacks of all goroutines: %s)\n%s",
		terminal.Name(t.Logs.Name()), waits.Table(rows)))
}

// keepStacks appends a worker's goroutine stacks to its log.
func (c *child) keepStacks(data json.RawMessage) {
	var text string
	if json.Unmarshal(data, &text) != nil {
		return
	}
	_, err := fmt.Fprintf(c.relay.log, "--- stacks of rank %d, %s ---\n%s\n--- end of the stacks ---\n", c.rank,
		time.Now().UTC().Format(time.RFC3339), terminal.Text(text))
	if err != nil && !errors.Is(err, os.ErrClosed) {
		c.relay.con.write(fmt.Appendf(nil, "cprun: stacks of rank %d are not in its log: %v\n", c.rank, err),
			c.relay.abandon)
	}
}

// News from the other nodes of a job, and the workers' addresses.

func (t *attempt) onNews(n News) {
	switch {
	case n.Addrs != nil:
		t.sendPeers(n.Addrs)
	case n.Failed != nil || n.Lost != "":
		failed := -1
		if n.Failed != nil {
			failed = *n.Failed
		}
		t.abort(failed, n.Lost)
	case n.Ask:
		t.startTable(false)
	case n.WaitStates != nil:
		t.addRemoteRows(n.WaitStates)
	case n.Kill:
		t.forced = true
		t.killAll()
	case n.Stop != "":
		t.stop(n.Stop)
	}
}

// listening records a worker's address. After the last one, it sends all to the other nodes.
func (t *attempt) listening(c *child, e Event) {
	if json.Unmarshal(e.Data, &c.addr) != nil || t.Listen == "" {
		return
	}
	addrs := make([]string, 0, t.job.NProc)
	for _, c := range t.children {
		if c.addr != "" {
			addrs = append(addrs, c.addr)
		}
	}
	if len(addrs) == t.job.NProc {
		t.membership.Publish(News{Addrs: addrs})
	}
}

// sendPeers sends the workers the addresses of all ranks. Workers of this node use its private directory instead.
func (t *attempt) sendPeers(addrs []string) {
	if t.peersSent || len(addrs) != t.Ranks.WorldSize {
		return
	}
	t.peersSent = true
	addrs = slices.Clone(addrs)
	for r := range t.job.NProc {
		addrs[t.Ranks.FirstRank+r] = ""
	}
	t.broadcast(command{Kind: commandPeers, Addrs: addrs})
}

// States of ranks that give no account of themselves.
const (
	stateStopped = "is stopped by a signal or a debugger"
	stateKernel  = "does not answer, and waits in the kernel"
	stateSilent  = "does not answer"
	stateEnded   = "has ended"
)

// waitState returns a worker's own account, from its failure report or its answer, else the launcher's observation.
func (t *attempt) waitState(c *child) waits.WaitState {
	s := waits.WaitState{Step: c.lastStep, State: c.state}
	switch {
	case c.evidence.report != nil && c.evidence.report.WaitState != nil:
		s = *c.evidence.report.WaitState
	case c.answer != nil:
		s = *c.answer
	case s.State != "":
	case c.ended:
		s.State = stateEnded
	default:
		s.State = silentState(c.pid)
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}

// silentState returns why a process may not answer.
func silentState(pid int) string {
	switch state(pid) {
	case 'T', 't':
		return stateStopped
	case 'D':
		return stateKernel
	case 'Z', 'X':
		return stateEnded
	}
	return stateSilent
}

// timeoutTable returns the table of a start in which a rank waited for too long, else "".
func timeoutTable(fs []Failure) string {
	var rows []waits.WaitState
	timedOut := false
	for i := range fs {
		timedOut = timedOut || fs[i].TimedOut
		if s := fs[i].WaitState; s != nil {
			s.Clean() // it may come from another node
			rows = append(rows, *s)
		}
	}
	if !timedOut || len(rows) == 0 {
		return ""
	}
	return "cprun: what each rank waited for\n" + waits.Table(rows)
}

// stoppedEvery separates two checks for stopped workers.
const stoppedEvery = 50 * time.Millisecond

// killStopped kills the stopped workers, since they cannot end by themselves. It checks again while workers live, since
// one may be stopped later.
func (t *attempt) killStopped() {
	t.stopped = time.After(stoppedEvery)
	for _, c := range t.children {
		if !c.ended && c.state != stateStopped && silentState(c.pid) == stateStopped {
			c.state = stateStopped
			c.signal(unix.SIGKILL, true)
		}
	}
}

// state returns the kernel's state of a process, such as 'T' for stopped; 0: unknown.
func state(pid int) byte {
	stat, err := files.Read(fmt.Sprintf("/proc/%d/stat", pid), maxKernelFile)
	_, state, ok := bytes.Cut(stat, []byte(") ")) // after its name, which may contain anything
	if err != nil || !ok || len(state) == 0 {
		return 0
	}
	return state[0]
}

// stateStarts is the state of a worker before its first answer.
const stateStarts = "starts"

// freshPeriods is the number of Job.Watch periods for which an answer is valid, since a busy worker may be late.
const freshPeriods = 3

// watch starts to poll the workers if Job.OnStatus is set. end stops that, and reports that no worker is left.
func (t *attempt) watch() (look <-chan time.Time, end func()) {
	if t.job.OnStatus == nil || t.job.Watch <= 0 {
		return nil, func() {}
	}
	ticker := time.NewTicker(t.job.Watch)
	return ticker.C, func() {
		ticker.Stop()
		t.mail.put(false, func() { t.job.OnStatus(nil) })
	}
}

// poll publishes an incomplete status, and asks the workers again, except the silent ones, so that no requests pile up
// at a stopped worker.
func (t *attempt) poll() {
	if t.polling {
		t.publishStatus()
	}
	t.polling = true
	frame, err := encodeFrame(command{Kind: commandStatus})
	for _, c := range t.children {
		if err == nil && !c.ended && !c.awaiting && len(c.commands) == 0 {
			c.awaiting = true
			c.commands <- frame
		}
	}
}

// publishIfComplete publishes the status once every live worker has answered.
func (t *attempt) publishIfComplete() {
	for _, c := range t.children {
		if !c.ended && c.awaiting {
			return
		}
	}
	if t.polling {
		t.publishStatus()
	}
}

func (t *attempt) publishStatus() {
	t.polling = false
	rows := make([]waits.WaitState, 0, len(t.children))
	for _, c := range t.children {
		rows = append(rows, t.lastKnown(c))
	}
	t.mail.put(true, func() { t.job.OnStatus(rows) })
}

// lastKnown returns a worker's last answer, or the launcher's observation.
func (t *attempt) lastKnown(c *child) waits.WaitState {
	s := waits.WaitState{Step: c.lastStep, State: c.state}
	switch {
	case c.ended:
		s.State = stateEnded
	case c.lastAnswer != nil && time.Since(c.lastAnswerAt) <= freshPeriods*t.job.Watch:
		s = *c.lastAnswer
	case s.State != "":
	default:
		if s.State = silentState(c.pid); s.State == stateSilent && c.lastAnswer == nil {
			s.State = stateStarts
		}
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}
