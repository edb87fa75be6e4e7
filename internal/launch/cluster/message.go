package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"unicode"

	"github.com/cprun/cprun/internal/launch"
)

// A hello describes an agent in a handshake.
type hello struct {
	Member  Member `json:"agent"` // NodeRank as requested, FirstRank 0
	Program string `json:"program"`
	Inputs  string `json:"inputs"`
	Status  status `json:"status"`
}

func helloOf(c *coordinator) hello {
	return hello{Member: c.self, Program: c.cfg.Program, Inputs: c.cfg.Inputs, Status: c.status()}
}

// A message is sent between agents after the hello. Exactly one field is set.
type message struct {
	Status  *status   `json:"status,omitempty"`
	Join    *join     `json:"join,omitempty"`
	Refuse  *string   `json:"refuse,omitempty"` // the leader refuses the agent: why
	Note    *string   `json:"note,omitempty"`   // a line for the user of another node
	Decided *decision `json:"decided,omitempty"`
	News    *relayed  `json:"news,omitempty"`
	Ended   *ended    `json:"ended,omitempty"`
	Again   *again    `json:"again,omitempty"`
	Bye     *bye      `json:"bye,omitempty"`
}

// A status contains the index of the last decision and the leader that the sender follows, or itself.
type status struct {
	Index     int      `json:"index"`
	Leader    PeerAddr `json:"leader"` // Name "": unknown
	Term      int      `json:"term"`   // of the sender's leadership; else the highest that it knows
	Candidate bool     `json:"candidate,omitempty"`
}

// A join asks the leader to admit an agent, or to admit it again.
type join struct {
	// Ended is how the last decision's start ended there; nil: it has not.
	Ended *ended `json:"ended,omitempty"`
}

// A relayed is news of a start, from an agent to the leader, and from the leader to the others.
type relayed struct {
	Index int         `json:"index"`
	News  launch.News `json:"news"`
}

// An ended reports how a start ended on one node.
type ended struct {
	Index  int           `json:"index"`
	Ending launch.Ending `json:"ending"`
	Fault  string        `json:"fault,omitempty"` // Ending.Err
}

// An again announces another start.
type again struct {
	Index int   `json:"index"` // of the ended start
	Tally tally `json:"tally"`
}

type bye struct {
	Status int    `json:"status"`
	Why    string `json:"why,omitempty"`
	All    bool   `json:"all,omitempty"` // its followers end as well
}

// A decision is the job's next start, or its end. Decisions are numbered from 1; the run directory keeps the newest.
type decision struct {
	Index      int        `json:"index"`
	Leader     PeerAddr   `json:"leader"` // the proposer
	Assignment Assignment `json:"world"`  // at the end: the last one
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
	Why      string          `json:"why,omitempty"` // without a failed rank
}

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

// verdict returns the verdict after the end of an agent's start. Wrong input is a note: an error gives status 1.
func (o *outcome) verdict() launch.Verdict {
	v := launch.Verdict{Result: o.result()}
	if o.ExitCode == launch.ExitInput {
		v.Err, v.Notes = nil, []string{o.Why}
	}
	return v
}

// over returns the error for an agent that waits for a start of an ended job.
func over(r launch.Result, why string) *launch.Over {
	r.Err = nil
	return &launch.Over{Result: r, Why: why}
}

// decodeMessage decodes and validates a message of an agent.
func decodeMessage(raw []byte) (*message, error) {
	m := new(message)
	if err := launch.DecodeStrict(raw, m); err != nil {
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
	if m.Decided != nil {
		return m, m.Decided.check()
	}
	return m, nil
}

// Assignment lists the agents of one start, with their ranks.
type Assignment struct {
	Generation int      `json:"generation"` // number of the decision, unique in the job
	Restart    int      `json:"restart"`    // of the workers, from 0
	Members    []Member `json:"agents"`     // by their first rank
	Size       int      `json:"size"`       // workers of all agents
}

// Member is one agent of an assignment.
type Member struct {
	Name      string `json:"name"` // unique: the host and a random text
	Host      string `json:"host"`
	HostID    string `json:"host_id"` // equal on all agents of one host
	NodeRank  int    `json:"node_rank"`
	FirstRank int    `json:"first_rank"` // of its workers
	NProc     int    `json:"nproc"`
	Addr      string `json:"addr"` // host:port for control connections
}

// index returns the index in Members of the agent with that name, or -1.
func (w *Assignment) index(name string) int {
	return slices.IndexFunc(w.Members, func(m Member) bool { return m.Name == name })
}

// firstRank returns an agent's first rank, or -1.
func (w *Assignment) firstRank(name string) int {
	if at := w.index(name); at >= 0 {
		return w.Members[at].FirstRank
	}
	return -1
}

// describe returns an agent with its ranks, for messages.
func (w *Assignment) describe(m Member) string {
	if at := w.index(m.Name); at >= 0 {
		m = w.Members[at]
		return fmt.Sprintf("node %s (%s)", m.Host, launch.RanksOf(m.FirstRank, m.NProc))
	}
	return "node " + m.Host
}

// assignRanks orders agents and numbers their workers. Agents of one host are adjacent. Hosts follow the order of their
// lowest node rank.
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

// The handshake authenticates the sender, whom the agents trust, and wire bounds a message. So only the ranks and names
// of agents are checked, once, on receipt.

// maxText bounds a text that an agent sends.
const maxText = 8 << 10

func checkName(s string) error {
	if s == "" || len(s) > maxHost+32 || slices.ContainsFunc([]rune(s), unicode.IsControl) {
		return fmt.Errorf("name %q: want 1 to %d printable bytes", s, maxHost+32)
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

// check refuses an assignment whose ranks are not consecutive.
func (w *Assignment) check() error {
	if w.Generation < 0 || w.Restart < 0 || len(w.Members) > maxAgents {
		return fmt.Errorf("assignment %d: restart %d, %d agents", w.Generation, w.Restart, len(w.Members))
	}
	seen, next := map[string]bool{}, 0
	for i := range w.Members {
		m := &w.Members[i]
		if err := m.check(); err != nil {
			return err
		}
		if seen[m.Name] || m.FirstRank != next || m.NodeRank < 0 {
			return fmt.Errorf("assignment %d: agent %s is listed twice or has a wrong rank", w.Generation, m.Name)
		}
		seen[m.Name] = true
		next += m.NProc
	}
	if next != w.Size {
		return fmt.Errorf("assignment %d: %d ranks of %d", w.Generation, next, w.Size)
	}
	return nil
}

func (d *decision) check() error {
	if d.Index < 1 || d.Leader.Name == "" || d.End == nil && len(d.Assignment.Members) == 0 {
		return fmt.Errorf("decision %d of leader %q for %d agents", d.Index, d.Leader.Name, len(d.Assignment.Members))
	}
	if d.End == nil && d.Assignment.Generation != d.Index {
		return fmt.Errorf("decision %d: assignment %d", d.Index, d.Assignment.Generation)
	}
	return d.Assignment.check()
}
