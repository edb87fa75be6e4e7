package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

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
