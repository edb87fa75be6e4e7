package cluster

import (
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
)

// A coordinator is an agent's part in the job without goroutines, connections or clock. Its caller passes events and
// the time; it acts through effects. One goroutine calls it.
type coordinator struct {
	cfg       *Config
	self      Member // NodeRank as requested
	effects   effects
	now       time.Time
	startedAt time.Time

	role         role
	atRendezvous bool      // this agent is at the rendezvous
	leader       string    // name of the leader; "": unknown
	seekingSince time.Time // when the leader was lost, or the agent started
	yieldUntil   time.Time // until then, another candidate campaigns
	ballot       ballot    // under which this agent leads or led
	maxBallot    int       // the highest number of any ballot seen

	register     register
	proposal     *proposal    // for the next decision; nil: none
	record       *startRecord // on the leader: the start of the last decision, until its verdict
	regroup      *regroup     // on the leader: between a verdict and the next decision
	tally        tally
	peers        map[string]*peer // connected agents, by name
	joins        int
	dials        map[string]*dialing
	suspects     map[string]time.Time // agents that may be lost, and until when to avoid them
	hints        []gossip.Peer        // agents that seem alive
	caller       caller
	confirming   *confirmations  // the end is decided, and agents confirm it; nil: not yet
	verdict      *launch.Verdict // all failures, if this agent proposed the end
	leaderLoss   launch.Failure  // the loss of the leader of start leaderLossAt
	leaderLossAt int             // index of that start; 0: none
	prepareErr   error           // the error of this agent's Prepare that ended the job
	goodbye      *bye            // this agent's last message, once it leaves
	goodbyeBy    time.Time       // latest time for it
	over         bool            // nothing more happens
	probedAt     time.Time
	lastRefusal  string    // error of the last dial of the rendezvous
	foreignSince time.Time // since when a foreign process answers there; zero: none does
	warnedAt     time.Time // when the user was last warned of it

	lastForeign   string // the last logged refusal
	lastForeignAt time.Time
}

// A role is an agent's part in the job.
type role int

// The roles.
const (
	seeking     role = iota // looks for the leader
	following               // is connected to the leader
	campaigning             // asks for promises, to lead
	leading
)

func (r role) String() string {
	return [...]string{"seeking", "following", "campaigning", "leading"}[r]
}

// An effects value performs the coordinator's actions. No method blocks or calls back.
type effects interface {
	dial(addr string)
	hangUp(name string) // after the queued messages
	send(m *message, names ...string)
	prepare(w Assignment)
	// begin passes a start to the caller of Next. over ends Next with an error.
	begin(d *decision)
	over(err error)
	verdict(v launch.Verdict)
	news(n launch.News)
	gone() // Close may continue
	log(format string, args ...any)
}

// A caller is the state of this agent's launcher.
type caller struct {
	start      int           // index of its last start
	running    bool          // that start has not ended here
	ended      *ended        // how it ended
	waiting    bool          // in Next
	ending     bool          // in End
	knowsError bool          // the error is the launcher's own
	pending    []launch.News // of a start that it has not begun
	fatal      *launch.Over  // the result of all later calls
	endedAt    time.Time     // when it ended
}

func newCoordinator(cfg *Config, self Member, fx effects, now time.Time) *coordinator {
	return &coordinator{
		cfg: cfg, self: self, effects: fx, now: now, startedAt: now, seekingSince: now,
		peers: map[string]*peer{}, dials: map[string]*dialing{}, suspects: map[string]time.Time{},
		tally: tally{Retries: launch.Retries{Max: cfg.MaxRestarts}},
	}
}

func (c *coordinator) selfAddr() PeerAddr { return PeerAddr{c.self.Name, c.self.Addr} }

// status returns this agent's view of the job, for its peers.
func (c *coordinator) status() status {
	s := status{Index: c.register.index}
	switch {
	case c.role == leading:
		s.Leader, s.Ballot = c.selfAddr(), c.ballot
	case c.role == following:
		if p := c.peers[c.leader]; p != nil {
			s.Leader = PeerAddr{p.Name, p.Addr}
		}
	}
	return s
}

func (c *coordinator) hello() hello {
	return hello{Member: c.self, Program: c.cfg.Program, Inputs: c.cfg.Inputs, Status: c.status()}
}

func (c *coordinator) receive(from string, msg *message) {
	p := c.peers[from]
	if p == nil || c.over {
		return
	}
	switch {
	case msg.Status != nil:
		c.onStatus(p, msg.Status)
	case msg.Join != nil:
		c.onJoin(p, msg.Join)
	case msg.Refuse != nil:
		c.onRefuse(p, *msg.Refuse)
	case msg.Note != nil:
		c.effects.log("%s", *msg.Note)
	case msg.Prepare != nil:
		c.onPrepare(p, msg.Prepare)
	case msg.Promise != nil:
		c.countPromise(p.Name, msg.Promise)
	case msg.Accept != nil:
		c.onAccept(p, msg.Accept)
	case msg.Accepted != nil:
		c.countAccepted(p.Name, msg.Accepted)
	case msg.Nack != nil:
		c.onNack(p, msg.Nack)
	case msg.Decided != nil:
		c.onDecided(p, msg.Decided)
	case msg.News != nil:
		c.onNews(p.Name, msg.News)
	case msg.Ended != nil:
		c.onEnded(p.Name, msg.Ended)
	case msg.Again != nil:
		c.onAgain(p, msg.Again)
	case msg.EndConfirmed != nil && *msg.EndConfirmed == c.register.index:
		c.confirmEnd(p.Name)
	case msg.Bye != nil:
		c.onBye(p, msg.Bye)
	}
}

func (c *coordinator) tick() {
	if c.over {
		return
	}
	for name, until := range c.suspects {
		if c.now.After(until) {
			delete(c.suspects, name)
		}
	}
	switch c.role {
	case seeking:
		c.seek()
	case campaigning:
		c.retryProposal()
		c.giveUp()
	case leading:
		c.lead()
	case following:
		c.closeExtraLinks()
	}
	if c.goodbye != nil {
		c.leave()
	}
}
