package command

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/place"
)

// A localAddr is an address of an interface of this host.
type localAddr struct {
	iface      string
	addr       netip.Addr
	network    netip.Prefix
	usable     bool // up and connected; neither loopback nor link-local
	physical   bool
	infiniband bool
	speed      int // Mbit/s; 0: unknown
}

func (l localAddr) String() string {
	text := l.iface + " " + l.addr.String()
	switch {
	case l.infiniband && l.speed > 0:
		return fmt.Sprintf("%s (InfiniBand, %g Gbit/s)", text, float64(l.speed)/1000)
	case l.infiniband:
		return text + " (InfiniBand)"
	case l.speed > 0:
		return fmt.Sprintf("%s (%g Gbit/s)", text, float64(l.speed)/1000)
	}
	return text
}

// rank returns a number that is higher for a faster interface, and for InfiniBand higher than for any other.
func (l localAddr) rank() int {
	if l.infiniband {
		return l.speed + 1<<40
	}
	return l.speed
}

// localAddresses lists the addresses of this host. sys is /sys/class/net.
func localAddresses(sys string) (list []localAddr) {
	all, _ := net.Interfaces() // on an error, none
	for _, i := range all {
		read := func(file string) int {
			text, _ := files.Read(filepath.Join(sys, i.Name, file), maxSysFile)
			n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			return max(0, n) // some drivers report -1
		}
		_, virtual := os.Stat(filepath.Join(sys, i.Name, "device"))
		const infiniband = 32 // ARPHRD_INFINIBAND
		l := localAddr{iface: i.Name, physical: virtual == nil, infiniband: read("type") == infiniband,
			speed: read("speed")}
		on := i.Flags&net.FlagUp != 0 && i.Flags&net.FlagRunning != 0 && i.Flags&net.FlagLoopback == 0
		addrs, _ := i.Addrs() // on an error, none
		for _, a := range addrs {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				l.addr, l.network = prefix.Addr().Unmap(), prefix
				l.usable = on && !l.addr.IsLoopback() && !l.addr.IsLinkLocalUnicast()
				list = append(list, l)
			}
		}
	}
	return list
}

const (
	sysNet     = "/sys/class/net"
	maxSysFile = 1 << 16 // the kernel reports a page as the size of each file
)

// reachable lists this host's usable addresses on the networks of peers, the fastest first; of equally fast ones,
// route, then those of its family. If peers contain addresses of this host, it lists only those, since others dial
// them.
func reachable(locals []localAddr, route netip.Addr, peers []netip.Addr) (list []localAddr) {
	mine := func(l localAddr) bool { return l.usable && slices.Contains(peers, l.addr) }
	own := slices.ContainsFunc(locals, mine)
	for _, l := range locals {
		if l.usable && slices.ContainsFunc(peers, l.network.Contains) && (!own || mine(l)) {
			list = append(list, l)
		}
	}
	slices.SortStableFunc(list, func(a, b localAddr) int {
		return cmp.Or(cmp.Compare(b.rank(), a.rank()), trueFirst(a.addr == route, b.addr == route),
			trueFirst(a.addr.Is4() == route.Is4(), b.addr.Is4() == route.Is4()))
	})
	return list
}

func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// A surroundings value is the network as this host sees it.
type surroundings struct {
	locals []localAddr
	lookup func(ctx context.Context, host string) ([]netip.Addr, error) // at least one address, or an error
	route  func(peers []netip.Addr) netip.Addr                          // the local address towards a peer; may be none
}

// addresses looks up a host, without its loopback addresses if it has others.
func (s surroundings) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	all, err := s.lookup(ctx, host)
	if others := slices.DeleteFunc(slices.Clone(all), netip.Addr.IsLoopback); len(others) > 0 {
		return others, err
	}
	return all, err
}

// choose returns this host's address for the other nodes, and a line about the choice. --interface decides. Else the
// fastest interface on a network of the rendezvous host does; if there is none, the route to it. A name that means
// loopback on its own host does not count: another node of the step, or the fastest interface, decides.
func (s surroundings) choose(ctx context.Context, iface string, at *place.Placement) (
	addr netip.Addr, line string, err error,
) {
	host, port, _ := net.SplitHostPort(at.Rendezvous)
	if iface != "" {
		l, err := namedAddress(s.locals, iface)
		if err == nil && at.Rank == 0 {
			line = s.namedLine(ctx, l, host, port)
		}
		return l.addr, line, err
	}
	peers, err := s.addresses(ctx, host)
	if err != nil {
		return addr, "", inputf("rendezvous %s: %w; correct it, or name the network between the nodes with --interface",
			terminal.Name(at.Rendezvous), err)
	}
	if peers[0].IsLoopback() && (at.LocalAgents == at.MaxAgents || literal(host)) {
		return peers[0], "", nil
	}
	for _, other := range at.Hosts {
		if !peers[0].IsLoopback() {
			break
		}
		if more, err := s.addresses(ctx, other); err == nil {
			host, peers = other, more
		}
	}
	route := s.route(peers)
	list := reachable(s.locals, route, peers)
	if i := slices.IndexFunc(s.locals, func(l localAddr) bool { return l.usable && l.addr == route }); i >= 0 {
		list = append(list, s.locals[i])
	}
	if len(list) == 0 && peers[0].IsLoopback() {
		for _, l := range s.locals {
			if l.usable {
				list = append(list, l)
			}
		}
		slices.SortStableFunc(list, func(a, b localAddr) int {
			return cmp.Or(trueFirst(a.physical, b.physical), cmp.Compare(b.rank(), a.rank()))
		})
	}
	switch {
	case len(list) > 0:
		return list[0].addr, s.chosenLine(list[0], host), nil
	case route.IsValid():
		return route, "", nil
	}
	return addr, "", inputf("rendezvous %s: this host has no route to it; name the network between the nodes with "+
		"--interface", terminal.Name(at.Rendezvous))
}

// meeting returns the rendezvous as this host reaches it. If its name means loopback here, this is the host of the
// rendezvous, and all agents of a host choose the same address.
func (s surroundings) meeting(ctx context.Context, addr netip.Addr, rendezvous string) string {
	host, port, _ := net.SplitHostPort(rendezvous)
	peers, err := s.addresses(ctx, host)
	if err == nil && peers[0].IsLoopback() && !addr.IsLoopback() {
		return net.JoinHostPort(addr.String(), port)
	}
	return rendezvous
}

// chosenLine names the chosen interface, and a faster one elsewhere.
func (s surroundings) chosenLine(best localAddr, host string) string {
	line := fmt.Sprintf("network of this node: %s, towards %s", best, terminal.Name(host))
	faster := best
	for _, l := range s.locals {
		if l.usable && (l.physical || l.infiniband) && l.rank() > faster.rank() {
			faster = l
		}
	}
	if faster != best {
		line += fmt.Sprintf("; %s is faster: to use it, pass --interface and let the nodes meet there", faster)
	}
	return line
}

// namedLine names the user's interface on rank 0's node, and warns if the other nodes look for it elsewhere.
func (s surroundings) namedLine(ctx context.Context, l localAddr, host, port string) string {
	line := "network of this node: " + l.String()
	peers, err := s.addresses(ctx, host)
	if err != nil || peers[0].IsLoopback() || slices.Contains(peers, l.addr) {
		return line
	}
	return line + fmt.Sprintf("; warning: %s means %s, so the other nodes may not find this one: on all nodes, pass "+
		"--rendezvous %s or set MASTER_ADDR=%s", terminal.Name(host), peers[0], net.JoinHostPort(l.addr.String(), port),
		l.addr)
}

// literal reports whether a host is an address or localhost, so that it means the same on every node.
func literal(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil || strings.EqualFold(host, "localhost")
}

// namePause separates two look-ups of a name that has no address yet: a pod may start before the name of another.
const namePause = time.Second

// lookup returns the addresses of a host. Until ctx ends, it waits for a name without an address.
func lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	for {
		list, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		for i := range list {
			list[i] = list[i].Unmap()
		}
		if len(list) > 0 {
			return list, nil
		}
		select {
		case <-time.After(namePause):
		case <-ctx.Done():
			return nil, cmp.Or(err, context.Cause(ctx))
		}
	}
}

// routeTo returns the local address of the route to the first peer with one. It sends nothing.
func routeTo(peers []netip.Addr) (addr netip.Addr) {
	for _, peer := range peers {
		conn, err := net.Dial("udp", netip.AddrPortFrom(peer, 9).String())
		if err == nil {
			addr = conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
			conn.Close()
			return addr
		}
	}
	return addr
}

// namedAddress returns the address of --interface, which is an address, a network or an interface. It prefers addresses
// that are not link-local.
func namedAddress(locals []localAddr, iface string) (named localAddr, err error) {
	meant := func(netip.Addr) bool { return false }
	if addr, err := netip.ParseAddr(iface); err == nil {
		meant = func(a netip.Addr) bool { return a == addr.WithZone("").Unmap() }
	} else if network, err := netip.ParsePrefix(iface); err == nil {
		meant = network.Contains
	}
	var seen []string
	for _, l := range locals {
		seen = append(seen, l.iface+" "+l.addr.String())
		switch {
		case l.iface != iface && !meant(l.addr):
		case !l.addr.IsLinkLocalUnicast():
			return l, nil
		default:
			named = l
			named.addr = l.addr.WithZone(l.iface)
		}
	}
	if !named.addr.IsValid() {
		err = inputf("--interface %s: this host has no such interface or address; it has %v", terminal.Name(iface), seen)
	}
	return named, err
}

func interfaceOf(addr netip.Addr) string {
	for _, l := range localAddresses(sysNet) {
		if l.addr == addr.WithZone("") {
			return l.iface
		}
	}
	return ""
}
