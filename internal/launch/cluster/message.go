package cluster

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"unicode"

	"github.com/cprun/cprun/internal/launch"
)

// A hello is an agent's introduction in a handshake.
type hello struct {
	Member  Member `json:"agent"` // NodeRank as it is wanted, FirstRank 0
	Program string `json:"program"`
	Inputs  string `json:"inputs"`
	Status  status `json:"status"`
}

// A message passes between agents after the hello. One field is set.
type message struct {
	Status       *status   `json:"status,omitempty"`
	Join         *join     `json:"join,omitempty"`
	Refuse       *string   `json:"refuse,omitempty"` // the leader does not take the agent: why
	Note         *string   `json:"note,omitempty"`   // the leader tells the user of another node
	Prepare      *prepare  `json:"prepare,omitempty"`
	Promise      *promise  `json:"promise,omitempty"`
	Accept       *accept   `json:"accept,omitempty"`
	Accepted     *accepted `json:"accepted,omitempty"`
	Nack         *nack     `json:"nack,omitempty"`
	Decided      *decision `json:"decided,omitempty"`
	News         *relayed  `json:"news,omitempty"`
	Ended        *ended    `json:"ended,omitempty"`
	Again        *again    `json:"again,omitempty"`
	EndConfirmed *int      `json:"told,omitempty"` // the end was heard: index of the decision
	Bye          *bye      `json:"bye,omitempty"`
}

// A status names the index of the last decision, and who leads.
type status struct {
	Index  int      `json:"index"`
	Leader PeerAddr `json:"leader"` // Name "": none known
	Ballot ballot   `json:"ballot"` // under which it leads itself
}

// join asks an agent that leads to be taken in, or back.
type join struct {
	// Ended is how the start of the last decision has ended there, if it has.
	Ended *ended `json:"ended,omitempty"`
}

// relayed is news of a start, from an agent to the leader and from it to the others.
type relayed struct {
	Index int         `json:"index"`
	News  launch.News `json:"news"`
}

// An ended is how a start has ended on one node.
type ended struct {
	Index  int           `json:"index"`
	Ending launch.Ending `json:"ending"`
	Fault  string        `json:"fault,omitempty"` // Ending.Err
}

// again says that another start follows.
type again struct {
	Index int   `json:"index"` // of the start that has ended
	Tally tally `json:"tally"`
	After int64 `json:"after"` // ns
}

// A bye is the last message of an agent.
type bye struct {
	Status int    `json:"status"`
	Why    string `json:"why,omitempty"`
	All    bool   `json:"all,omitempty"` // its followers give up as well
}

// A decision is one link of the chain of a job: its next start, or its end. What counts as agreed is in
// propose.go.
type decision struct {
	Index      int        `json:"index"`
	Leader     PeerAddr   `json:"leader"` // who has put it forward
	Assignment Assignment `json:"world"`  // at the end, the last one
	Payload    []byte     `json:"payload,omitempty"`
	Secret     []byte     `json:"secret,omitempty"`
	Tally      tally      `json:"tally"`
	End        *outcome   `json:"end,omitempty"` // nil: a start
}

// An outcome is how a job ends.
type outcome struct {
	ExitCode int             `json:"exit_code"`
	Stopped  bool            `json:"stopped,omitempty"`
	Restarts int             `json:"restarts,omitempty"`
	First    *launch.Failure `json:"first,omitempty"`
	Why      string          `json:"why,omitempty"` // where no rank is to blame
}

// result returns the outcome as internal/launch has it.
func (o *outcome) result() launch.Result {
	r := launch.Result{ExitCode: o.ExitCode, Stopped: o.Stopped, Restarts: o.Restarts, First: o.First}
	if o.First != nil {
		r.Failures = []launch.Failure{*o.First}
	}
	if o.Why != "" && o.First == nil && o.ExitCode != launch.ExitStopped {
		r.Err = errors.New(o.Why)
	}
	return r
}

// over returns how the job is over for an agent that waits, which prints why.
func over(r launch.Result, why string) *launch.Over {
	r.Err = nil
	return &launch.Over{Result: r, Why: why}
}

// decodeStrict reads one JSON value with known fields, and nothing after it.
func decodeStrict(raw []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more behind its end")
	}
	return nil
}

// decodeMessage reads a message of an agent, and refuses what no agent sends.
func decodeMessage(raw []byte) (*message, error) {
	m := new(message)
	if err := decodeStrict(raw, m); err != nil {
		return nil, fmt.Errorf("message: %w", err)
	}
	set := 0
	for _, f := range reflect.ValueOf(m).Elem().Fields() {
		if !f.IsNil() {
			set++
		}
	}
	if set != 1 {
		return nil, fmt.Errorf("message: %d fields are set, want one", set)
	}
	return m, m.check()
}

// World is the agents of one start of the workers.
type Assignment struct {
	Generation int      `json:"generation"` // counts worlds, from 1; no two of a job have the same
	Restart    int      `json:"restart"`    // of the workers, from 0
	Members    []Member `json:"agents"`     // by rank of their first worker
	Size       int      `json:"size"`       // workers of all agents
}

// Member is an agent's place in a world.
type Member struct {
	Name      string `json:"name"` // unique: the host, and a digest of the agent's key
	Host      string `json:"host"`
	HostID    string `json:"host_id"` // agents with the same one share a host
	NodeRank  int    `json:"node_rank"`
	FirstRank int    `json:"first_rank"` // of its workers
	NProc     int    `json:"nproc"`
	Addr      string `json:"addr"` // host:port of its control connections
}

// index returns the place of the agent of that name in Agents, or -1.
func (w *Assignment) index(name string) int {
	return slices.IndexFunc(w.Members, func(m Member) bool { return m.Name == name })
}

// place puts agents in order and gives their workers ranks: agents of one host are neighbours, and hosts
// come in the order of their lowest node rank.
func assignRanks(agents []Member) (placed []Member, size int) {
	lowest := map[string]int{}
	for _, m := range agents {
		if l, ok := lowest[m.HostID]; !ok || m.NodeRank < l {
			lowest[m.HostID] = m.NodeRank
		}
	}
	placed = slices.Clone(agents)
	slices.SortFunc(placed, func(a, b Member) int {
		return cmp.Or(cmp.Compare(lowest[a.HostID], lowest[b.HostID]), cmp.Compare(a.HostID, b.HostID),
			cmp.Compare(a.NodeRank, b.NodeRank))
	})
	for i := range placed {
		placed[i].FirstRank = size
		size += placed[i].NProc
	}
	return placed, size
}

// What other agents send is checked once, where it is read: the rest of the package trusts it to be
// of one piece. It trusts no agent to be another.

const (
	maxText     = 8 << 10 // of a reason
	maxFailures = maxAgents * 8
)

// check refuses a message that no agent sends.
func (m *message) check() error {
	switch {
	case m.Status != nil:
		return m.Status.check()
	case m.Join != nil && m.Join.Ended != nil:
		return m.Join.Ended.check()
	case m.Refuse != nil:
		return checkText(*m.Refuse)
	case m.Note != nil:
		return checkText(*m.Note)
	case m.Promise != nil && m.Promise.Accepted != nil:
		return m.Promise.Accepted.check()
	case m.Accept != nil:
		return m.Accept.Decision.check()
	case m.Nack != nil:
		return m.Nack.Leader.check()
	case m.Decided != nil:
		return m.Decided.check()
	case m.News != nil:
		return checkNews(&m.News.News)
	case m.Ended != nil:
		return m.Ended.check()
	case m.Again != nil:
		return m.Again.check()
	case m.Bye != nil:
		return checkText(m.Bye.Why)
	}
	return nil
}

func checkText(s string) error {
	if len(s) > maxText {
		return fmt.Errorf("text of %d bytes: at most %d are allowed", len(s), maxText)
	}
	return nil
}

func (s *status) check() error {
	if s.Index < 0 {
		return fmt.Errorf("decision %d: below 0", s.Index)
	}
	return s.Leader.check()
}

// check allows an empty one: no one.
func (f *PeerAddr) check() error {
	if *f == (PeerAddr{}) {
		return nil
	}
	if err := checkName(f.Name); err != nil {
		return err
	}
	return checkAddr(f.Addr)
}

func checkName(s string) error {
	if s == "" || len(s) > maxHost+32 || slices.ContainsFunc([]rune(s), unicode.IsControl) {
		return fmt.Errorf("name %q: want 1 to %d bytes that print", s, maxHost+32)
	}
	return nil
}

func checkAddr(s string) error {
	host, _, err := net.SplitHostPort(s)
	if err != nil || net.ParseIP(host) == nil {
		return fmt.Errorf("address %q: want an IP address and a port", s)
	}
	return nil
}

// check refuses an agent that cannot be in a world.
func (m *Member) check() error {
	for _, s := range []string{m.Name, m.Host, m.HostID} {
		if err := checkName(s); err != nil {
			return err
		}
	}
	if m.NodeRank < -1 || m.NodeRank >= maxAgents || m.NProc < 1 || m.NProc > maxProcs {
		return fmt.Errorf("agent %s: node rank %d, %d processes", m.Name, m.NodeRank, m.NProc)
	}
	return checkAddr(m.Addr)
}

// check refuses a world whose ranks do not follow each other.
func (w *Assignment) check() error {
	if w.Generation < 0 || w.Restart < 0 || len(w.Members) > maxAgents {
		return fmt.Errorf("world %d, restart %d, %d agents", w.Generation, w.Restart, len(w.Members))
	}
	seen, next := map[string]bool{}, 0
	for i := range w.Members {
		m := &w.Members[i]
		if err := m.check(); err != nil {
			return err
		}
		if seen[m.Name] || m.FirstRank != next || m.NodeRank < 0 {
			return fmt.Errorf("world %d: agent %s is there twice, or has a wrong rank", w.Generation, m.Name)
		}
		seen[m.Name] = true
		next += m.NProc
	}
	if next != w.Size {
		return fmt.Errorf("world %d: %d ranks of %d", w.Generation, next, w.Size)
	}
	return nil
}

func (d *decision) check() error {
	if d.Index < 1 || d.Leader.Name == "" || d.End == nil && len(d.Assignment.Members) == 0 {
		return fmt.Errorf("decision %d of %q about %d agents", d.Index, d.Leader.Name, len(d.Assignment.Members))
	}
	if d.End != nil {
		if err := checkText(d.End.Why); err != nil {
			return err
		}
	} else if d.Assignment.Generation != d.Index {
		return fmt.Errorf("decision %d: world %d", d.Index, d.Assignment.Generation)
	}
	for _, err := range []error{d.Leader.check(), d.Assignment.check(), d.Tally.check()} {
		if err != nil {
			return err
		}
	}
	return nil
}

func (e *ended) check() error {
	if len(e.Ending.Failures) > maxFailures {
		return errors.New("too many failures")
	}
	return checkText(e.Fault)
}

func (a *again) check() error {
	if a.After < 0 {
		return errors.New("a wait below 0")
	}
	return a.Tally.check()
}

func (t *tally) check() error {
	if t.Retries.Max < 0 || t.Retries.Done < 0 || t.Target < 0 || len(t.Lost) > 4*maxAgents {
		return errors.New("tally out of bounds")
	}
	return nil
}

func checkNews(n *launch.News) error {
	if len(n.Addrs) > maxAgents*maxProcs {
		return errors.New("too many addresses")
	}
	if len(n.WaitStates) > maxProcs {
		return errors.New("what too many ranks wait for")
	}
	for _, s := range []string{n.Stop, n.Lost} {
		if err := checkText(s); err != nil {
			return err
		}
	}
	return nil
}
