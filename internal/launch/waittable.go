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
	// answerTime bounds the workers' answers about their waits. They come from separate goroutines, so a slower worker
	// is stopped, or has no processor.
	answerTime = 1500 * time.Millisecond
	// tableTime bounds the answers of other nodes.
	tableTime = 2 * time.Second
)

// An inquiry is a table that is being made. The zero inquiry is none.
type waitTable struct {
	timer         <-chan time.Time  // when it is shown as it is
	local, remote bool              // the user has asked here; at another node, which gets the rows
	remoteRows    []waits.WaitState // of ranks of other nodes
}

// inquire asks the workers what they wait for, and maybe for the stacks of all their goroutines. An answer
// is about the moment in which it is made, whichever request it is to.
func (t *attempt) requestStatus(stacks bool) {
	frame, err := encodeFrame(command{Kind: commandStatus, Stacks: stacks})
	for _, c := range t.children {
		if err == nil && !c.ended && len(c.commands) == 0 { // one that has not read the last is not asked again
			c.commands <- frame
		}
	}
}

// inquireAnew forgets the answers so far, and asks.
func (t *attempt) requestFreshStatus(stacks bool) {
	for _, c := range t.children {
		c.answer = nil
	}
	t.requestStatus(stacks)
}

// timeOut asks for stacks as well, at the first report of a rank that has waited for too long.
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

// table asks for the rows of a table, which is shown when all have come, or after a time.
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

// answered records a worker's answer about its waits.
func (t *attempt) onStatus(c *child, e Event) {
	if s, err := waits.Decode(e.Data); err == nil {
		c.answer, c.awaiting = &s, false
		c.lastAnswer, c.lastAnswerAt = &s, time.Now()
		t.publishIfComplete()
		t.showTableIfComplete()
	}
}

// passedOn takes the rows of another node.
func (t *attempt) addRemoteRows(rows []waits.WaitState) {
	if t.waitTable.timer == nil {
		return
	}
	for i := range rows {
		rows[i].Clean()
	}
	t.waitTable.remoteRows = append(t.waitTable.remoteRows, rows[:min(len(rows), t.Ranks.WorldSize-len(t.waitTable.remoteRows))]...)
	t.showTableIfComplete()
}

// showWhenWhole shows the table once no one is left who might answer.
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

// show shows the table as far as it has come, or passes this node's rows on.
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

// News from the other nodes of a job, and the addresses for them.

// onNews does what the agent of another node asks for.
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

// listening notes where a worker can be reached. When all have said so, the other nodes are told.
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

// introduce tells the workers where all ranks are. Those of this node meet in its private directory.
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

// What is said of ranks that say nothing themselves.
const (
	stateStopped = "is stopped by a signal or a debugger"
	stateKernel  = "does not answer, and waits in the kernel"
	stateSilent  = "does not answer"
	stateEnded   = "has ended"
)

// waitState returns a worker's account, from its failure report or its answer, else the launcher's observation.
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

// silence returns why a process may not answer.
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

// waited returns the table of a start in which a rank has waited for too long; "" if none has.
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

// killStopped ends the workers that are stopped, since they cannot end by themselves, and looks again while there
// are workers, since one may be stopped only after another has failed.
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
	_, state, ok := bytes.Cut(stat, []byte(") ")) // behind its name, which may hold anything
	if err != nil || !ok || len(state) == 0 {
		return 0
	}
	return state[0]
}

// What is said of a worker that has said nothing yet, since it is on its way.
const stateStarts = "starts"

// glimpses is how many times Job.Watch an answer is good for: a worker that has much to do may be late.
const freshPeriods = 3

// watch begins to look at the workers, where somebody wants to know. Its second result ends that, and tells that there
// is nothing to see any more.
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

// look passes on the answers so far if some are missing, and asks the workers anew, except the silent ones, so that
// nothing piles up at a stopped worker.
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

// passOnWhenWhole passes on what the workers have said when no one is left who might answer.
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

// glance returns a worker's last answer, or what can be seen of it from here.
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
