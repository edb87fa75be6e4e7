package cluster

import (
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// A machine is an agent's part in the job, without goroutines, connections or a clock of its own: it is told
// what happens, at which time, and answers through effects. One goroutine calls it.
type machine struct {
	cfg   *Config
	self  Member // NodeRank as it is wanted
	fx    effects
	now   time.Time
	begun time.Time

	role   role
	meets  bool      // this agent is at the meeting place
	leader string    // name of the agent that leads; "": no one, as far as this one knows
	since  time.Time // when the leader was lost, or the agent began
	yield  time.Time // until then another candidate has the field
	under  ballot    // under which this agent leads, or has led
	rival  int       // the highest number of a ballot that this agent has heard of

	reg        register
	prop       *proposal // this agent's own, for the decision after the last
	run        *run      // on the leader: the start of the last decision, until its verdict
	gather     *gather   // on the leader: between a verdict and the next decision
	tally      tally
	peers      map[string]*peer // that are connected, by name
	joins      int
	dials      map[string]*dialing
	suspects   map[string]time.Time // agents that may be gone, and until when they are thought to be
	hints      []Found              // of the discovery
	local      local
	telling    *telling        // the end is decided, and the others are being told
	last       *launch.Verdict // the full end, if this agent has proposed it
	orphaned   launch.Failure  // the loss of the leader of the start of the decision orphanedAt
	orphanedAt int             // 0: none was lost
	cause      error           // of the end, as the caller's Prepare has given it
	quit       *bye            // this agent leaves, and how
	quitBy     time.Time       // at the latest
	over       bool            // nothing more happens
	probed     time.Time
	refused    string    // how the last dial of the meeting place has failed
	stranded   time.Time // since when a stranger is there; zero: none is
	moaned     time.Time // when the user was told

	strange   string // of whom the user was last told
	strangeAt time.Time
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
	prepare(w World)
	// begin hands a start to the caller of Next, and over ends its wait for one.
	begin(d *decision)
	over(err error)
	verdict(v launch.Verdict)
	news(n launch.News)
	gone() // what Close waits for
	log(format string, args ...any)
}

// local is this agent's caller.
type local struct {
	begun   int           // index of the last start that it was given
	running bool          // it has not told of the end of it
	ended   *ended        // how that one has ended
	waiting bool          // for the next start
	ending  bool          // for a verdict
	quiet   bool          // the caller knows why
	early   []launch.News // of a start that it has not begun
	fatal   *launch.Over  // the result of all later calls
	when    time.Time     // it has told so
}

func newMachine(cfg *Config, self Member, fx effects, now time.Time) *machine {
	return &machine{
		cfg: cfg, self: self, fx: fx, now: now, begun: now, since: now,
		peers: map[string]*peer{}, dials: map[string]*dialing{}, suspects: map[string]time.Time{},
		tally: tally{Retries: launch.Retries{Max: cfg.MaxRestarts}},
	}
}

func (m *machine) found() Found { return Found{m.self.Name, m.self.Addr} }

// status returns what this agent tells others of the job.
func (m *machine) status() status {
	s := status{Index: m.reg.index}
	switch {
	case m.role == leading:
		s.Leader, s.Ballot = m.found(), m.under
	case m.role == following:
		if p := m.peers[m.leader]; p != nil {
			s.Leader = Found{p.Name, p.Addr}
		}
	}
	return s
}

func (m *machine) hello() hello {
	return hello{Agent: m.self, Program: m.cfg.Program, Inputs: m.cfg.Inputs, Status: m.status()}
}

// receive: a peer has sent a message.
func (m *machine) receive(from string, msg *message) {
	p := m.peers[from]
	if p == nil || m.over {
		return
	}
	switch {
	case msg.Status != nil:
		m.onStatus(p, msg.Status)
	case msg.Join != nil:
		m.onJoin(p, msg.Join)
	case msg.Refuse != nil:
		m.onRefuse(p, *msg.Refuse)
	case msg.Note != nil:
		m.fx.log("%s", *msg.Note)
	case msg.Prepare != nil:
		m.onPrepare(p, msg.Prepare)
	case msg.Promise != nil:
		m.onPromise(p, msg.Promise)
	case msg.Accept != nil:
		m.onAccept(p, msg.Accept)
	case msg.Accepted != nil:
		m.onAccepted(p, msg.Accepted)
	case msg.Nack != nil:
		m.onNack(p, msg.Nack)
	case msg.Decided != nil:
		m.onDecided(p, msg.Decided)
	case msg.News != nil:
		m.onNews(p.Name, msg.News)
	case msg.Ended != nil:
		m.onEnded(p.Name, msg.Ended)
	case msg.Again != nil:
		m.onAgain(p, msg.Again)
	case msg.Told != nil:
		m.onTold(p.Name, *msg.Told)
	case msg.Bye != nil:
		m.onBye(p, msg.Bye)
	}
}

// tick: time has passed.
func (m *machine) tick() {
	if m.over {
		return
	}
	for name, until := range m.suspects {
		if m.now.After(until) {
			delete(m.suspects, name)
		}
	}
	switch m.role {
	case seeking:
		m.seek()
	case campaigning:
		m.campaign()
	case leading:
		m.lead()
	case following:
		m.tidy()
	}
	if m.quit != nil {
		m.leave()
	}
}
