package command

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/launch/place"
)

// TestNamedAddress checks --interface on this host.
func TestNamedAddress(t *testing.T) {
	loopback := ""
	all := must.Have(net.Interfaces())
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			loopback = i.Name
		}
	}
	locals := localAddresses(sysNet)
	for _, name := range []string{"127.0.0.1", "127.0.0.0/8", "::ffff:127.0.0.1", loopback} {
		if l, err := namedAddress(locals, name); l.addr.String() != "127.0.0.1" || err != nil {
			t.Errorf("--interface %s: %v, %v", name, l, err)
		}
	}
	for _, name := range []string{"eth99", "203.0.113.7", "203.0.113.0/24", "\x1b[2J", "/", "::1/200"} {
		l, err := namedAddress(locals, name)
		var input *InputError
		if !errors.As(err, &input) || !strings.Contains(err.Error(), "127.0.0.1") ||
			strings.Contains(err.Error(), "\x1b") {
			t.Errorf("--interface %q: %v, %v; want an error that lists what there is", name, l, err)
		}
	}
}

// TestInterfaceSpeed checks type and speed as the kernel reports them, and loopback, which is not for other nodes.
func TestInterfaceSpeed(t *testing.T) {
	lo := localAddresses(sysNet)[0]
	if lo.usable || !lo.addr.IsLoopback() {
		t.Fatalf("%+v, want loopback first, and not usable", lo)
	}
	sys := t.TempDir()
	dir := filepath.Join(sys, lo.iface)
	write := func(file, text string) {
		text += strings.Repeat("\n", 4096-len(text)) // the kernel's files have the size of a page
		must.Do(t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600)))
	}
	for _, c := range []struct{ kind, speed, want string }{
		{"32", "200000", " (InfiniBand, 200 Gbit/s)"}, {"32", "-1", " (InfiniBand)"}, {"1", "2500", " (2.5 Gbit/s)"},
		{"1", "-1", ""}, {"", "", ""},
	} {
		write("type", c.kind)
		write("speed", c.speed)
		if l := localAddresses(sys)[0]; l.String() != lo.iface+" 127.0.0.1"+c.want || l.physical {
			t.Errorf("type %s, speed %s: %v, physical %v", c.kind, c.speed, l, l.physical)
		}
	}
	write("device", "")
	if !localAddresses(sys)[0].physical {
		t.Error("an interface with a device is not physical")
	}
}

// local returns an interface of a host.
func local(iface, prefix string, speed int, infiniband bool) localAddr {
	p := netip.MustParsePrefix(prefix)
	return localAddr{iface: iface, addr: p.Addr(), network: p, physical: !strings.HasPrefix(iface, "docker"),
		infiniband: infiniband, speed: speed, usable: !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast()}
}

// TestChooseAddress checks the rule of docs/cluster.md on a host with several networks.
func TestChooseAddress(t *testing.T) {
	host := []localAddr{
		local("lo", "127.0.0.1/8", 0, false), local("mgmt", "192.168.0.1/24", 1000, false),
		local("eth0", "10.0.0.1/16", 25000, false), local("eth1", "10.0.1.1/16", 25000, false),
		local("eth2", "10.1.0.1/16", 400000, false), local("ib0", "10.2.0.1/16", 200000, true),
		local("docker0", "172.17.0.1/16", 500000, false), local("eth0", "fe80::1/64", 25000, false),
		local("eth2", "fd00::1/64", 400000, false), local("mgmt", "fd01::1/64", 1000, false),
	}
	names := map[string]string{
		"mgmt02": "192.168.0.2", "eth02": "10.0.0.2", "all02": "192.168.0.2 10.1.0.2 10.2.0.2", "fast02": "10.1.0.2 10.0.0.2",
		"node01": "10.0.0.1", "both01": "192.168.0.1 10.0.1.1", "far": "203.0.113.7", "debian01": "127.0.1.1",
		"zone02": "fe80::2", "mixed01": "127.0.1.1 10.0.0.1",
		"dual02": "fd01::2 192.168.0.2 10.1.0.2 fd00::2",
	}
	routes := map[string]string{"10.0.0.2": "10.0.1.1", "203.0.113.7": "192.168.0.1", "127.0.1.1": "127.0.0.1",
		"127.0.0.1": "127.0.0.1", "fe80::2": "fe80::1", "fd01::2": "fd01::1"}
	for _, c := range []struct {
		name, iface, host string
		at                place.Placement
		want, line        string
	}{
		{name: "one network", host: "mgmt02", want: "192.168.0.1", line: "ib0 10.2.0.1 (InfiniBand, 200 Gbit/s) is faster"},
		{name: "InfiniBand", host: "all02", want: "10.2.0.1", line: "ib0 10.2.0.1 (InfiniBand, 200 Gbit/s), towards all02"},
		{name: "the highest speed", host: "fast02", want: "10.1.0.1", line: "eth2 10.1.0.1 (400 Gbit/s)"},
		{name: "equal speeds: the route", host: "eth02", want: "10.0.1.1", line: "eth1"},
		{name: "an address of its own", host: "node01", want: "10.0.0.1", line: "eth0"},
		{name: "several of its own", host: "both01", want: "10.0.1.1", line: "eth1"},
		{name: "loopback and an address of its own", host: "mixed01", want: "10.0.0.1", line: "eth0"},
		{name: "a router between", host: "far", want: "192.168.0.1", line: "mgmt"},
		{name: "link-local", host: "zone02", want: "fe80::1"},
		{name: "loopback", host: "127.0.0.1", want: "127.0.0.1"},
		{name: "a name that means loopback, one host", host: "debian01", at: place.Placement{LocalAgents: 2},
			want: "127.0.1.1"},
		{name: "a name that means loopback", host: "debian01", want: "10.2.0.1", line: "ib0"},
		{name: "a name that means loopback, in a step", host: "debian01",
			at: place.Placement{Hosts: []string{"debian01", "eth02", "all02"}}, want: "10.0.1.1", line: "towards eth02"},
		{name: "the user's interface", iface: "mgmt", host: "all02", at: place.Placement{Rank: 1}, want: "192.168.0.1"},
		{name: "the user's, and the name", iface: "10.0.0.0/24", host: "node01", want: "10.0.0.1", line: "eth0"},
		{name: "the user's, and loopback", iface: "ib0", host: "debian01", want: "10.2.0.1", line: "ib0"},
		{name: "the family of the route", host: "dual02", want: "fd00::1", line: "(400 Gbit/s)"},
		{name: "the user's, against the name", iface: "ib0", host: "node01", want: "10.2.0.1",
			line: "--rendezvous 10.2.0.1:29400 or set MASTER_ADDR=10.2.0.1"},
	} {
		c.at.MaxAgents, c.at.Rendezvous = 2, net.JoinHostPort(c.host, "29400")
		s := surroundings{host, func(_ context.Context, host string) (list []netip.Addr, err error) {
			if addr, err := netip.ParseAddr(host); err == nil {
				return []netip.Addr{addr}, nil
			}
			for text := range strings.FieldsSeq(names[host]) {
				list = append(list, netip.MustParseAddr(text))
			}
			return list, nil
		}, func(peers []netip.Addr) netip.Addr {
			addr, _ := netip.ParseAddr(routes[peers[0].String()])
			return addr
		}}
		addr, line, err := s.choose(t.Context(), c.iface, &c.at)
		if addr.String() != c.want || err != nil || !strings.Contains(line, c.line) || c.line == "" && line != "" {
			t.Errorf("%s: %v, %q, %v; want %s, %q", c.name, addr, line, err, c.want, c.line)
		}
		meeting := c.at.Rendezvous
		if c.host == "debian01" && c.want != "127.0.1.1" {
			meeting = c.want + ":29400"
		}
		if got := s.meeting(t.Context(), addr, c.at.Rendezvous); got != meeting {
			t.Errorf("%s: they meet at %s, want %s", c.name, got, meeting)
		}
		if strings.Contains(line, "docker") || strings.Contains(line, "warning") != strings.Contains(c.line, "MASTER") {
			t.Errorf("%s: %s", c.name, line)
		}
	}
	virtual := surroundings{host, func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("127.0.1.1")}, nil
	}, func([]netip.Addr) netip.Addr { return netip.MustParseAddr("127.0.0.1") }}
	virtual.locals = slices.DeleteFunc(slices.Clone(host), func(l localAddr) bool { return l.infiniband })
	if addr, _, err := virtual.choose(t.Context(), "", &place.Placement{Rendezvous: "debian01:1", MaxAgents: 2}); err != nil ||
		addr.String() != "10.1.0.1" {
		t.Errorf("a virtual interface with a high speed: %v, %v; want eth2", addr, err)
	}
	s := surroundings{host[:1], func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("203.0.113.7")}, nil
	}, func([]netip.Addr) netip.Addr { return netip.Addr{} }}
	addr, _, err := s.choose(t.Context(), "", &place.Placement{Rendezvous: "far:1", MaxAgents: 2})
	if err == nil || !strings.Contains(err.Error(), "far:1") || !strings.Contains(err.Error(), "--interface") {
		t.Errorf("without a route: %v, %v", addr, err)
	}
}

// TestLookup checks this host's resolver, and that the wait for a name without an address ends with its context.
func TestLookup(t *testing.T) {
	s := surroundings{localAddresses(sysNet), lookup, routeTo}
	at := place.Placement{Rendezvous: "localhost:29400", MaxAgents: 2}
	if addr, line, err := s.choose(t.Context(), "", &at); !addr.IsLoopback() || line != "" || err != nil {
		t.Errorf("towards this host: %v, %q, %v", addr, line, err)
	}
	if route := routeTo([]netip.Addr{{}, netip.MustParseAddr("127.0.0.1")}); route.String() != "127.0.0.1" {
		t.Errorf("route %v", route)
	}
	if i := interfaceOf(s.locals[0].addr); i != s.locals[0].iface || interfaceOf(netip.Addr{}) != "" {
		t.Errorf("interface %q of %v", i, s.locals[0])
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	at.Rendezvous = "no.such.host.invalid:1"
	addr, _, err := s.choose(ctx, "", &at)
	if err == nil || !strings.Contains(err.Error(), "no.such.host.invalid:1") {
		t.Errorf("towards a host that is not there: %v, %v", addr, err)
	}
	if !slices.ContainsFunc(s.locals, func(l localAddr) bool { return l.network.IsValid() }) {
		t.Error("no interface has a network")
	}
}
