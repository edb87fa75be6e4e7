package gossip

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hashicorp/memberlist"
)

const (
	// seekPause separates two rounds while this agent is alone; it doubles up to maxSeekPause.
	seekPause    = 200 * time.Millisecond
	maxSeekPause = 2 * time.Second
	// idlePause separates two rounds for seeds that are not members. After a long network partition, neither side knows
	// the other, and no agent is alone.
	idlePause = 10 * time.Second
	// lookupBound bounds the DNS lookup of a seed.
	lookupBound = 5 * time.Second
	maxSeeds    = 64
	// After it joined, an agent exchanges full state with randomSyncs random members, one each randomSyncPause. If all
	// agents of a job start together, packets alone take 18 s to inform each of 1,024 agents: they are designed for few
	// changes.
	randomSyncs     = 6
	randomSyncPause = 500 * time.Millisecond
	// maxAddresses bounds the addresses tried for one seed.
	maxAddresses = 8
)

// A seed is the address of a possible agent.
type seed struct {
	host string
	port uint16
}

func (s seed) String() string { return net.JoinHostPort(s.host, strconv.Itoa(int(s.port))) }

func parseSeeds(list []string) ([]seed, error) {
	if len(list) > maxSeeds {
		return nil, fmt.Errorf("gossip: %d seeds; give at most %d (one is enough)", len(list), maxSeeds)
	}
	seeds := make([]seed, 0, len(list))
	for _, text := range list {
		host, digits, _ := net.SplitHostPort(text)
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || n == 0 || host == "" || !printable(host) {
			return nil, fmt.Errorf("gossip: the seed %.80q is not host:port", text)
		}
		seeds = append(seeds, seed{host, uint16(n)})
	}
	return seeds, nil
}

// seek asks the seeds until one answers. It continues while this agent is alone or a seed is not a member, until ctx
// ends.
func (m *Members) seek(ctx context.Context, seeds []seed) {
	pause := seekPause
	for len(seeds) > 0 && ctx.Err() == nil {
		m.joinSeeds(ctx, seeds)
		switch alone := m.alone(); {
		case !alone:
			pause = idlePause
		case pause == idlePause:
			pause = seekPause
		default:
			pause = min(2*pause, maxSeekPause)
		}
		// The random pause separates agents that started together.
		if !sleep(ctx, pause/2+rand.N(pause)) {
			return
		}
	}
}

// syncRandom exchanges full state with random members, once this agent is not alone.
func (m *Members) syncRandom(ctx context.Context) {
	for done := 0; done < randomSyncs; {
		if !sleep(ctx, randomSyncPause/2+rand.N(randomSyncPause)) {
			return
		}
		if at, ok := m.randomMember(); ok {
			_, _ = m.list.Join([]string{at.String()}) // memberlist itself detects a lost member
			done++
		}
	}
}

// randomMember returns the address of a random other member, if there is one.
func (m *Members) randomMember() (at netip.AddrPort, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := 0
	for name, p := range m.peers {
		if name == m.self {
			continue
		}
		if seen++; rand.N(seen) == 0 {
			at = p.addr
		}
	}
	return at, seen > 0
}

func (m *Members) alone() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, self := m.peers[m.self]
	return len(m.peers) == 0 || self && len(m.peers) == 1
}

// joinSeeds exchanges full state with all seeds that are not members, concurrently.
func (m *Members) joinSeeds(ctx context.Context, seeds []seed) {
	var wait sync.WaitGroup
	defer wait.Wait()
	for _, s := range seeds {
		wait.Go(func() {
			at, err := s.lookup(ctx, m.addr.Addr().Is4())
			if err != nil || ctx.Err() != nil || m.knows(at) {
				return // the name may get an address later
			}
			_, _ = m.list.Join(at) // a later round retries failures
		})
	}
}

// lookup returns the addresses of a seed that an agent with an address of this family can reach.
func (s seed) lookup(ctx context.Context, is4 bool) ([]string, error) {
	if ip, err := netip.ParseAddr(s.host); err == nil {
		return []string{netip.AddrPortFrom(ip.Unmap(), s.port).String()}, nil
	}
	ctx, stop := context.WithTimeout(ctx, lookupBound)
	defer stop()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", s.host)
	var list []string
	for _, ip := range ips {
		if ip = ip.Unmap(); ip.Is4() == is4 && len(list) < maxAddresses {
			list = append(list, netip.AddrPortFrom(ip, s.port).String())
		}
	}
	return list, err
}

// knows reports whether a member has one of these addresses.
func (m *Members) knows(list []string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.peers {
		if slices.Contains(list, p.addr.String()) {
			return true
		}
	}
	return slices.Contains(list, m.addr.String())
}

// sleep waits for d, and returns false at once when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Peer describes an agent of the job.
type Peer struct {
	Name    string // unique; a restarted agent has another
	Control string // host:port for control connections
}

// metaVersion is the first byte of a member's metadata. The control address follows.
const metaVersion = 2

const maxName = 300 // bytes: a host and a digest

func (p Peer) encode() ([]byte, error) {
	return append([]byte{metaVersion}, p.Control...), p.check()
}

// decode parses the metadata of the member called name. It keeps no reference to meta.
func decode(name string, meta []byte) (Peer, error) {
	if len(meta) == 0 || meta[0] != metaVersion {
		return Peer{}, errors.New("its metadata is of another version of cprun")
	}
	p := Peer{Name: name, Control: string(meta[1:])}
	return p, p.check()
}

func (p Peer) check() error {
	if p.Name == "" || len(p.Name) > maxName || !printable(p.Name) {
		return fmt.Errorf("agent name %[2]q: want 1 to %[1]d printable bytes", maxName, p.Name)
	}
	host, port, err := net.SplitHostPort(p.Control)
	if err != nil || host == "" || !printable(host) || len(p.Control) >= memberlist.MetaMaxSize {
		return fmt.Errorf("the control address of %s is %.80q; it must be host:port", p.Name, p.Control)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("the control address of %s is %.80q; its port must be 1 to 65535", p.Name, p.Control)
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
