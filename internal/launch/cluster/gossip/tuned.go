package gossip

import (
	"time"

	"github.com/hashicorp/memberlist"
)

// tuned returns memberlist's settings. Its own for a local network find a dead agent after 5 s and
// more; these after 1 to 2 s, and 3 s among 1,024, for about 60 packets a second while there is news
// and 16 otherwise. docs/cluster-simulation.md has what they cost.
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
