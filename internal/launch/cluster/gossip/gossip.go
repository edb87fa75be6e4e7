// Package gossip hints which agents of a job are alive. Its information may be late or wrong, so a reader must ask the
// agent itself before it acts.
//
//	members, err := gossip.Join(gossip.Config{Job: "7", Key: key, Name: name, Packets: udp, Dial: dial})
//	members.Meet("10.0.0.3:29400")
//	<-members.Changed()
//	peers := members.Peers()
package gossip

import (
	"context"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// The package runs memberlist (SWIM). Packets are sealed with a key of the job. A replayed packet can make a departed
// agent appear for some seconds. Streams use the authenticated connections of the job.
//
// Goroutines, and their ends:
//
//	meet     asks one agent for all others, then random ones; ended by Close
//	listen   reads packets; ended by Close
//	memberlist's ended by Close; their waits for answers have deadlines

// Config describes an agent that joins the gossip of a job.
type Config struct {
	Job  string // name of the job
	Key  []byte // the job's secret
	Name string // of this agent; unique: a restarted agent has another
	// Packets is the UDP socket at this agent's address. Close closes it.
	Packets net.PacketConn
	// Dial opens an authenticated stream to an agent. The agent's Accept gets the other end.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

const (
	// leaveBound bounds Close's wait until other agents know.
	leaveBound = 500 * time.Millisecond
	// notifyDelay collects changes into one notification: hundreds of agents may join at once.
	notifyDelay = 20 * time.Millisecond
	// streamTimeout bounds a stream.
	streamTimeout = 2 * time.Second
	// After it met an agent, an agent exchanges full state with random members, one each syncPause. If all agents of a
	// job start together, packets alone take 18 s to inform each of 1,024 agents: they are designed for few changes.
	randomSyncs = 6
	syncPause   = 500 * time.Millisecond
	meetTries   = 5
)

// Peer is an agent's name and its address, host:port, for connections and gossip.
type Peer struct{ Name, Addr string }

// Members are the known agents of a job.
type Members struct {
	list      *memberlist.Memberlist
	self      string
	transport *transport
	changed   chan struct{}
	wait      sync.WaitGroup
	close     sync.Once
	err       error // of Close

	mu            sync.Mutex
	peers         map[string]string // guarded by mu; addresses by name; memberlist changes its own list without locks
	notifyPending bool              // guarded by mu; a notification is scheduled
}

// Join makes this agent a member that knows no other. Close leaves.
func Join(c Config) (*Members, error) {
	t, err := newTransport(&c)
	if err != nil {
		return nil, err
	}
	m := &Members{self: c.Name, transport: t, changed: make(chan struct{}, 1), peers: map[string]string{}}
	conf := tuned()
	conf.Name, conf.Label, conf.Transport, conf.Events = c.Name, t.label, t, events{m}
	// gossip only hints; the control connections report problems
	conf.Logger = log.New(io.Discard, "", 0)
	if m.list, err = memberlist.Create(conf); err != nil {
		t.Shutdown()
	}
	return m, err
}

// Accept gives memberlist an authenticated stream of another agent, and returns at once or after Close.
func (m *Members) Accept(conn net.Conn) {
	select {
	case m.transport.streams <- conn:
	case <-m.transport.ctx.Done():
		conn.Close()
	}
}

// Meet learns of other agents from the agent at an IP address and port, in the background, and informs them of this
// one.
func (m *Members) Meet(addr string) {
	if !slices.ContainsFunc(m.Peers(), func(p Peer) bool { return p.Addr == addr }) {
		m.wait.Go(func() { m.meet(m.transport.ctx, addr) })
	}
}

func (m *Members) meet(ctx context.Context, addr string) {
	for tries := 1; ; tries++ {
		if _, err := m.list.Join([]string{addr}); err == nil {
			break
		}
		if tries == meetTries || !sleep(ctx, syncPause) {
			return
		}
	}
	for range randomSyncs {
		if !sleep(ctx, syncPause/2+rand.N(syncPause)) {
			return
		}
		if peers := m.Peers(); len(peers) > 0 {
			_, _ = m.list.Join([]string{peers[rand.N(len(peers))].Addr}) // memberlist itself detects a lost member
		}
	}
}

// sleep waits for d, and returns false at once when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// Peers returns the other agents that seem alive, by name.
func (m *Members) Peers() []Peer {
	m.mu.Lock()
	peers := make([]Peer, 0, len(m.peers))
	for name, addr := range m.peers {
		peers = append(peers, Peer{name, addr})
	}
	m.mu.Unlock()
	slices.SortFunc(peers, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	return peers
}

// Changed returns a channel of capacity 1 that receives a value after Peers may have changed.
func (m *Members) Changed() <-chan struct{} { return m.changed }

// Close leaves the gossip and informs the others.
func (m *Members) Close() error {
	m.close.Do(func() {
		// An error is harmless: the others may have left, or detect the silence.
		_ = m.list.Leave(leaveBound)
		m.err = m.list.Shutdown()
		m.wait.Wait()
	})
	return m.err
}

// events handles memberlist's events. memberlist holds its lock, so the methods neither call it nor wait.
type events struct{ *Members }

func (e events) NotifyJoin(n *memberlist.Node) {
	if n.Name != e.self {
		e.change(func() { e.peers[n.Name] = n.Address() })
	}
}

func (e events) NotifyLeave(n *memberlist.Node) { e.change(func() { delete(e.peers, n.Name) }) }

func (e events) NotifyUpdate(*memberlist.Node) {}

// change applies f to the peers. It sends one notification for all changes within notifyDelay.
func (m *Members) change(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	if !m.notifyPending {
		m.notifyPending = true
		time.AfterFunc(notifyDelay, m.notify)
	}
}

func (m *Members) notify() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notifyPending = false
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// tuned returns memberlist's settings. Its defaults for a local network detect a dead agent after 5 s or more. These
// detect it after 1 to 2 s, and 3 s among 1,024 agents, with about 60 packets a second during changes and 16 otherwise.
// docs/benchmarks/202611_cluster.md lists the costs.
func tuned() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.TCPTimeout = streamTimeout
	c.ProbeInterval, c.ProbeTimeout = 250*time.Millisecond, 100*time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 3, 2
	c.AwarenessMaxMultiplier = 4
	c.GossipInterval, c.GossipNodes = 50*time.Millisecond, 3
	c.PushPullInterval = 10 * time.Second
	c.UDPBufferSize -= sealCost
	// Compression takes more time than it saves, and decompression costs memory.
	c.EnableCompression = false
	return c
}
