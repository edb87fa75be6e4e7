package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/cprun/cprun/internal/launch/cluster/gossip"
)

// Config describes an agent and its job.
type Config struct {
	Job string // names the job: agents of different jobs refuse each other
	Key []byte // the job's secret, at least 16 bytes; nothing of it is sent
	// Program is the version of the program, Inputs a digest of the config and of flags that must be
	// the same on all nodes: agents that differ in one refuse each other, and say in which.
	Program, Inputs string

	NodeRank int // wanted by this agent; -1: any
	Min, Max int // agents that run; the same if their number is fixed
	NProc    int // workers of this agent

	Host   string // names this node to people; "": the host name
	HostID string // agents with the same one share a host; "": Host

	// Listen is the address of this host on the job's network, without a port. Control connections
	// come in there, and workers listen at it.
	Listen string
	// Port is the port of the job's meeting place if this agent may be it, else 0: any free one. If another process has
	// the port, this agent takes a free one.
	Port int
	// Meets says that this host is the meeting place: the agent on it that has Port leads until the first
	// start. An agent that meets itself at the first of Seeds knows that without being told.
	Meets bool
	// Seeds are addresses, host:port, to ask for the other agents: the meeting place first. This agent's
	// own may be among them.
	Seeds []string

	MaxRestarts int // starts after the first

	JoinTimeout    time.Duration // until the first start; 0: 10 minutes
	RegroupTimeout time.Duration // until a start after nodes were lost; 0: 60 s
	LastCall       time.Duration // without a newcomer until fewer than Max nodes start; 0: 10 s
	Silence        time.Duration // of an agent until it counts as lost; 0: 5 s

	// Prepare makes the payload of all workers, before each start, on the agent that leads. nil: none.
	// Its error ends the job, a *launch.Over with that status. The caller's Next gets the error as it is, those of
	// the other agents its text. World names the agents and is complete.
	Prepare func(context.Context, Assignment) ([]byte, error)
	// Log gets a line for people now and then; nil: no one does.
	Log func(format string, args ...any)

	Network   Network                                // nil: TCP, and gossip on the same ports
	Discovery func(self PeerAddr) (Discovery, error) // nil: Seeds and the last world are all that finds agents
}

// Network is how agents reach each other. It is there for tests.
type Network interface {
	// Listen takes an address, host:port; port 0 is any.
	Listen(addr string) (net.Listener, error)
	// Dial connects to one.
	Dial(ctx context.Context, addr string) (net.Conn, error)
}

// Found is an agent that may be there: its name and its control address.
type PeerAddr struct{ Name, Addr string }

// Discovery finds agents. It is a hint: whom it names may be gone, and a stranger must prove the key.
type Discovery interface {
	Peers() []PeerAddr        // the agents that seem to be alive, without this one
	Changed() <-chan struct{} // gets a value after Peers has changed; room for one
	Close() error
}

// minKey is the least length of a key.
const minKey = 16

// resolve fills defaults and refuses what cannot run.
func (c *Config) resolve() error {
	for _, d := range []struct {
		at *time.Duration
		or time.Duration
	}{
		{&c.JoinTimeout, 10 * time.Minute}, {&c.RegroupTimeout, time.Minute}, {&c.LastCall, 10 * time.Second},
		{&c.Silence, 5 * time.Second},
	} {
		if *d.at == 0 {
			*d.at = d.or
		}
	}
	if c.Host == "" {
		c.Host, _ = os.Hostname()
	}
	if c.HostID == "" {
		c.HostID = c.Host
	}
	if c.Log == nil {
		c.Log = func(string, ...any) {}
	}
	if c.Network == nil {
		c.Network = tcp{}
	}
	if c.Prepare == nil {
		c.Prepare = func(context.Context, Assignment) ([]byte, error) { return nil, nil }
	}
	switch ip := net.ParseIP(c.Listen); {
	case c.Job == "":
		return errors.New("name of the job: none given")
	case len(c.Key) < minKey:
		return fmt.Errorf("key of the job: %d bytes, at least %d are needed", len(c.Key), minKey)
	case c.Min < 1 || c.Max < c.Min || c.Max > maxAgents:
		return fmt.Errorf("nodes %d:%d: want 1 <= MIN <= MAX <= %d", c.Min, c.Max, maxAgents)
	case c.NodeRank < -1 || c.NodeRank >= c.Max:
		return fmt.Errorf("node rank %d: outside of 0 to %d", c.NodeRank, c.Max-1)
	case c.NProc < 1 || c.NProc > maxProcs:
		return fmt.Errorf("processes of a node: %d, want 1 to %d", c.NProc, maxProcs)
	case ip == nil || ip.IsUnspecified():
		return fmt.Errorf("address to listen at %q: want the IP address of this host that the other nodes reach",
			c.Listen)
	case len(c.Host) > maxHost || len(c.HostID) > maxHost:
		return fmt.Errorf("name of the host: longer than %d bytes", maxHost)
	}
	return nil
}

// Bounds of what agents tell each other.
const (
	maxAgents = 4096
	maxProcs  = 1024
	maxHost   = 255
)

// withGossip returns c with agents that find each other by gossip too, on the port of their control
// connections: its Network is TCP, and Seeds serve both.
func withGossip(c Config) Config {
	g := &gossiping{cfg: c}
	c.Network, c.Discovery = g, g.discover
	return c
}

// A gossiping is the network of an agent whose control port carries gossip.
type gossiping struct {
	tcp
	cfg  Config
	port *gossip.Port // that was bound last
}

func (g *gossiping) Listen(addr string) (ln net.Listener, err error) {
	if g.port, err = gossip.Bind(addr); err != nil {
		return nil, err
	}
	return g.port, nil
}

func (g *gossiping) discover(self PeerAddr) (Discovery, error) {
	m, err := gossip.Join(context.Background(), gossip.Config{
		Job: g.cfg.Job, Key: g.cfg.Key, Seeds: g.cfg.Seeds, Transport: g.port,
		Self: gossip.Peer{Name: self.Name, Control: self.Addr},
	})
	if err != nil {
		return nil, err
	}
	return Hints(m, self), nil
}

// Hints returns what gossip knows of the others, as self's Discovery.
func Hints(m *gossip.Members, self PeerAddr) Discovery { return hints{m, self.Name} }

type hints struct {
	*gossip.Members
	self string
}

func (h hints) Peers() (found []PeerAddr) {
	for _, p := range h.Members.Peers() {
		if p.Name != h.self {
			found = append(found, PeerAddr{p.Name, p.Control})
		}
	}
	return found
}
