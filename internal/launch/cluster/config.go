package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"time"
)

// Config describes an agent and its job.
type Config struct {
	Job string // name of the job: agents of different jobs refuse each other
	Key []byte // the job's secret, at least 16 bytes; never sent
	// Program is cprun's version. Inputs is a digest of the config and of the flags that must be equal on all nodes.
	// Agents with different values refuse each other and name the difference.
	Program, Inputs string

	NodeRank int // the requested one; -1: any
	Min, Max int // number of agents; equal if it is fixed
	NProc    int // workers of this agent

	Host   string // name of this node in messages
	HostID string // equal on all agents of one host

	// Listen is this host's IP address on the job's network, for control connections and for workers.
	Listen string
	// Port is the port of the job's rendezvous if this agent may be there, else 0. If another process uses the port,
	// this agent takes a free one, and Port too as soon as that is free.
	Port int
	// Meets says that this host is the rendezvous: its agent that gets Port leads until the first start. An agent whose
	// dial of the first seed reaches itself leads as well.
	Meets bool
	// Seeds are addresses, host:port, of other agents, the rendezvous first. This agent's own address may be among
	// them.
	Seeds []string

	MaxRestarts int // restarts of the workers

	JoinTimeout    time.Duration // until the first start; 0: 10 minutes
	RegroupTimeout time.Duration // until a start after a loss of nodes; 0: 60 s
	LastCall       time.Duration // wait for further agents before fewer than Max start; 0: 10 s
	Silence        time.Duration // an agent silent for this long is lost; 0: 5 s

	RunDir RunDir
	Log    func(format string, args ...any) // prints a line for the user

	Network Network // nil: TCP and UDP
}

// A RunDir is the job's run directory, which all nodes share.
type RunDir interface {
	// Prepare prepares a start, and returns the payload for all workers. Only the leader calls it. An error ends the
	// job; a *launch.Over gives the exit status. The leader's Next returns the error itself, the other agents' Next
	// returns its text. The Assignment is complete.
	Prepare(context.Context, Assignment) (payload []byte, err error)
	// Claim records a decision under its number in the directory of a start with that payload, unless there is one with
	// that or a later number, and returns the newest. A nil decision only reads; a nil result means that there is none.
	// After an error, Claim is called again; a *launch.Over ends the job.
	Claim(ctx context.Context, payload []byte, number int, decision []byte) (newest []byte, err error)
}

// Network connects agents. Tests replace it.
type Network interface {
	// Listen listens at host:port; port 0 is any.
	Listen(addr string) (net.Listener, error)
	// ListenPacket opens a UDP socket at host:port.
	ListenPacket(addr string) (net.PacketConn, error)
	// Dial connects to host:port.
	Dial(ctx context.Context, addr string) (net.Conn, error)
}

// PeerAddr is an agent's name and control address.
type PeerAddr struct{ Name, Addr string }

func (c *Config) resolve() error {
	c.JoinTimeout = cmp.Or(c.JoinTimeout, 10*time.Minute)
	c.RegroupTimeout = cmp.Or(c.RegroupTimeout, time.Minute)
	c.LastCall = cmp.Or(c.LastCall, 10*time.Second)
	c.Silence = cmp.Or(c.Silence, 5*time.Second)
	if c.Network == nil {
		c.Network = tcp{}
	}
	switch {
	case c.Min < 1 || c.Max < c.Min || c.Max > maxAgents:
		return fmt.Errorf("nodes %d:%d: MIN must be at least 1, MAX at least MIN and at most %d", c.Min, c.Max,
			maxAgents)
	case c.NodeRank < -1 || c.NodeRank >= c.Max:
		return fmt.Errorf("node rank %d: must be 0 to %d", c.NodeRank, c.Max-1)
	case c.NProc < 1 || c.NProc > maxProcs:
		return fmt.Errorf("processes of a node: %d; must be 1 to %d", c.NProc, maxProcs)
	}
	return nil
}

// Bounds of values in messages.
const (
	maxAgents = 4096
	maxProcs  = 1024
	maxHost   = 255
)
