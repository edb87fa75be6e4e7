package cluster

import (
	"context"
	"net"

	"github.com/cprun/cprun/internal/launch/cluster/gossip"
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

func (g *gossiping) discover(self Found) (Discovery, error) {
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
func Hints(m *gossip.Members, self Found) Discovery { return hints{m, self.Name} }

type hints struct {
	*gossip.Members
	self string
}

func (h hints) Peers() (found []Found) {
	for _, p := range h.Members.Peers() {
		if p.Name != h.self {
			found = append(found, Found{p.Name, p.Control})
		}
	}
	return found
}
