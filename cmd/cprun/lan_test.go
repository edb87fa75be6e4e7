//go:build cluster && linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A lanSwitch is a network of hosts on this machine. Each host has network namespaces with its own name and address. The
// switch carries the packets between them. It can lose, delay or cut them, for each direction of each pair. The kernel
// needs TUN devices alone; the process needs root, or root in a user namespace. Its methods may be called at any time.
type lanSwitch struct {
	network netip.Prefix
	mu      sync.Mutex
	hosts   map[netip.Addr]*lanHost   // guarded by mu
	paths   map[[2]netip.Addr]lanPath // guarded by mu: from, to
	lines   map[[2]netip.Addr]*line   // guarded by mu: delayed packets
	done    sync.WaitGroup
	ended   chan struct{}
}

// newLAN returns a network without hosts, such as 10.77.0.0/24.
func newLAN(network netip.Prefix) *lanSwitch {
	return &lanSwitch{
		network: network.Masked(), hosts: map[netip.Addr]*lanHost{}, paths: map[[2]netip.Addr]lanPath{},
		lines: map[[2]netip.Addr]*line{}, ended: make(chan struct{}),
	}
}

// Host adds a host with the next address of the network.
func (s *lanSwitch) Host(name string) (*lanHost, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	addr := s.network.Addr().Next()
	for s.hosts[addr] != nil {
		addr = addr.Next()
	}
	h, err := newLANHost(name, netip.PrefixFrom(addr, s.network.Bits()))
	if err != nil {
		return nil, err
	}
	s.hosts[addr] = h
	s.done.Go(func() { s.carry(h) })
	return h, nil
}

// Set changes the path from one host to another. It applies to packets sent afterwards.
func (s *lanSwitch) Set(from, to *lanHost, p lanPath) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths[[2]netip.Addr{from.Addr, to.Addr}] = p
}

// Around sets all paths from and to a host.
func (s *lanSwitch) Around(h *lanHost, p lanPath) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for addr := range s.hosts {
		s.paths[[2]netip.Addr{h.Addr, addr}] = p
		s.paths[[2]netip.Addr{addr, h.Addr}] = p
	}
}

// Close ends the network. The processes on its hosts must have ended.
func (s *lanSwitch) Close() error {
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
func (s *lanSwitch) carry(h *lanHost) {
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

func (s *lanSwitch) send(from, to netip.Addr, packet []byte) {
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
	to      *lanHost
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

// lanPath describes the link from one host to another.
type lanPath struct {
	Cut   bool
	Loss  float64       // share of packets that the switch drops
	Delay time.Duration // of delivered packets
}

// lanDevice is the name of a host's network interface.
const lanDevice = "lan0"

// mtu is the size of jumbo frames, so that the switch carries fewer packets.
const mtu = 9000

// lanHost is a host of the network.
type lanHost struct {
	Name string
	Addr netip.Addr
	do   chan func() // run on a thread in the host's namespaces
	tun  *os.File    // the host's packets, one per read or write
}

func newLANHost(name string, addr netip.Prefix) (*lanHost, error) {
	h := &lanHost{Name: name, Addr: addr.Addr(), do: make(chan func())}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		made <- h.enter(addr)
		for f := range h.do {
			f()
		}
	}()
	if err := <-made; err != nil {
		close(h.do)
		return nil, fmt.Errorf("host %s: %w", name, err)
	}
	return h, nil
}

// enter makes the namespaces of the calling thread, and the network interface in them.
func (h *lanHost) enter(addr netip.Prefix) error {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("namespaces: %w; run as root", err)
	}
	if err := unix.Sethostname([]byte(h.Name)); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("/dev/net/tun: %w", err)
	}
	if err := h.attach(fd, addr); err != nil {
		unix.Close(fd)
		return err
	}
	h.tun = os.NewFile(uintptr(fd), "tun of "+h.Name)
	return nil
}

// attach makes the interface of fd, sets its address, and enables it.
func (h *lanHost) attach(fd int, addr netip.Prefix) error {
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(sock)
	mask := [4]byte{}
	for i := range addr.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	for _, step := range []struct {
		what    string
		fd      int
		name    string
		request uint
		set     func(*unix.Ifreq) error
	}{
		{"interface", fd, lanDevice, unix.TUNSETIFF, ifFlags(unix.IFF_TUN | unix.IFF_NO_PI)},
		{"address", sock, lanDevice, unix.SIOCSIFADDR, ifAddr(addr.Addr().As4())},
		{"network mask", sock, lanDevice, unix.SIOCSIFNETMASK, ifAddr(mask)},
		{"packet size", sock, lanDevice, unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(mtu); return nil }},
		{"up", sock, lanDevice, unix.SIOCSIFFLAGS, ifFlags(unix.IFF_UP | unix.IFF_RUNNING)},
		{"loopback", sock, "lo", unix.SIOCSIFFLAGS, ifFlags(unix.IFF_UP | unix.IFF_RUNNING)},
	} {
		r, err := unix.NewIfreq(step.name)
		if err == nil {
			err = step.set(r)
		}
		if err == nil {
			err = unix.IoctlIfreq(step.fd, step.request, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

func ifFlags(f uint16) func(*unix.Ifreq) error {
	return func(r *unix.Ifreq) error { r.SetUint16(f); return nil }
}

func ifAddr(addr [4]byte) func(*unix.Ifreq) error {
	return func(r *unix.Ifreq) error { return r.SetInet4Addr(addr[:]) }
}

// Start starts a command on the host.
func (h *lanHost) Start(cmd *exec.Cmd) error {
	err := make(chan error)
	h.do <- func() { err <- cmd.Start() }
	return <-err
}

// close disconnects the host. Its namespaces end with their last process.
func (h *lanHost) close() error {
	close(h.do)
	return h.tun.Close()
}

// ping reports whether one host gets an answer from another, and after how long.
func ping(t *testing.T, from, to *lanHost) (bool, string) {
	t.Helper()
	cmd := exec.Command(
		"bash",
		"-c",
		"echo hello >/dev/udp/"+to.Addr.String()+"/9; exec 3<>/dev/tcp/"+to.Addr.String()+"/7777",
	)
	var out strings.Builder
	cmd.Stderr = &out
	if err := from.Start(cmd); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- cmd.Wait() }()
	select {
	case <-over:
		return strings.Contains(out.String(), "refused"), out.String() // the answer of a host without a listener
	case <-time.After(1500 * time.Millisecond):
		cmd.Process.Kill()
		<-over
		return false, "no answer"
	}
}

func TestLAN(t *testing.T) {
	s := newLAN(netip.MustParsePrefix("10.77.0.0/24"))
	defer s.Close()
	a, err := s.Host("node01")
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Host("node02")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("hostname")
	var name strings.Builder
	cmd.Stdout = &name
	if err := b.Start(cmd); err != nil || cmd.Wait() != nil || strings.TrimSpace(name.String()) != "node02" {
		t.Errorf("host %q, %v", name.String(), err)
	}
	for _, step := range []struct {
		name string
		do   func()
		want bool
	}{
		{"as they are", func() {}, true},
		{"cut", func() { s.Around(b, lanPath{Cut: true}) }, false},
		{"one way", func() { s.Around(b, lanPath{}); s.Set(b, a, lanPath{Cut: true}) }, false},
		{"late", func() { s.Around(b, lanPath{Delay: 100 * time.Millisecond}) }, true},
		{"whole", func() { s.Around(b, lanPath{}) }, true},
	} {
		step.do()
		if got, said := ping(t, a, b); got != step.want {
			t.Errorf("%s: answered %t, want %t: %s", step.name, got, step.want, said)
		}
	}
}
