//go:build linux

package lan

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Path describes the link from one host to another.
type Path struct {
	Cut   bool
	Loss  float64       // share of packets that the switch drops
	Delay time.Duration // of delivered packets
}

// Switch carries packets between hosts. Its methods may be called at any time.
type Switch struct {
	network netip.Prefix
	mu      sync.Mutex
	hosts   map[netip.Addr]*Host    // guarded by mu
	paths   map[[2]netip.Addr]Path  // guarded by mu: from, to
	lines   map[[2]netip.Addr]*line // guarded by mu: delayed packets
	done    sync.WaitGroup
	ended   chan struct{}
}

// New returns a network without hosts, such as 10.77.0.0/24.
func New(network netip.Prefix) *Switch {
	return &Switch{
		network: network.Masked(), hosts: map[netip.Addr]*Host{}, paths: map[[2]netip.Addr]Path{},
		lines: map[[2]netip.Addr]*line{}, ended: make(chan struct{}),
	}
}

// Host adds a host with the next address of the network.
func (s *Switch) Host(name string) (*Host, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	addr := s.network.Addr().Next()
	for s.hosts[addr] != nil {
		addr = addr.Next()
	}
	h, err := newHost(name, netip.PrefixFrom(addr, s.network.Bits()))
	if err != nil {
		return nil, err
	}
	s.hosts[addr] = h
	s.done.Go(func() { s.carry(h) })
	return h, nil
}

// Set changes the path from one host to another. It applies to packets sent afterwards.
func (s *Switch) Set(from, to *Host, p Path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths[[2]netip.Addr{from.Addr, to.Addr}] = p
}

// Around sets all paths from and to a host.
func (s *Switch) Around(h *Host, p Path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for addr := range s.hosts {
		s.paths[[2]netip.Addr{h.Addr, addr}] = p
		s.paths[[2]netip.Addr{addr, h.Addr}] = p
	}
}

// Close ends the network. The processes on its hosts must have ended.
func (s *Switch) Close() error {
	close(s.ended)
	s.mu.Lock()
	var errs []error
	for _, h := range s.hosts {
		errs = append(errs, h.close())
	}
	s.mu.Unlock()
	s.done.Wait()
	return errors.Join(errs...)
}

// carry forwards the packets of a host to their destinations until the host is closed.
func (s *Switch) carry(h *Host) {
	buf := make([]byte, mtu+64)
	for {
		n, err := h.tun.Read(buf)
		if err != nil {
			return
		}
		if n < 20 || buf[0]>>4 != 4 {
			continue // IPv6 neighbour discovery: the network has IPv4 alone
		}
		s.send(h.Addr, netip.AddrFrom4([4]byte(buf[16:20])), buf[:n])
	}
}

func (s *Switch) send(from, to netip.Addr, packet []byte) {
	key := [2]netip.Addr{from, to}
	s.mu.Lock()
	h, p, l := s.hosts[to], s.paths[key], s.lines[key]
	if h != nil && l == nil && p.Delay > 0 {
		l = &line{to: h, packets: make(chan late, maxLate)}
		s.lines[key] = l
		s.done.Go(func() { l.run(s.ended) })
	}
	s.mu.Unlock()
	if h == nil || p.Cut || p.Loss > 0 && rand.Float64() < p.Loss {
		return
	}
	if l == nil { // no packet was ever delayed on this path
		h.tun.Write(packet)
		return
	}
	select {
	case l.packets <- late{time.Now().Add(p.Delay), append([]byte(nil), packet...)}:
	default: // a full queue drops packets, as in a real switch
	}
}

// maxLate limits the delayed packets of one direction between two hosts.
const maxLate = 4096

// A line queues the packets of one path until they are due, in order.
type line struct {
	to      *Host
	packets chan late
}

type late struct {
	due    time.Time
	packet []byte
}

func (l *line) run(ended <-chan struct{}) {
	for {
		select {
		case p := <-l.packets:
			if wait := time.Until(p.due); wait > 0 {
				select {
				case <-time.After(wait):
				case <-ended:
					return
				}
			}
			l.to.tun.Write(p.packet)
		case <-ended:
			return
		}
	}
}
