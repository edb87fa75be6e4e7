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
	"github.com/cprun/cprun/internal/launch/standing"
)

const (
	// answerTime bounds the workers' answers about their waits. They come from separate goroutines, so a slower worker
	// is stopped, or has no processor.
	answerTime = 1500 * time.Millisecond
	// tableTime bounds the answers of other nodes.
	tableTime = 2 * time.Second
)

// An inquiry is a table that is being made. The zero inquiry is none.
type inquiry struct {
	timer        <-chan time.Time    // when it is shown as it is
	ours, theirs bool                // the user has asked here; at another node, which gets the rows
	other        []standing.Standing // of ranks of other nodes
}

// inquire asks the workers what they wait for, and maybe for the stacks of all their goroutines. An answer
// is about the moment in which it is made, whichever request it is to.
func (t *attempt) inquire(stacks bool) {
	frame, err := encodeFrame(command{Kind: commandTell, Stacks: stacks})
	for _, c := range t.children {
		if err == nil && !c.ended && len(c.commands) == 0 { // one that has not read the last is not asked again
			c.commands <- frame
		}
	}
}

// inquireAnew forgets the answers so far, and asks.
func (t *attempt) inquireAnew(stacks bool) {
	for _, c := range t.children {
		c.told = nil
	}
	t.inquire(stacks)
}

// timeOut asks for stacks as well, at the first report of a rank that has waited for too long.
func (t *attempt) timeOut(r *FailureReport) {
	switch {
	case !r.TimedOut || t.timedOut:
		return
	case t.failing:
		t.inquire(true)
	default:
		t.inquireAnew(true)
	}
	t.timedOut = true
}

// table asks for the rows of a table, which is shown when all have come, or after a time.
func (t *attempt) table(ours bool) {
	i, after := &t.inquiry, answerTime
	if ours && !i.ours {
		t.cohort.Say(News{Ask: true})
		if t.Place.WorldSize > t.job.NProc {
			after = tableTime
		}
	}
	begun := i.ours || i.theirs
	i.ours, i.theirs = i.ours || ours, i.theirs || !ours
	if !begun {
		i.timer = time.After(after)
		t.inquireAnew(true)
	}
}

// answered records a worker's answer about its waits.
func (t *attempt) answered(c *child, e Event) {
	if s, err := standing.Decode(e.Data); err == nil {
		c.told, c.asked = &s, false
		c.glimpse, c.glimpsed = &s, time.Now()
		t.passOnWhenWhole()
		t.showWhenWhole()
	}
}

// passedOn takes the rows of another node.
func (t *attempt) passedOn(rows []standing.Standing) {
	if t.inquiry.timer == nil {
		return
	}
	for i := range rows {
		rows[i].Clean()
	}
	t.inquiry.other = append(t.inquiry.other, rows[:min(len(rows), t.Place.WorldSize-len(t.inquiry.other))]...)
	t.showWhenWhole()
}

// showWhenWhole shows the table once no one is left who might answer.
func (t *attempt) showWhenWhole() {
	if t.inquiry.timer == nil {
		return
	}
	for _, c := range t.children {
		if !c.ended && c.told == nil {
			return
		}
	}
	if !t.inquiry.ours || len(t.inquiry.other)+t.job.NProc >= t.Place.WorldSize {
		t.show()
	}
}

// show shows the table as far as it has come, or passes this node's rows on.
func (t *attempt) show() {
	var rows []standing.Standing
	for _, c := range t.children {
		rows = append(rows, t.row(c))
	}
	i := t.inquiry
	t.inquiry = inquiry{}
	if i.theirs {
		t.cohort.Say(News{Standings: rows})
	}
	if !i.ours {
		return
	}
	rows = append(rows, i.other...)
	t.say(fmt.Sprintf("cprun: what each rank waits for (stacks of all goroutines: %s)\n%s",
		terminal.Name(t.Logs.Name()), standing.Table(rows)))
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
		t.introduce(n.Addrs)
	case n.Failed != nil || n.Lost != "":
		failed := -1
		if n.Failed != nil {
			failed = *n.Failed
		}
		t.fail(failed, n.Lost)
	case n.Ask:
		t.table(false)
	case n.Standings != nil:
		t.passedOn(n.Standings)
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
		t.cohort.Say(News{Addrs: addrs})
	}
}

// introduce tells the workers where all ranks are. Those of this node meet in its private directory.
func (t *attempt) introduce(addrs []string) {
	if t.introduced || len(addrs) != t.Place.WorldSize {
		return
	}
	t.introduced = true
	addrs = slices.Clone(addrs)
	for r := range t.job.NProc {
		addrs[t.Place.FirstRank+r] = ""
	}
	t.tell(command{Kind: commandPeers, Addrs: addrs})
}

// What is said of ranks that say nothing themselves.
const (
	stateStopped = "is stopped by a signal or a debugger"
	stateKernel  = "does not answer, and waits in the kernel"
	stateSilent  = "does not answer"
	stateEnded   = "has ended"
)

// row returns a worker's own account, or the launcher's observations.
func (t *attempt) row(c *child) standing.Standing {
	s := standing.Standing{Step: c.lastStep, State: c.state}
	switch {
	case c.seen.report != nil && c.seen.report.Standing != nil:
		s = *c.seen.report.Standing
	case c.told != nil:
		s = *c.told
	case s.State != "":
	case c.ended:
		s.State = stateEnded
	default:
		s.State = silence(c.pid)
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}

// silence returns why a process may not answer.
func silence(pid int) string {
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
func waited(fs []Failure) string {
	var rows []standing.Standing
	timedOut := false
	for i := range fs {
		timedOut = timedOut || fs[i].TimedOut
		if s := fs[i].Standing; s != nil {
			s.Clean() // it may come from another node
			rows = append(rows, *s)
		}
	}
	if !timedOut || len(rows) == 0 {
		return ""
	}
	return "cprun: what each rank waited for\n" + standing.Table(rows)
}

// stoppedEvery separates two checks for stopped workers.
const stoppedEvery = 50 * time.Millisecond

// killStopped ends the workers that are stopped, since they cannot end by themselves, and looks again while there
// are workers, since one may be stopped only after another has failed.
func (t *attempt) killStopped() {
	t.stopped = time.After(stoppedEvery)
	for _, c := range t.children {
		if !c.ended && c.state != stateStopped && silence(c.pid) == stateStopped {
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
const glimpses = 3

// watch begins to look at the workers, where somebody wants to know. Its second result ends that, and tells that there
// is nothing to see any more.
func (t *attempt) watch() (look <-chan time.Time, end func()) {
	if t.job.OnStanding == nil || t.job.Watch <= 0 {
		return nil, func() {}
	}
	ticker := time.NewTicker(t.job.Watch)
	return ticker.C, func() {
		ticker.Stop()
		t.mail.put(false, func() { t.job.OnStanding(nil) })
	}
}

// look passes on the answers so far if some are missing, and asks the workers anew, except the silent ones, so that
// nothing piles up at a stopped worker.
func (t *attempt) look() {
	if t.looking {
		t.passOn()
	}
	t.looking = true
	frame, err := encodeFrame(command{Kind: commandTell})
	for _, c := range t.children {
		if err == nil && !c.ended && !c.asked && len(c.commands) == 0 {
			c.asked = true
			c.commands <- frame
		}
	}
}

// passOnWhenWhole passes on what the workers have said when no one is left who might answer.
func (t *attempt) passOnWhenWhole() {
	for _, c := range t.children {
		if !c.ended && c.asked {
			return
		}
	}
	if t.looking {
		t.passOn()
	}
}

func (t *attempt) passOn() {
	t.looking = false
	rows := make([]standing.Standing, 0, len(t.children))
	for _, c := range t.children {
		rows = append(rows, t.glance(c))
	}
	t.mail.put(true, func() { t.job.OnStanding(rows) })
}

// glance returns a worker's last answer, or what can be seen of it from here.
func (t *attempt) glance(c *child) standing.Standing {
	s := standing.Standing{Step: c.lastStep, State: c.state}
	switch {
	case c.ended:
		s.State = stateEnded
	case c.glimpse != nil && time.Since(c.glimpsed) <= glimpses*t.job.Watch:
		s = *c.glimpse
	case s.State != "":
	default:
		if s.State = silence(c.pid); s.State == stateSilent && c.glimpse == nil {
			s.State = stateStarts
		}
	}
	s.Rank, s.Host, s.PID = c.rank, t.job.Node, c.pid
	return s
}
