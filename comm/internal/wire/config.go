// Package wire joins processes by sockets: frames, their sealing, flow control, the handshake,
// connections at the start and on first use, and the news of ranks: together they are a link.Link.
package wire

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

const (
	maxRanks  = 1 << 16
	minSecret = 16

	// defaultPairs bounds the worlds in which all ranks are connected with each other: two nodes of
	// eight GPUs. Up to there a barrier in one round takes no longer than one in log2 N, every rank
	// sees every death itself, and all connections of a rank take about 1 MiB.
	defaultPairs = 16
)

// Mode is how frames travel on a connection after the handshake. Both ends must mean the same:
// each says it in its hello, which the proofs cover, so that no one in between can have a sealed
// connection taken for a plain one.
type Mode byte

// The modes.
const (
	Plain  Mode = 'p' // as they are, for Unix sockets, which only this user can reach
	Sealed Mode = 's' // encrypted and authenticated, for TCP
)

func (m Mode) String() string {
	switch m {
	case Plain:
		return "plain"
	case Sealed:
		return "sealed"
	}
	return fmt.Sprintf("mode %d", byte(m))
}

// Config describes a world of processes, and how this rank meets the others.
type Config struct {
	Rank, Size int
	Secret     []byte // the job's own, at least 16 bytes; its owner can join
	RunID      string // tells apart runs that share a secret
	Name       string // goes into errors after the rank; "" means the process id

	Timeout time.Duration                    // for the ranks to find each other
	Log     func(format string, args ...any) // is told of connections; not nil

	// Pairs is up to how many ranks all are connected with each other; 0 means 16. In a larger
	// world each is connected with its neighbours at first, link.Neighbours.
	Pairs int

	// Alone keeps this rank from sharing memory with others of its node: all goes over the sockets.
	Alone bool

	// Listeners take the connections of higher ranks. Connect takes them over.
	Listeners []Listener
	// Dial reaches a lower rank, which may not listen yet. It is called until the world ends.
	Dial func(ctx context.Context, rank int) (net.Conn, Mode, error)
}

// Listener is where ranks connect. Mode says how they then speak.
type Listener struct {
	net.Listener
	Mode Mode
}

// Check returns the faults of ranks, secret and name.
func (c *Config) Check() error {
	var faults []error
	if c.Size < 1 || c.Size > maxRanks || c.Rank < 0 || c.Rank >= c.Size {
		faults = append(faults, fmt.Errorf("rank %d of %d: a rank is from 0 to below the size, at most %d", c.Rank,
			c.Size, maxRanks))
	}
	if len(c.Secret) < minSecret {
		faults = append(faults, fmt.Errorf("secret of %d bytes: it needs at least %d, from crypto/rand", len(c.Secret),
			minSecret))
	}
	if len(c.Name) > maxName {
		faults = append(faults, fmt.Errorf("name of %d bytes: it may have %d", len(c.Name), maxName))
	}
	return errors.Join(faults...)
}

// pairs returns up to how many ranks all are connected with each other.
func (c *Config) pairs() int {
	if c.Pairs > 0 {
		return c.Pairs
	}
	return defaultPairs
}

// identity describes this rank to others.
func (c *Config) identity() *identity {
	name := c.Name
	if name == "" {
		name = fmt.Sprintf("pid %d", os.Getpid())
	}
	return &identity{
		rank: c.Rank, size: c.Size, run: sha256.Sum256([]byte(c.RunID)), name: name, secret: c.Secret,
		alone: c.Alone, log: c.Log,
	}
}

// DialTCP connects to a rank's listener on another node.
func DialTCP(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: handshakeBound} // a host that was not up yet is asked again
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", addr)
}

// ListenTCP listens at a free port of a host, which is one of this node's addresses or names, of IPv4 or
// IPv6, with brackets or without; "" is all of them.
func ListenTCP(ctx context.Context, host string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // what looks for silence counts the segments of one path
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return c.Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
}
