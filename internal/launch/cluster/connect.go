package cluster

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// What the machine does to the world: the effects, and the connections after them. All but what has a
// goroutine of its own runs on loop.

// connecting bounds the wait for a host that does not answer.
const connecting = 3 * time.Second

func (c *Cohort) renewGreeting() {
	raw, err := json.Marshal(c.machine.hello())
	if err == nil {
		c.greeting.Store(&raw)
	}
}

// welcome looks at the hello of an agent that has connected. On a goroutine of the door.
func (c *Cohort) welcome(from net.Addr, key ed25519.PublicKey, raw []byte) error {
	h, err := c.inspect(key, raw)
	if err != nil {
		return err
	}
	if _, both := c.dialing.Load(h.Agent.Addr); both && c.self.Name < h.Agent.Name {
		return wire.ErrBoth
	}
	return nil
}

// inspect refuses an agent that is not of this job, or not who it says.
func (c *Cohort) inspect(key ed25519.PublicKey, raw []byte) (*hello, error) {
	h, err := decodeHello(raw)
	switch {
	case err != nil:
		return nil, err
	case h.Agent.Name != wire.Name(h.Agent.Host, key):
		return nil, fmt.Errorf("its name %s is not that of its key", h.Agent.Name)
	case h.Program != c.cfg.Program:
		return nil, fmt.Errorf("node %s runs version %s of the program, and node %s version %s: "+
			"all nodes need the same",
			h.Agent.Host, h.Program, c.self.Host, c.cfg.Program)
	case h.Inputs != c.cfg.Inputs:
		return nil, fmt.Errorf("the config or flags of node %s (digest %s) are not those of node %s (digest %s): all "+
			"nodes need the same",
			h.Agent.Host, short(h.Inputs), c.self.Host, short(c.cfg.Inputs))
	}
	return h, nil
}

func short(s string) string { return s[:min(len(s), 12)] }

// decodeHello reads what an agent tells of itself.
func decodeHello(raw []byte) (*hello, error) {
	h := new(hello)
	if err := decodeStrict(raw, h); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	for _, err := range []error{h.Agent.check(), h.Status.check(), checkText(h.Program), checkText(h.Inputs)} {
		if err != nil {
			return nil, fmt.Errorf("hello: %w", err)
		}
	}
	return h, nil
}

// strange hears of connections that came to nothing. On a goroutine of the door.
func (c *Cohort) strange(err error) {
	if refusal := (*wire.Refusal)(nil); errors.As(err, &refusal) && !refusal.Theirs && !refusal.Both {
		c.calls.put(func() { c.machine.stranger(refusal) })
	}
}

// admit takes a connection in. It is called on the goroutine that made it.
func (c *Cohort) admit(l *wire.Link, via string) {
	h, err := decodeHello(l.Hello)
	if err != nil || !c.post(func() { c.linkUp(l, h, via) }) {
		l.Close()
		<-l.Closed()
	}
}

// post hands an event to loop, and reports whether it took it.
func (c *Cohort) post(f func()) bool {
	select {
	case c.events <- f:
		return true
	case <-c.ctx.Done():
		return false
	}
}

// doubled is the age up to which a second connection with the same peer counts as simultaneous dialing.
const doubled = 2 * time.Second

// linkUp: the newest connection with a peer is the one that counts, unless both were made at once.
func (c *Cohort) linkUp(l *wire.Link, h *hello, via string) {
	name := h.Agent.Name
	if old := c.links[name]; old != nil {
		if time.Since(c.linked[name]) < doubled {
			l.Close()
			c.group.Go(func() { <-l.Closed() })
			return
		}
		delete(c.links, name)
		old.Close()
		c.machine.down(name, "it has connected anew")
	}
	c.links[name], c.linked[name] = l, time.Now()
	c.group.Go(func() { c.read(l, name) })
	c.machine.up(*h, via)
}

// read hands the messages of a peer to loop, one after the other.
func (c *Cohort) read(l *wire.Link, name string) {
	defer func() { <-l.Closed() }()
	defer l.Close()
	for {
		raw, err := l.Receive()
		var msg *message
		if err == nil {
			if msg, err = decodeMessage(raw); err != nil {
				err = fmt.Errorf("it has sent what no agent sends: %w", err)
			}
		}
		ok := c.post(func() {
			switch {
			case c.links[name] != l:
			case err != nil:
				delete(c.links, name)
				c.machine.down(name, err.Error())
			default:
				c.machine.receive(name, msg)
			}
		})
		if err != nil || !ok {
			return
		}
	}
}

func (c *Cohort) dial(addr string) {
	c.dialing.Store(addr, true)
	c.group.Go(func() {
		l, err := c.connect(addr)
		c.dialing.Delete(addr)
		if err == nil {
			c.admit(l, addr)
		}
		c.post(func() { c.machine.dialed(addr, err) })
	})
}

// connect connects to an agent.
func (c *Cohort) connect(addr string) (*wire.Link, error) {
	ctx, cancel := context.WithTimeout(c.ctx, connecting)
	conn, err := c.cfg.Network.Dial(ctx, addr)
	cancel()
	if err != nil {
		return nil, err
	}
	p := c.party
	p.Check = func(_ net.Addr, key ed25519.PublicKey, raw []byte) error {
		_, err := c.inspect(key, raw)
		return err
	}
	return wire.Dial(c.ctx, conn, &p)
}

func (c *Cohort) hangUp(name string) {
	if l := c.links[name]; l != nil {
		delete(c.links, name)
		l.Close()
	}
}

// send makes a frame once for all who get the same message in a row.
func (c *Cohort) send(m *message, names ...string) {
	if c.sending != m {
		raw, err := json.Marshal(m)
		if err == nil {
			c.frame, err = wire.NewFrame(raw)
		}
		if err != nil {
			c.cfg.Log("to the other nodes: %v", err)
			return
		}
		c.sending = m
	}
	for _, name := range names {
		if l := c.links[name]; l != nil && !l.Send(c.frame) {
			l.Close() // read sees it
		}
	}
}

func (c *Cohort) prepare(w World) {
	c.group.Go(func() {
		payload, err := c.cfg.Prepare(c.ctx, w)
		secret := make([]byte, 32)
		rand.Read(secret)
		if raw, _ := json.Marshal(&message{Decided: &decision{World: w, Payload: payload}}); err == nil &&
			len(raw) > wire.MaxFrame/8*7 {
			err = fmt.Errorf("a start of %d nodes with a payload of %d bytes: too large for a message of %d",
				len(w.Agents), len(payload), wire.MaxFrame)
		}
		c.calls.put(func() { c.machine.prepared(w.Generation, payload, secret, err) })
	})
}

func (c *Cohort) begin(d *decision) {
	const room = 64 // more than an agent sends
	ch := make(chan launch.News, room)
	c.heard.Store(&ch)
	put(c.next, next{decision: d})
}

func (c *Cohort) over(err error) { put(c.next, next{err: err}) }

func (c *Cohort) verdict(v launch.Verdict) { put(c.verdicts, v) }

func (c *Cohort) news(n launch.News) {
	if ch := c.heard.Load(); ch != nil {
		put(*ch, n)
	}
}

// put never blocks: who does not look at the last one needs no other.
func put[T any](ch chan T, v T) {
	select {
	case ch <- v:
	default:
	}
}

func (c *Cohort) gone() { c.leave.Do(func() { close(c.left) }) }

func (c *Cohort) log(format string, args ...any) { c.cfg.Log(format, args...) }

// A tcp is the network of agents.
type tcp struct{}

func (tcp) Listen(addr string) (net.Listener, error) { return net.Listen("tcp", addr) }

func (tcp) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// Connections, and this agent's reactions to their changes.

// A peer is a connected agent.
type peer struct {
	Member
	via    string // the address that this agent has dialed; "": the peer did
	status status
	joined int       // order in which it was taken in, from 1; 0: it has not asked to be
	since  time.Time // connected
	held   *join     // its pending request, if its rank may belong to another
}

// setRole changes the role, and tells all who are connected.
func (m *machine) setRole(r role, leader string) {
	if m.role == r && m.leader == leader {
		return
	}
	if r == seeking && (m.role == following || m.role == leading) {
		m.since = m.now
	}
	m.role, m.leader = r, leader
	if r != leading {
		m.run, m.gather = nil, nil
	}
	if r == following || r == seeking {
		m.prop = nil
	}
	s := m.status()
	msg := &message{Status: &s}
	for _, p := range m.sorted() {
		if p.Name != leader {
			m.fx.send(msg, p.Name)
		}
	}
}

// up: a peer is connected.
func (m *machine) up(h hello, via string) {
	p := &peer{Member: h.Agent, via: via, status: h.Status, since: m.now}
	m.peers[p.Name] = p
	delete(m.suspects, p.Name)
	delete(m.dials, p.Addr)
	m.teach(p)
	if m.over {
		m.fx.hangUp(p.Name)
		delete(m.peers, p.Name)
		return
	}
	// What the handshake said may be old by now.
	s := m.status()
	m.fx.send(&message{Status: &s}, p.Name)
	m.onStatus(p, &h.Status)
	m.solicit(p)
}

// sorted lists the connected agents by name, so that a run can be repeated.
func (m *machine) sorted() []*peer {
	return slices.SortedFunc(maps.Values(m.peers), func(a, b *peer) int { return strings.Compare(a.Name, b.Name) })
}

func (m *machine) teach(p *peer) {
	if p.status.Index < m.reg.index {
		m.fx.send(&message{Decided: m.reg.last}, p.Name)
		p.status.Index = m.reg.index
	}
}

// down: a peer is no longer connected.
func (m *machine) down(name, why string) {
	p := m.peers[name]
	if p == nil {
		return
	}
	delete(m.peers, name)
	if m.over {
		return
	}
	m.suspects[name] = m.now.Add(2 * m.cfg.Silence)
	switch {
	case m.role == leading:
		m.heard(name)
		m.lost(p, why)
	case m.role == following && name == m.leader:
		m.lostLeader(p, why)
	}
}

// lostLeader: the agent that leads is gone, or leads no more.
func (m *machine) lostLeader(p *peer, why string) {
	m.setRole(seeking, "")
	if at := m.world().index(p.Name); at >= 0 {
		a := m.world().Agents[at]
		m.orphaned, m.orphanedAt = a.lost(why, 1), m.reg.index
	}
	m.doom(name(p.Member, m.world())+", which led: "+why, m.firstRank(p.Name))
}

// doom ends the start that goes on here: the others cannot be told, or do not wait.
func (m *machine) doom(why string, rank int) {
	if m.local.running {
		n := launch.News{Lost: why}
		if rank >= 0 {
			n.Failed = &rank
		}
		m.fx.news(n)
	}
}

func (m *machine) world() *World {
	if m.reg.last == nil {
		return new(World)
	}
	return &m.reg.last.World
}

// firstRank returns an agent's first rank in the last world; -1: it has none.
func (m *machine) firstRank(name string) int {
	if at := m.world().index(name); at >= 0 {
		return m.world().Agents[at].FirstRank
	}
	return -1
}

// name returns an agent with its ranks, for people.
func name(a Member, w *World) string {
	if at := w.index(a.Name); at >= 0 {
		a = w.Agents[at]
		return fmt.Sprintf("node %s (%s)", a.Host, launch.RanksOf(a.FirstRank, a.NProc))
	}
	return "node " + a.Host
}

// stranger: an agent was refused at the door.
func (m *machine) stranger(r *wire.Refusal) {
	const quiet = 10 * time.Second
	if text := r.Error(); text != m.strange || m.now.Sub(m.strangeAt) > quiet {
		m.strange, m.strangeAt = text, m.now
		m.fx.log("%s", text)
	}
}

// errClosed answers a Cohort's calls after Close.
var errClosed = errors.New("this agent has left the job")

// mailbox holds the calls of those who do not wait: few, since each start has few.
type mailbox struct {
	ready chan struct{} // room for one

	mu    sync.Mutex
	calls []func() // guarded by mu
}

func (b *mailbox) init() { b.ready = make(chan struct{}, 1) }

// put never blocks.
func (b *mailbox) put(f func()) {
	b.mu.Lock()
	b.calls = append(b.calls, f)
	b.mu.Unlock()
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

// take returns what is there, in order.
func (b *mailbox) take() []func() {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := b.calls
	b.calls = nil
	return calls
}
