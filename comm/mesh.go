package comm

import (
	"context"
	"fmt"
	"net"
	"slices"

	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/comm/internal/shm"
	"github.com/cprun/cprun/comm/internal/wire"
	"github.com/cprun/cprun/tensor"
)

// Mesh describes a world of processes, and how this rank reaches the others.
type Mesh struct {
	Rank, Size int
	// Secret is random, at least 16 bytes long, and the same on all ranks of the job. Its owner can join the job.
	Secret []byte
	// RunID distinguishes runs that share a secret, such as the attempts of one job.
	RunID string
	// Name goes into errors after the rank: "pid 4711 on node-a". By default it is the
	// process id.
	Name string

	// Dir holds the Unix sockets of the ranks of this node. It must belong to this user, with mode 0700.
	Dir string

	// Listener accepts the TCP connections of higher ranks on other nodes. The mesh takes it over. It closes it when
	// all ranks are connected in a world of up to 16, and else with the group, since ranks may connect on first use.
	Listener net.Listener
	// Addrs lists how this rank reaches each other one, by rank: "host:port" of its TCP listener, or "" for its socket
	// in Dir. nil: all have sockets in Dir. A rank dials the lower ones only.
	Addrs []string
	// Nodes lists the node of each rank, by any numbers, the same on all ranks; nil: one node. Devices use it to find
	// peers within the node.
	Nodes []int
	// Alone keeps this rank from sharing memory with others of its node: everything uses the sockets, and large
	// messages take longer. Ranks may differ in it.
	Alone bool

	pairs int // the largest world in which all ranks connect with each other; 0: the default
}

// SharesMemory returns nil if ranks of this node can share memory for large messages, and otherwise the reason why they
// use sockets.
func SharesMemory() error { return shm.Try() }

// Listen returns a listener for a Mesh, at a free port of a host: an address or a name of this node, of IPv4 or IPv6,
// or "" for all addresses.
func Listen(ctx context.Context, host string) (net.Listener, error) {
	ln, err := wire.ListenTCP(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("listen on host %q: use an address of this node: %w", host, err)
	}
	return ln, nil
}

// Connect joins processes, over TCP with ranks that have an address in m.Addrs, and else over Unix sockets. Other ranks
// reach this one by its socket in m.Dir or by m.Listener; it may need both. Without Addrs all ranks are on this node. A
// rendezvous must distribute the addresses before.
//
// Connect returns when all ranks are connected, or an error that names the missing ones. In a world of more than 16
// ranks it waits only for its neighbours, and the first collective for the others. Calls are ordered against compute;
// nil: a private stream.
//
// Frames over TCP are encrypted and authenticated. Unix sockets carry plain frames, since only this user can reach
// them. Each side of a connection states the mode in the handshake, and proves it with the secret.
func Connect(ctx context.Context, m Mesh, compute tensor.Stream, opts Options) (*Group, error) {
	opts = opts.withDefaults()
	if m.Addrs == nil {
		m.Addrs = make([]string, max(m.Size, 0))
	}
	c := wire.Config{
		Rank: m.Rank, Size: m.Size, Secret: m.Secret, RunID: m.RunID, Name: m.Name,
		Timeout: opts.Connect, Log: opts.Log, Pairs: m.pairs, Alone: m.Alone,
	}
	if m.Listener != nil {
		c.Listeners = append(c.Listeners, wire.Listener{Listener: m.Listener, Mode: wire.Sealed})
	}
	if err := m.prepare(&c); err != nil {
		for _, ln := range c.Listeners { // the mesh has taken them over
			ln.Close()
		}
		return nil, fmt.Errorf("mesh: %w", err)
	}
	l, err := wire.Connect(ctx, c)
	if err != nil {
		return nil, err
	}
	l.Nodes = slices.Clone(m.Nodes)
	return NewWorld(l, m.Rank, compute, opts), nil
}

// prepare checks m, and sets how c dials and listens.
func (m *Mesh) prepare(c *wire.Config) error {
	if err := c.Check(); err != nil {
		return err
	}
	if m.Rank > 0 && len(m.Addrs) != m.Size {
		return fmt.Errorf("%d addresses for %d ranks", len(m.Addrs), m.Size)
	}
	if err := m.checkNodes(); err != nil {
		return err
	}
	var here wire.UnixDir // this node's sockets
	if m.Dir != "" {
		var err error
		if here, err = wire.NewUnixDir(m.Dir, m.RunID, m.Size); err != nil {
			return err
		}
	}
	for r := range m.Rank {
		if m.Addrs[r] == "" && m.Dir == "" {
			return fmt.Errorf("rank %d has no address, and there is no socket directory", r)
		}
	}
	c.Dial = func(ctx context.Context, rank int) (net.Conn, wire.Mode, error) {
		if a := m.Addrs[rank]; a != "" {
			conn, err := wire.DialTCP(ctx, a)
			return conn, wire.Sealed, err
		}
		return here.Dial(ctx, rank)
	}
	return m.listen(c, here)
}

// checkNodes returns an error for nodes that do not fit ranks or addresses.
func (m *Mesh) checkNodes() error {
	if m.Nodes == nil {
		return nil
	}
	if len(m.Nodes) != m.Size {
		return fmt.Errorf("nodes of %d ranks, there are %d", len(m.Nodes), m.Size)
	}
	for r := range m.Rank {
		if m.Addrs[r] == "" && m.Nodes[r] != m.Nodes[m.Rank] {
			return fmt.Errorf("rank %d is on node %d and has no address, which rank %d on node %d needs", r, m.Nodes[r],
				m.Rank, m.Nodes[m.Rank])
		}
	}
	return nil
}

// listen makes the socket of this rank if m has a directory and higher ranks dial it.
func (m *Mesh) listen(c *wire.Config, here wire.UnixDir) error {
	if m.Rank == m.Size-1 {
		return nil
	}
	if m.Dir != "" {
		ln, err := here.Listen(m.Rank)
		if err != nil {
			return err
		}
		c.Listeners = append(c.Listeners, ln)
	}
	if len(c.Listeners) == 0 {
		return fmt.Errorf("rank %d of %d has no listener", m.Rank, m.Size)
	}
	return nil
}

// NewLocal joins n ranks of this process and returns their groups, by rank. A message is one copy from the sender's
// view to the receiver's. Rank r's calls are ordered against compute[r]; a nil slice or element: a private stream, for
// callers that only use Sync. Close each group. It panics if n is below 1 or compute has another length.
func NewLocal(n int, compute []tensor.Stream, opts Options) []*Group {
	return newLocal(n, 0, compute, opts)
}

// newLocal lets collectives of up to pairs ranks use all pairs of ranks; 0: any number.
func newLocal(n, pairs int, compute []tensor.Stream, opts Options) []*Group {
	if n < 1 || compute != nil && len(compute) != n {
		panic(fmt.Sprintf("comm: local world of %d ranks with %d compute streams", n, len(compute)))
	}
	w := local.NewWorld(n)
	groups := make([]*Group, n)
	for r := range n {
		var s tensor.Stream
		if compute != nil {
			s = compute[r]
		}
		l := w.Link(r)
		l.Pairs = pairs
		groups[r] = NewWorld(l, r, s, opts)
	}
	return groups
}
