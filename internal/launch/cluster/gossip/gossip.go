package gossip

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Config says who joins which job's gossip, and how.
type Config struct {
	Job  string // names the job: its gossip meets no other's
	Key  []byte // the job's secret, at least 16 bytes
	Self Peer
	// Seeds are addresses of agents, host:port; one is enough. They need not be there yet, and this agent may
	// be among them.
	Seeds []string
	// Transport carries packets and streams, until the agent leaves: a Port, which is not closed with it.
	Transport memberlist.Transport
}

const (
	// leaveBound bounds the wait of Close until others know.
	leaveBound = 500 * time.Millisecond
	// tellPause collects changes.
	notifyDelay = 20 * time.Millisecond
)

// Members are the agents of a job that this one knows of.
type Members struct {
	list    *memberlist.Memberlist
	self    string
	addr    netip.AddrPort
	changed chan struct{}

	stop  context.CancelFunc // ends seek
	wait  sync.WaitGroup
	close sync.Once
	err   error // of Close

	mu            sync.Mutex
	peers         map[string]member // guarded by mu; those alive
	notifyPending bool              // guarded by mu; changed is about to be told
}

// A member is a peer and the address of its gossip.
type member struct {
	Peer
	addr netip.AddrPort
}

// Join makes this agent a member, alone at first, and returns. The seeds are asked in the
// background, again and again until somebody answers or ctx ends; Close leaves.
func Join(ctx context.Context, c Config) (*Members, error) {
	seal, label, err := derive(c.Key, c.Job)
	if err != nil {
		return nil, err
	}
	meta, err := c.Self.encode()
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	seeds, err := parseSeeds(c.Seeds)
	if err != nil {
		return nil, err
	}
	m := &Members{self: c.Self.Name, changed: make(chan struct{}, 1), peers: map[string]member{}}
	conf := tuned(c.Self.Name, label, seal)
	guard := newGuard(c.Transport, label)
	conf.Transport = guard
	// gossip only hints; the control connections report what comes of it
	conf.Logger = log.New(io.Discard, "", 0)
	d := delegate{m, meta}
	conf.Delegate, conf.Events, conf.Alive = d, d, d
	if m.list, err = memberlist.Create(conf); err != nil {
		return nil, errors.Join(fmt.Errorf("gossip: %w", err), guard.Shutdown())
	}
	local := m.list.LocalNode()
	m.addr = addrOf(local)
	ctx, m.stop = context.WithCancel(ctx)
	m.wait.Go(func() { m.seek(ctx, seeds) })
	m.wait.Go(func() { m.syncRandom(ctx) })
	return m, nil
}

// Addr returns the address of this agent's gossip, for others to have as a seed.
func (m *Members) Addr() string { return m.addr.String() }

// Peers returns the agents that are alive, by name, this one included.
func (m *Members) Peers() []Peer {
	m.mu.Lock()
	peers := make([]Peer, 0, len(m.peers))
	for _, p := range m.peers {
		peers = append(peers, p.Peer)
	}
	m.mu.Unlock()
	slices.SortFunc(peers, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	return peers
}

// Changed returns a channel that has something to read when Peers may have changed since it was
// last read.
func (m *Members) Changed() <-chan struct{} { return m.changed }

// Close tells the others that this agent leaves.
func (m *Members) Close() error {
	m.close.Do(func() {
		m.stop()
		// At the end of a job no one may be left. The others find out by themselves.
		_ = m.list.Leave(leaveBound)
		m.err = m.list.Shutdown()
		m.wait.Wait()
	})
	return m.err
}

// change applies f to the peers, and tells the reader of Changed: once for all changes within
// tellPause, since hundreds of agents may come in a moment.
func (m *Members) change(f func(peers map[string]member)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(m.peers)
	if !m.notifyPending {
		m.notifyPending = true
		time.AfterFunc(notifyDelay, m.notify)
	}
}

func (m *Members) notify() {
	m.mu.Lock()
	m.notifyPending = false
	m.mu.Unlock()
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

func addrOf(n *memberlist.Node) netip.AddrPort {
	ip, _ := netip.AddrFromSlice(n.Addr)
	return netip.AddrPortFrom(ip.Unmap(), n.Port)
}

// A delegate takes memberlist's calls. memberlist may hold its lock, so the methods neither call it nor wait.
type delegate struct {
	*Members
	meta []byte // of this agent
}

// NodeMeta returns what this agent says of itself.
func (d delegate) NodeMeta(int) []byte { return d.meta }

// NotifyAlive refuses members whose metadata cannot be read.
func (d delegate) NotifyAlive(n *memberlist.Node) error {
	_, err := decode(n.Name, n.Meta)
	return err
}

// NotifyJoin adds a member.
func (d delegate) NotifyJoin(n *memberlist.Node) {
	p, err := decode(n.Name, n.Meta)
	if err != nil {
		return // NotifyAlive has refused it
	}
	d.change(func(peers map[string]member) { peers[n.Name] = member{p, addrOf(n)} })
}

// NotifyUpdate takes what a member says of itself anew.
func (d delegate) NotifyUpdate(n *memberlist.Node) { d.NotifyJoin(n) }

// NotifyLeave removes a member that has left or that is not heard of any more.
func (d delegate) NotifyLeave(n *memberlist.Node) {
	name := n.Name
	d.change(func(peers map[string]member) { delete(peers, name) })
}

// NotifyMsg ignores messages: agents talk over their control connections.
func (d delegate) NotifyMsg([]byte) {}

// GetBroadcasts returns none, for the same reason.
func (d delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState returns none.
func (d delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState has nothing to merge.
func (d delegate) MergeRemoteState([]byte, bool) {}

// tuned returns memberlist's settings. Its own for a local network find a dead agent after 5 s and
// more; these after 1 to 2 s, and 3 s among 1,024, for about 60 packets a second while there is news
// and 16 otherwise. docs/benchmarks/202611_cluster.md has what they cost.
func tuned(name, label string, seal []byte) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = name
	c.Label, c.SecretKey = label, seal

	c.TCPTimeout = 2 * time.Second
	c.ProbeInterval, c.ProbeTimeout = 250*time.Millisecond, 100*time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 3, 2
	c.AwarenessMaxMultiplier = 4
	c.GossipInterval, c.GossipNodes = 50*time.Millisecond, 3
	c.PushPullInterval = 10 * time.Second

	// What is compressed takes the agent more time than the network, and unpacking costs memory.
	c.EnableCompression = false
	return c
}

const (
	minKey    = 16 // bytes of a job's key
	sealKey   = 32 // bytes of the key that seals gossip, for AES-256
	labelSize = 8  // bytes of a label, which is twice as long in hexadecimal
)

// derive returns the key and the label of a job's gossip. The label is seen by all on the network
// and tells them nothing about the key. Another job or another key has another label.
func derive(key []byte, job string) (seal []byte, label string, err error) {
	if len(key) < minKey {
		return nil, "", fmt.Errorf("gossip: the job's key has %d bytes; it needs %d", len(key), minKey)
	}
	seal, err = hkdf.Key(sha256.New, key, nil, "cprun gossip key\x00"+job, sealKey)
	if err != nil {
		return nil, "", fmt.Errorf("gossip: %w", err)
	}
	raw, err := hkdf.Key(sha256.New, key, nil, "cprun gossip label\x00"+job, labelSize)
	if err != nil {
		return nil, "", fmt.Errorf("gossip: %w", err)
	}
	return seal, hex.EncodeToString(raw), nil
}
