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

// Config describes an agent that joins the gossip of a job.
type Config struct {
	Job  string // name of the job
	Key  []byte // the job's secret, at least 16 bytes
	Self Peer
	// Seeds are addresses of agents, host:port; one is enough. An address may have no agent yet, or be this agent's
	// own.
	Seeds []string
	// Transport carries packets and streams until the agent leaves. A Port is not closed with it.
	Transport memberlist.Transport
}

const (
	// leaveBound bounds Close's wait until other agents know.
	leaveBound = 500 * time.Millisecond
	// notifyDelay collects changes into one notification.
	notifyDelay = 20 * time.Millisecond
)

// Members are the known agents of a job.
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
	peers         map[string]member // guarded by mu; live members by name
	notifyPending bool              // guarded by mu; a notification is scheduled
}

// A member is a peer with its gossip address.
type member struct {
	Peer
	addr netip.AddrPort
}

// Join makes this agent a member and returns at once. In the background it asks the seeds until one answers or ctx
// ends. Close leaves.
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
	// gossip only hints; the control connections report problems
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

// Addr returns this agent's gossip address, which others can use as a seed.
func (m *Members) Addr() string { return m.addr.String() }

// Peers returns the live agents by name, including this one.
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

// Changed returns a channel that receives a value after Peers may have changed.
func (m *Members) Changed() <-chan struct{} { return m.changed }

// Close leaves the gossip and informs the others.
func (m *Members) Close() error {
	m.close.Do(func() {
		m.stop()
		// An error is harmless: the others may have left, or detect the silence.
		_ = m.list.Leave(leaveBound)
		m.err = m.list.Shutdown()
		m.wait.Wait()
	})
	return m.err
}

// change applies f to the peers. It sends one notification for all changes within notifyDelay, since hundreds of agents
// may join at once.
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

// A delegate handles memberlist's callbacks. memberlist may hold its lock, so the methods neither call it nor wait.
type delegate struct {
	*Members
	meta []byte // of this agent
}

func (d delegate) NodeMeta(int) []byte { return d.meta }

// NotifyAlive refuses members with invalid metadata.
func (d delegate) NotifyAlive(n *memberlist.Node) error {
	_, err := decode(n.Name, n.Meta)
	return err
}

func (d delegate) NotifyJoin(n *memberlist.Node) {
	p, err := decode(n.Name, n.Meta)
	if err != nil {
		return // NotifyAlive has refused it
	}
	d.change(func(peers map[string]member) { peers[n.Name] = member{p, addrOf(n)} })
}

func (d delegate) NotifyUpdate(n *memberlist.Node) { d.NotifyJoin(n) }

// NotifyLeave removes a member that left or is silent.
func (d delegate) NotifyLeave(n *memberlist.Node) {
	name := n.Name
	d.change(func(peers map[string]member) { delete(peers, name) })
}

// NotifyMsg and the rest ignore messages and state: agents use their control connections.
func (d delegate) NotifyMsg([]byte) {}

func (d delegate) GetBroadcasts(int, int) [][]byte { return nil }

func (d delegate) LocalState(bool) []byte { return nil }

func (d delegate) MergeRemoteState([]byte, bool) {}

// tuned returns memberlist's settings. Its defaults for a local network detect a dead agent after 5 s or more. These
// detect it after 1 to 2 s, and 3 s among 1,024 agents, with about 60 packets a second during changes and 16 otherwise.
// docs/benchmarks/202611_cluster.md lists the costs.
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

	// Compression takes more time than it saves, and decompression costs memory.
	c.EnableCompression = false
	return c
}

const (
	minKey    = 16 // bytes of a job's key
	sealKey   = 32 // bytes of the key that seals gossip, for AES-256
	labelSize = 8  // bytes of a label, which is twice as long in hexadecimal
)

// derive returns the encryption key and the label of a job's gossip. The label is public and reveals nothing about the
// key. It differs for each job and key.
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
