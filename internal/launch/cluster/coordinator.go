package cluster

import (
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// A machine is an agent's part in the job, without goroutines, connections or a clock of its own: it is told
// what happens, at which time, and answers through effects. One goroutine calls it.
type coordinator struct {
	cfg       *Config
	self      Member // NodeRank as it is wanted
	effects   effects
	now       time.Time
	startedAt time.Time

	role         role
	atRendezvous bool      // this agent is at the meeting place
	leader       string    // name of the agent that leads; "": no one, as far as this one knows
	seekingSince time.Time // when the leader was lost, or the agent began
	yieldUntil   time.Time // until then another candidate has the field
	ballot       ballot    // under which this agent leads, or has led
	maxBallot    int       // the highest number of a ballot that this agent has heard of

	register     register
	proposal     *proposal    // this agent's own, for the decision after the last
	record       *startRecord // on the leader: the start of the last decision, until its verdict
	regroup      *regroup     // on the leader: between a verdict and the next decision
	tally        tally
	peers        map[string]*peer // that are connected, by name
	joins        int
	dials        map[string]*dialing
	suspects     map[string]time.Time // agents that may be gone, and until when they are thought to be
	hints        []PeerAddr           // of the discovery
	caller       caller
	confirming   *confirmations  // the end is decided, and the others are being told
	verdict      *launch.Verdict // the full end, if this agent has proposed it
	leaderLoss   launch.Failure  // the loss of the leader of the start of the decision orphanedAt
	leaderLossAt int             // 0: none was lost
	prepareErr   error           // of the end, as the caller's Prepare has given it
	goodbye      *bye            // this agent leaves, and how
	goodbyeBy    time.Time       // at the latest
	over         bool            // nothing more happens
	probedAt     time.Time
	lastRefusal  string    // how the last dial of the meeting place has failed
	foreignSince time.Time // since when a stranger is there; zero: none is
	warnedAt     time.Time // when the user was told

	lastForeign   string // of whom the user was last told
	lastForeignAt time.Time
}

// A role is an agent's part in the job.
type role int

// The roles.
const (
	seeking     role = iota // looks for the agent that leads
	following               // is connected with it
	campaigning             // asks for promises, to lead
	leading
)

func (r role) String() string {
	return [...]string{"seeking", "following", "campaigning", "leading"}[r]
}

// An effects value is all that a machine does to the world. Nothing of it blocks, or calls back.
type effects interface {
	dial(addr string)
	hangUp(name string) // when what was sent to it before is gone
	send(m *message, names ...string)
	prepare(w Assignment)
	// begin hands a start to the caller of Next, and over ends its wait for one.
	begin(d *decision)
	over(err error)
	verdict(v launch.Verdict)
	news(n launch.News)
	gone() // what Close waits for
	log(format string, args ...any)
}

// local is this agent's caller.
type caller struct {
	start      int           // index of the last start that it was given
	running    bool          // it has not told of the end of it
	ended      *ended        // how that one has ended
	waiting    bool          // for the next start
	ending     bool          // for a verdict
	knowsError bool          // the caller knows why
	pending    []launch.News // of a start that it has not begun
	fatal      *launch.Over  // the result of all later calls
	endedAt    time.Time     // it has told so
}

func newCoordinator(cfg *Config, self Member, fx effects, now time.Time) *coordinator {
	return &coordinator{
		cfg: cfg, self: self, effects: fx, now: now, startedAt: now, seekingSince: now,
		peers: map[string]*peer{}, dials: map[string]*dialing{}, suspects: map[string]time.Time{},
		tally: tally{Retries: launch.Retries{Max: cfg.MaxRestarts}},
	}
}

func (c *coordinator) selfAddr() PeerAddr { return PeerAddr{c.self.Name, c.self.Addr} }

// status returns what this agent tells others of the job.
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

// receive: a peer has sent a message.
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
		c.onPromise(p, msg.Promise)
	case msg.Accept != nil:
		c.onAccept(p, msg.Accept)
	case msg.Accepted != nil:
		c.onAccepted(p, msg.Accepted)
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
	case msg.EndConfirmed != nil:
		c.onConfirmed(p.Name, *msg.EndConfirmed)
	case msg.Bye != nil:
		c.onBye(p, msg.Bye)
	}
}

// tick: time has passed.
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
		c.campaign()
	case leading:
		c.lead()
	case following:
		c.closeExtraLinks()
	}
	if c.goodbye != nil {
		c.leave()
	}
}
