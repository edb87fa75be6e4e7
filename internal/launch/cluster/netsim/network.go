package netsim

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Conditions are those of every link between two hosts.
type Conditions struct {
	// Loss is the share of packets that are lost. A part of a stream that is lost comes again, after
	// Resend.
	Loss float64
	// A packet takes Delay, and up to Jitter more.
	Delay, Jitter time.Duration
	Resend        time.Duration // 0: 200 ms, the least of Linux
}

const (
	resend    = 200 * time.Millisecond
	dialAgain = time.Second // between two tries to open a stream
)

// Network joins hosts.
type Network struct {
	mu         sync.Mutex
	rand       *rand.Rand                // guarded by mu
	conditions Conditions                // guarded by mu
	open       func(from, to *Host) bool // guarded by mu; nil: all links are open
	hosts      map[netip.Addr]*Host      // guarded by mu
	held       map[*half]bool            // guarded by mu; those with parts that a closed link holds up
}

// New returns a network without hosts. Its chance comes from the seed.
func New(seed uint64, c Conditions) *Network {
	return &Network{rand: rand.New(rand.NewPCG(seed, 1)), conditions: c, hosts: map[netip.Addr]*Host{},
		held: map[*half]bool{}}
}

// SetConditions changes those of packets that are sent from now on.
func (n *Network) SetConditions(c Conditions) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conditions = c
}

// SetLinks says which links are open, each direction for itself; nil: all. open must not block.
// Packets on a closed link are lost. Streams wait until it is open again, and go on.
func (n *Network) SetLinks(open func(from, to *Host) bool) {
	n.mu.Lock()
	n.open = open
	held := n.held
	n.held = map[*half]bool{}
	n.mu.Unlock()
	for h := range held {
		h.arrive()
	}
}

// Host returns the host of this number, from 0 to 2^24 − 1. There is one.
func (n *Network) Host(number int) *Host {
	at := netip.AddrFrom4([4]byte{10, byte(number >> 16), byte(number >> 8), byte(number)})
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.hosts[at]
	if h == nil {
		h = &Host{net: n, addr: at, Number: number, ports: map[uint16]*Listener{}, inboxes: map[uint16]*Packets{},
			conns: map[*conn]bool{}}
		n.hosts[at] = h
	}
	return h
}

// find returns the host and port that an address names.
func (n *Network) find(address string) (*Host, uint16, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.hosts[at.Addr().Unmap()]
	if h == nil {
		return nil, 0, fmt.Errorf("no host %s", at.Addr())
	}
	return h, at.Port(), nil
}

// carries reports whether the link is open. It is held up by no host that is gone.
func (n *Network) carries(from, to *Host) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.carriesLocked(from, to)
}

func (n *Network) carriesLocked(from, to *Host) bool {
	return !from.silent.Load() && !to.silent.Load() && (n.open == nil || n.open(from, to))
}

// hold notes that h waits for its link. It returns false if the link has just been opened.
func (n *Network) hold(h *half) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.carriesLocked(h.from, h.to) {
		return false
	}
	n.held[h] = true
	return true
}

// packet returns how long a packet takes, and whether it is lost.
func (n *Network) packet() (delay time.Duration, lost bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.delayLocked(), n.rand.Float64() < n.conditions.Loss
}

// part returns how long a part of a stream takes, what is lost sent again.
func (n *Network) part() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.delayLocked()
	again := n.conditions.Resend
	if again == 0 {
		again = resend
	}
	for tries := 0; tries < 10 && n.rand.Float64() < n.conditions.Loss; tries++ {
		d += again
	}
	return d
}

func (n *Network) delayLocked() time.Duration {
	d := n.conditions.Delay
	if n.conditions.Jitter > 0 {
		d += time.Duration(n.rand.Int64N(int64(n.conditions.Jitter)))
	}
	return d
}
