package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

const (
	// endTime bounds the wait for a quorum, and for the run directory, before the end of the job.
	endTime = 2 * time.Second
	// rejoinTime bounds a restart's wait for lost agents or spares when fewer agents are enough.
	rejoinTime = 2 * time.Second
	// prepareTime bounds RunDir.Prepare, which may hang on a disk.
	prepareTime = 30 * time.Minute
	// claimPause separates two claims of a decision after an error of the file system.
	claimPause = time.Second
)

// A leadership is an agent's part as leader: it admits agents, records how a start ends on each, and makes the next
// decision. A candidate is a leader without enough followers: it only admits.
type leadership struct {
	*coordinator
	term       int
	joins      int
	record     *record        // the start of the last decision; nil: none
	regroup    *regroup       // between a verdict and the next decision; nil: a start runs
	claim      *claim         // the next decision, until the run directory has it
	verdict    launch.Verdict // of the end in claim, for this agent's launcher
	prepareErr error          // of Prepare, which ended the job
	probedAt   time.Time
}

// A regroup is the wait for the agents of the next start.
type regroup struct {
	since        time.Time   // when it began
	lastJoin     time.Time   // when the last new agent joined
	again        *again      // the preceding verdict; nil: none
	preparing    *Assignment // the assignment in Prepare; nil: none
	prepareBegan time.Time
	reported     int // number of agents last logged
	reportedAt   time.Time
}

// campaign dials the members of the last world, and leads once a quorum has joined.
func (l *leadership) campaign() {
	if !l.quorum() {
		for _, m := range l.world().Members {
			l.dial(m.Addr)
		}
		return
	}
	l.setRole(leading, "")
	l.cfg.Log("this node now leads the job")
	l.record = newRecord(l.world(), l.now)
	for name, p := range l.record.members {
		p.absent = name != l.self.Name
	}
	l.admitHeld()
	if e := l.caller.endingOf(l.index); e != nil {
		l.onEnded(l.self.Name, e)
	}
	l.serve()
	l.judge()
}

// yields reports whether this leader or candidate gives way to p: to a leader of a later term, since the others
// followed it while they could not reach this one; of two candidates, to the first of the last world. l may be nil.
func (l *leadership) yields(p *peer) bool {
	s := &p.status
	switch {
	case l == nil || l.index == 0 || s.Index != l.index || s.Leader.Name != p.Name:
		return false
	case l.role == leading:
		return !s.Candidate && l.term < s.Term
	}
	return !s.Candidate || l.world().index(p.Name) < l.world().index(l.self.Name)
}

// quorum reports whether enough members of the last world have joined to decide for all. Before the first decision,
// the agent at the rendezvous decides alone.
func (l *leadership) quorum() bool {
	return l.index == 0 || quorum(l.world().Members, func(name string) bool {
		return name == l.self.Name || l.peers.joined(name)
	})
}

// quorum reports whether the members for which has is true decide for all: more than half, or half including the first.
func quorum(members []Member, has func(name string) bool) bool {
	n := 0
	for _, m := range members {
		if has(m.Name) {
			n++
		}
	}
	return 2*n > len(members) || len(members) > 0 && 2*n == len(members) && has(members[0].Name)
}

// lead performs the leader's periodic work.
func (l *leadership) lead() {
	l.tryClaim()
	l.checkOverdue()
	if g := l.regroup; g != nil && g.preparing != nil && l.now.Sub(g.prepareBegan) > prepareTime {
		g.preparing = nil
		l.proposeEnd(launch.Result{ExitCode: launch.ExitFailed}, fmt.Sprintf("node %s has not prepared the start in "+
			"%v: check the disks of the config, the data and the run directory there", l.self.Host, prepareTime))
	}
	l.admitHeld()
	l.tryStart()
	every := probeInterval
	if l.idle() { // agents may be looking for this job
		every = idleProbeInterval
	}
	if l.over || l.index == 0 || l.now.Sub(l.probedAt) < every {
		return
	}
	l.probedAt = l.now
	for _, seed := range l.cfg.Seeds {
		l.dial(seed)
	}
	if l.idle() { // missing members may be back
		for _, m := range l.world().Members {
			if l.peers[m.Name] == nil {
				l.dial(m.Addr)
			}
		}
	}
}

// Admission.

// onJoin admits an agent, for the first time or again.
func (l *leadership) onJoin(p *peer, j *join) {
	if p.joined == 0 {
		if why := refusal(p, l.joined(), l.cfg.Max); why != "" {
			l.hold(p, j, why)
			return
		}
		l.joins++
		p.joined = l.joins
		if l.regroup != nil {
			l.regroup.lastJoin = l.now
		}
	}
	if l.role == campaigning {
		p.held = j
		l.campaign()
		return
	}
	p.held = nil
	if r := l.record; r != nil && r.members[p.Name] != nil {
		r.members[p.Name].absent = false
		l.resendNews(p)
	} else if l.index > 0 {
		l.note(p.Name, "this node is a spare: it waits for the next start of the workers")
	}
	if j.Ended != nil {
		l.onEnded(p.Name, j.Ended)
	}
	l.tryStart()
}

func (l *leadership) admitHeld() {
	for _, p := range l.peers.sorted() {
		if p.held != nil && l.role == leading {
			l.onJoin(p, p.held)
		}
	}
}

// hold keeps an agent waiting whose rank belongs to another agent, since that one may be lost but not yet detected.
// After two timeouts it refuses the agent: the key alone gives no right to a rank.
func (l *leadership) hold(p *peer, j *join, why string) {
	p.held = j
	if l.now.Sub(p.since) < 2*l.cfg.Silence {
		return
	}
	l.cfg.Log("node %s at %s is refused: %s", p.Host, p.Addr, why)
	l.effects.send(&message{Refuse: &why}, p.Name)
	l.effects.hangUp(p.Name)
	delete(l.peers, p.Name)
}

// refusal returns the reason to refuse an agent, or "".
func refusal(p *peer, joined []candidate, most int) string {
	if p.NodeRank >= most {
		return fmt.Sprintf("it requests node rank %d of at most %d nodes", p.NodeRank, most)
	}
	for _, q := range joined {
		if p.NodeRank >= 0 && q.NodeRank == p.NodeRank {
			return fmt.Sprintf("node rank %d belongs to the live agent at %s on %s", p.NodeRank, q.Addr, q.Host)
		}
	}
	return ""
}

// joined lists this agent and those that have joined.
func (l *leadership) joined() []candidate {
	all := []candidate{{Member: l.self}}
	for _, p := range l.peers.sorted() {
		if p.joined > 0 {
			all = append(all, candidate{p.Member, p.joined})
		}
	}
	return all
}

// resendNews sends a returning agent the news of the current start that it missed.
func (l *leadership) resendNews(p *peer) {
	r := l.record
	switch {
	case r.over && l.regroup != nil && l.regroup.again != nil:
		l.effects.send(&message{Again: l.regroup.again}, p.Name)
	case r.over || r.firstFailed.IsZero():
	default:
		for _, m := range r.world.Members {
			if part := r.members[m.Name]; part.failed == 1 {
				n := launch.News{Failed: &part.FirstRank, Lost: part.lost}
				l.effects.send(&message{News: &relayed{l.index, n}}, p.Name)
			}
		}
	}
}

func (l *leadership) note(to, text string) { l.effects.send(&message{Note: &text}, to) }

// A start, and what happens during it.

// relay passes news to all agents of the start except one.
func (l *leadership) relay(except string, n launch.News) {
	for _, m := range l.world().Members {
		if m.Name != except {
			l.tell(m.Name, n)
		}
	}
}

func (l *leadership) tell(name string, n launch.News) {
	if name == l.self.Name {
		l.caller.news(l.index, n)
	} else if l.peers.joined(name) {
		l.effects.send(&message{News: &relayed{l.index, n}}, name)
	}
}

// onNews handles news of the start from one of its agents.
func (l *leadership) onNews(from string, n *relayed) {
	r := l.record
	if n.Index != l.index || r == nil || r.over || r.members[from] == nil {
		return
	}
	p := r.members[from]
	switch {
	case n.News.Addrs != nil:
		if len(n.News.Addrs) == p.NProc {
			p.addrs = n.News.Addrs
		}
		if all := r.addrs(); all != nil {
			l.relay("", launch.News{Addrs: all})
		}
	case n.News.Failed != nil:
		l.failed(p, n.News)
	case n.News.Stop != "" && r.stop == "":
		r.stop = n.News.Stop + " at node " + p.Host
		l.relay(from, launch.News{Stop: r.stop})
	case n.News.Kill:
		l.relay(from, n.News)
	case n.News.Ask: // for the wait states of all ranks: all agents answer, and the answers go to the askers
		if !slices.Contains(r.askers, from) {
			r.askers = append(r.askers, from)
		}
		l.relay(from, n.News)
	case n.News.WaitStates != nil:
		for _, name := range r.askers {
			if name != from {
				l.tell(name, n.News)
			}
		}
	}
}

// onEnded records how the start ended on an agent. A candidate keeps it until it leads.
func (l *leadership) onEnded(from string, e *ended) {
	if l.role == campaigning && l.peers[from] != nil && l.peers[from].held != nil {
		l.peers[from].held.Ended = e
	}
	if l.record == nil || e.Index != l.index {
		return
	}
	if p := l.record.end(from, e, l.now); p != nil {
		if p.faulty() {
			l.failed(p, launch.News{Failed: &p.FirstRank})
		}
		l.judge()
	}
}

// lost handles the loss of an agent's connection.
func (l *leadership) lost(p *peer, why string) {
	if r := l.record; r != nil && !r.over && r.members[p.Name].open() {
		l.markLost(r.members[p.Name], why)
		l.judge()
	}
}

// markLost records an agent as lost to the start, and informs the others.
func (l *leadership) markLost(p *part, why string) {
	p.lost = why
	l.failed(p, launch.News{Failed: &p.FirstRank, Lost: l.world().describe(p.Member) + " is lost: " + why})
}

// failed records an agent's failure. The job's first failure goes to the other agents, since their workers may wait for
// dead ranks.
func (l *leadership) failed(p *part, n launch.News) {
	if l.record.fail(p, l.now) {
		l.relay(p.Name, n)
	}
}

// checkOverdue marks late agents as lost. If this agent's own ranks are late, its launcher has to end them.
func (l *leadership) checkOverdue() {
	r := l.record
	if r == nil || r.over {
		return
	}
	for _, m := range r.world.Members {
		grace := 2 * l.cfg.Silence
		if l.search.avoids(m.Name, l.now) { // it was just lost
			grace = time.Second
		}
		p := r.members[m.Name]
		switch why := r.overdue(p, grace, l.now); {
		case why == "":
		case m.Name != l.self.Name:
			l.markLost(p, why)
		case p.failed == 0:
			n := launch.News{Failed: &p.FirstRank, Lost: l.world().describe(p.Member) + " is late: " + why}
			l.failed(p, n)
			l.caller.news(l.index, n)
		}
	}
	l.judge()
}

// judge gives the verdict once the start has ended on all agents. A claim to end the job precedes it.
func (l *leadership) judge() {
	r := l.record
	if r == nil || r.over || !r.complete() || l.claim != nil {
		return
	}
	r.over = true
	e := r.merge(l.self.Name, l.caller.knowsError)
	t := l.tally
	t.record(r.cause(e), r.lostKeys())
	v := r.verdict(&t, e)
	l.tally = t
	l.regroup = &regroup{since: l.now, lastJoin: l.now}
	if !v.Again {
		l.proposeVerdict(v)
		return
	}
	l.regroup.again = &again{l.index, t}
	msg := &message{Again: l.regroup.again}
	for _, m := range r.world.Members {
		if l.peers.joined(m.Name) {
			l.effects.send(msg, m.Name)
		}
	}
	l.caller.answer(v)
	l.tryStart()
}

// The next start.

// idle reports whether this leader is waiting for the next start.
func (l *leadership) idle() bool { return l.regroup != nil && (l.record == nil || l.record.over) }

// tryStart prepares the next start once enough agents have joined and the leader's own launcher waits for it.
func (l *leadership) tryStart() {
	g := l.regroup
	if l.role != leading || !l.idle() || l.claim != nil || g.preparing != nil || !l.caller.waiting ||
		l.goodbye != nil || l.over {
		return
	}
	joined := l.joined()
	g.report(len(joined), l.cfg, l.now)
	if !l.enough(min(len(joined), l.cfg.Max)) {
		return
	}
	agents, left := chooseMembers(joined, l.world(), &l.tally, l.cfg.Min, l.cfg.Max)
	for _, text := range left {
		l.cfg.Log("%s", text)
		for _, p := range l.peers.sorted() {
			if p.joined > 0 {
				l.note(p.Name, text)
			}
		}
	}
	w := Assignment{Generation: l.index + 1, Restart: l.tally.Retries.Done}
	w.Members, w.Size = assignRanks(agents)
	g.preparing, g.prepareBegan = &w, l.now
	l.effects.prepare(w)
}

// report prints the number of joined agents, at most every 5 seconds.
func (g *regroup) report(n int, cfg *Config, now time.Time) {
	const pause = 5 * time.Second
	if n == g.reported || now.Sub(g.reportedAt) < pause || n >= cfg.Max && g.reported == 0 {
		return
	}
	g.reported, g.reportedAt = n, now
	want := fmt.Sprint(cfg.Max)
	if cfg.Min < cfg.Max {
		want = fmt.Sprintf("%d to %d", cfg.Min, cfg.Max)
	}
	cfg.Log("%d of %s nodes have joined", n, want)
}

// enough reports whether n agents may start now. After the timeout it ends the job.
func (l *leadership) enough(n int) bool {
	g, cfg := l.regroup, l.cfg
	waited, limit, ready := l.now.Sub(g.since), cfg.RegroupTimeout, false
	if l.index == 0 {
		limit = cfg.JoinTimeout
		ready = n >= cfg.Max || n >= cfg.Min && cfg.Min < cfg.Max && l.now.Sub(g.lastJoin) >= cfg.LastCall
	} else {
		want := max(cfg.Min, min(l.tally.Target, cfg.Max))
		ready = n >= want || n >= cfg.Min && waited >= rejoinTime
	}
	if !ready && waited >= limit {
		l.proposeEnd(launch.Result{ExitCode: launch.ExitFailed}, tooFew(l.joined(), cfg.Min, limit))
	}
	return ready
}

// tooFew explains that too few nodes have joined.
func tooFew(joined []candidate, least int, after time.Duration) string {
	var hosts, missing []string
	have := map[int]bool{}
	for _, m := range joined {
		hosts = append(hosts, m.Host)
		have[m.NodeRank] = true
	}
	slices.Sort(hosts)
	why := fmt.Sprintf("only %d of at least %d nodes joined in %v: %s", len(joined), least, after,
		strings.Join(hosts[:min(len(hosts), 16)], ", "))
	for r := range least {
		if !have[r] && !have[-1] && len(missing) < 16 {
			missing = append(missing, fmt.Sprint(r))
		}
	}
	if len(missing) > 0 {
		why += "; missing node ranks: " + strings.Join(missing, ", ")
	}
	return why
}

// prepared handles the result of Prepare for an assignment. l may be nil.
func (l *leadership) prepared(generation int, payload, secret []byte, err error) {
	if l == nil || l.over {
		return
	}
	g := l.regroup
	if g == nil || g.preparing == nil || g.preparing.Generation != generation {
		return
	}
	w := *g.preparing
	g.preparing = nil
	if err != nil {
		l.prepareErr = err
		r := launch.Result{ExitCode: launch.ExitFailed}
		if said := (*launch.Over)(nil); errors.As(err, &said) {
			r, l.prepareErr = said.Result, said.Err
		}
		l.proposeEnd(r, err.Error())
		return
	}
	for _, m := range w.Members {
		if m.Name != l.self.Name && !l.peers.joined(m.Name) {
			return // lost meanwhile; tryStart chooses again
		}
	}
	t := l.tally
	if l.index == 0 {
		t.Target = len(w.Members)
	}
	l.propose(&decision{Assignment: w, Payload: payload, Secret: secret, Tally: t})
}
