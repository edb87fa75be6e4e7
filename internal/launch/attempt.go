package launch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

// abandonTime bounds the wait for a killed worker. The kernel cannot end one in a call to a dead disk or device; the
// launcher names it and ends without it.
const abandonTime = 20 * time.Second

// An attempt runs one start of all workers until none is left. Its methods run on loop.
type attempt struct {
	*nodeLauncher
	Start
	dir      *jobDir // its own: that of another start has old sockets, or was removed, like XDG_RUNTIME_DIR after a logout
	children []*child
	inbox    chan message
	live     int  // workers that have not ended
	gaveUp   bool // some workers cannot be killed
	order    int  // number of failures so far
	forced   bool
	ended    bool  // the context has ended
	err      error // of the launcher itself
	oom      int64 // out-of-memory kills before the start; -1: unknown

	stopSent  bool // the workers were asked to stop
	peersSent bool // the workers have all addresses
	failing   bool // a rank failed, here or elsewhere, and the others are being ended

	timedOut  bool      // a rank has waited for too long
	failedAt  time.Time // the first sign of a failure; the workers were asked for their waits then
	waitTable waitTable // the table in progress

	// escalation runs when the timer fires.
	escalation func()
	timer      <-chan time.Time
}

func (l *nodeLauncher) attempt(ctx context.Context, s Start) *attempt {
	t := &attempt{nodeLauncher: l, Start: s, inbox: make(chan message), oom: oomKills("/proc/self/cgroup", cgroupRoot)}
	look, unwatch := t.watch()
	defer unwatch()
	t.start()
	if t.asked != "" { // a signal that arrived with the start
		t.request(t.asked)
	}
	end, news := ctx.Done(), l.membership.News()
	defer func() {
		if err := t.dir.close(); err != nil {
			t.notice("private directory %s: %v", t.dir.path, err)
		}
	}()
	for t.live > 0 && !t.gaveUp {
		select {
		case m := <-t.inbox:
			t.handle(m)
		case sig := <-l.signals.c:
			t.onSignal(sig)
		case n := <-news:
			t.onNews(n)
		case <-t.timer:
			t.escalation()
		case <-t.waitTable.timer:
			t.showTable()
		case <-look:
			t.poll()
		case <-end:
			end, t.ended = nil, true
			t.killAll()
		}
	}
	if t.waitTable.timer != nil {
		t.showTable()
	}
	return t
}

// start starts the workers, up to the first one that cannot be started.
func (t *attempt) start() {
	if t.dir, t.err = newJobDir(runtimeBases()...); t.err != nil {
		return
	}
	for local := range t.job.NProc {
		c, greeting, err := t.newChild(local)
		if err != nil {
			t.err = err
			t.killAll()
			return
		}
		t.children = append(t.children, c)
		if err := c.start(greeting, t.inbox); err != nil {
			c.relay.log.Close()
			close(c.relay.done)
			c.ended, c.evidence.startErr = true, err
			t.onFailed(c)
			return
		}
		t.live++
	}
}

func (t *attempt) handle(m message) {
	c := m.child
	switch {
	case m.event != nil:
		t.onEvent(c, *m.event)
	case m.fault != nil:
		c.evidence.fault = m.fault
		t.onFailed(c)
	default:
		t.live--
		c.evidence.exit, c.ended = c.reap(), true
		close(c.commands)
		c.evidence.endedByUs = c.endedByUs(c.evidence.exit)
		_, c.evidence.crash = c.relay.ended()
		if c.evidence.exit.Signal() == unix.SIGKILL && !c.evidence.endedByUs && t.oom >= 0 {
			c.evidence.oomKilled = oomKills("/proc/self/cgroup", cgroupRoot) > t.oom
		}
		if judge(c.evidence).class != classNone {
			t.onFailed(c)
		}
	}
}

func (t *attempt) onEvent(c *child, e Event) {
	if e.Step > 0 && e.Kind != EventFailed { // a failed step was not completed
		c.lastStep = e.Step
		t.maxStep = max(t.maxStep, e.Step)
	}
	switch e.Kind {
	case EventReady:
		c.attached = true
	case EventListening:
		t.listening(c, e)
	case EventDone, EventStopped:
		c.evidence.finished = e.Kind
		t.awaitExits()
	case EventFailed:
		report := new(Failure)
		if err := json.Unmarshal(e.Data, report); err != nil {
			report = &Failure{Cause: fmt.Sprintf("failure report: %v", err)}
		}
		report.Cause = terminal.Message(errors.New(cmp.Or(strings.TrimSpace(report.Cause), "no reason given")))
		report.Phase = waits.Word(report.Phase)
		if report.WaitState != nil {
			report.WaitState.Clean()
		}
		c.evidence.report = report
		t.onTimeout(report.TimedOut)
		t.onFailed(c)
	case EventStatus:
		t.onStatus(c, e)
		return
	}
	if call := t.job.OnEvent; call != nil {
		t.con.put(e.Kind == EventProgress, func() { call(c.rank, e) })
	}
}

// onFailed records a worker's first sign of failure.
func (t *attempt) onFailed(c *child) {
	if c.evidence.order != 0 {
		return
	}
	t.order++
	c.evidence.order = t.order
	t.membership.Publish(News{Failed: &c.rank})
	t.abort(c.rank, "")
}

// abort ends the live workers, since a rank has failed, here or elsewhere. why is the cause if the ranks cannot learn
// it from each other. First they get time to end by themselves, since they lose their connections and report reasons.
func (t *attempt) abort(rank int, why string) {
	if t.failing {
		return
	}
	t.failing = true
	t.onFault(false) // a hanging worker reports its waits only on request
	t.broadcast(command{Failed: &Failed{rank, why}})
	for _, c := range t.children {
		if !c.ended && c.observe() == stateStopped { // it cannot end by itself
			c.kill()
		}
	}
	t.after(t.job.times.settle, func() {
		for _, c := range t.children {
			if c.answeredSince(t.failedAt) {
				c.signal(unix.SIGTERM)
			} else { // it had time enough: it hangs, and would not handle the signal
				c.kill()
			}
		}
		t.after(t.job.times.grace, t.killAll)
	})
}

// broadcast sends a command to the live workers.
func (t *attempt) broadcast(c command) {
	frame, err := encodeFrame(c)
	for _, to := range t.children {
		if err == nil {
			to.post(frame)
		}
	}
}

// awaitExits limits the time until all workers are done after the first, and until all exit after the last. A worker
// that hangs at the end must not hang the job.
func (t *attempt) awaitExits() {
	if t.failing || t.forced || t.ended {
		return // these cases have limits of their own
	}
	working, limit := slices.ContainsFunc(t.children, (*child).working), t.job.times.exit
	if working {
		if limit = t.job.times.last; t.timer != nil {
			return
		}
	}
	t.after(limit, func() {
		t.onTimeout(true)
		for _, c := range t.children {
			if !c.ended && c.working() == working {
				c.evidence.overLimit = limit
				t.onFailed(c)
			}
		}
	})
}

func (t *attempt) after(d time.Duration, then func()) {
	t.timer, t.escalation = time.After(d), then
}

func (t *attempt) killAll() {
	for _, c := range t.children {
		c.kill()
	}
	t.after(abandonTime, func() {
		for _, c := range t.children {
			if !c.ended {
				t.say("rank %d (pid %d) does not end after SIGKILL: it hangs in the kernel", c.rank, c.pid)
			}
		}
		t.gaveUp = true
	})
}

func (t *attempt) onSignal(sig os.Signal) {
	name := signalName(sig.(syscall.Signal))
	switch t.policy.on(sig, time.Now()) {
	case actStop:
		t.request(name)
	case actKill:
		t.force()
	case actStatus:
		t.startTable(true)
	case actNone:
	}
}

func (t *attempt) force() {
	t.membership.Publish(News{Kill: true})
	t.forced = true
	t.killAll()
}

// request passes on the first request to stop. by names the signal.
func (t *attempt) request(by string) {
	if t.job.Stateless {
		t.asked = by
		t.force()
		return
	}
	t.membership.Publish(News{Stop: by})
	t.stop(by)
}

// stop asks the workers for a checkpoint and a clean end. by names the signal and the node.
func (t *attempt) stop(by string) {
	if t.stopSent {
		return
	}
	t.stopSent, t.asked = true, by
	t.broadcast(command{Stop: by})
	t.notice("%s: the workers are asked for a checkpoint and a clean end; Ctrl-C ends them at once", by)
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
	t.broadcast(command{Peers: addrs})
}
