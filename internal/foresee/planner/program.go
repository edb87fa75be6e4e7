package planner

import (
	"math"

	"github.com/cprun/cprun/partition"
)

type kind uint8

const (
	compute kind = iota // a call
	copies              // of that many bytes, read and written
	begin               // an exchange
	wait                // for an exchange
)

type step struct {
	kind    kind
	of      int     // the number of the call or of the exchange, or bytes
	seconds float64 // of compute and copies; of begin, where cores send, all that it sends
}

// A message is all bytes of one exchange between two ranks, one way.
type message struct {
	peer    int
	sends   bool
	across  bool // to or from another host
	count   int  // of messages
	bytes   int64
	seconds float64
}

// A program is all that a rank queues in a pass, in order.
type program struct {
	rank      int
	gated     bool    // calls wait for rows by themselves
	host      float64 // seconds to queue one thing
	steps     []step
	calls     []Call
	exchanges [][]message
}

func (x *program) add(k kind, of int) { x.steps = append(x.steps, step{kind: k, of: of}) }

// A prices value caches the costs of one attention on one topology.
type prices struct {
	a         Attention
	topology  Topology
	costs     Costs
	calls     map[callKey]float64
	transfers map[transferKey]float64
	copied    map[int]float64
}

func newPrices(a Attention, on Topology, c Costs) *prices {
	return &prices{
		a: a, topology: on, costs: c,
		calls: map[callKey]float64{}, transfers: map[transferKey]float64{}, copied: map[int]float64{},
	}
}

// once returns the time of a key, and asks for it the first time. Unknown times are infinite.
func once[K comparable](known map[K]float64, key K, ask func() float64) float64 {
	t, ok := known[key]
	if !ok {
		if t = ask(); math.IsNaN(t) {
			t = math.Inf(1)
		}
		known[key] = t
	}
	return t
}

func (p *prices) price(x *program) {
	x.host = p.costs.Host(1)
	for i := range x.steps {
		switch s := &x.steps[i]; s.kind {
		case compute:
			s.seconds = p.call(&x.calls[s.of])
		case copies:
			s.seconds = once(p.copied, s.of, func() float64 { return p.costs.Copy(int64(s.of)) })
		case begin:
			s.seconds = p.begin(x.rank, x.exchanges[s.of])
		}
	}
}

// begin sets the times of messages, or where cores do the work of links, returns their sum: no core is left to compute
// beside them.
func (p *prices) begin(rank int, list []message) (carried float64) {
	for i := range list {
		m := &list[i]
		m.across = p.topology.host(m.peer) != p.topology.host(rank)
		m.seconds = once(p.transfers, transferKey{m.across, m.count, m.bytes}, func() float64 {
			return p.costs.Exchange(m.across, m.bytes, m.count)
		})
		if p.topology.Shared {
			if m.sends {
				carried += m.seconds
			}
			m.seconds = 0
		}
	}
	return carried
}

type transferKey struct {
	across bool
	count  int
	bytes  int64
}

const fewTiles = 4

type callKey struct {
	n           int
	tiles       [fewTiles]partition.Tile
	many        *partition.Tile // the first of more tiles: groups of heads have the same
	heads, kv   int
	first, last bool
	backward    bool
}

func (p *prices) call(c *Call) float64 {
	c.Backend = p.a.Backend
	key := callKey{n: len(c.Tiles), heads: c.Heads, kv: c.KVHeads, first: c.First, last: c.Last, backward: c.Backward}
	if len(c.Tiles) <= fewTiles {
		copy(key.tiles[:], c.Tiles)
	} else {
		key.many = &c.Tiles[0]
	}
	return once(p.calls, key, func() float64 { return p.costs.Call(*c) })
}
