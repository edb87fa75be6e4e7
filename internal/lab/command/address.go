package command

import (
	"net"
	"net/netip"

	"github.com/cprun/cprun/internal/base/terminal"
)

// localAddress returns the address of this host at which the other nodes reach it: the one that --interface names,
// else the one from which this host reaches one of peers, "host:port".
func localAddress(iface string, peers ...string) (netip.Addr, error) {
	if iface != "" {
		return namedAddress(iface)
	}
	var fallback netip.Addr
	for _, peer := range peers {
		conn, err := net.Dial("udp", peer) // sends nothing; the kernel chooses the route
		if err != nil {
			continue
		}
		addr := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		conn.Close()
		if !addr.IsLoopback() {
			return addr, nil
		}
		fallback = addr
	}
	if !fallback.IsValid() {
		return fallback, inputf("rendezvous %s: no way there from this host; name the network between the nodes with "+
			"--interface", terminal.Name(peers[0]))
	}
	return fallback, nil
}

// A localAddr is an address of this host and its interface.
type localAddr struct {
	iface string
	addr  netip.Addr
}

// localAddresses lists the addresses of this host.
func localAddresses() (list []localAddr) {
	all, _ := net.Interfaces() // none are listed where none can be
	for _, i := range all {
		addrs, _ := i.Addrs() // none where it is gone by now
		for _, a := range addrs {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				list = append(list, localAddr{i.Name, prefix.Addr().Unmap()})
			}
		}
	}
	return list
}

// namedAddress returns the address that --interface names: itself, in a network, or of an interface. A link-local one
// is the last choice.
func namedAddress(iface string) (netip.Addr, error) {
	meant := func(netip.Addr) bool { return false }
	if addr, err := netip.ParseAddr(iface); err == nil {
		meant = func(a netip.Addr) bool { return a == addr.WithZone("").Unmap() }
	} else if network, err := netip.ParsePrefix(iface); err == nil {
		meant = network.Contains
	}
	var seen []string
	var linkLocal netip.Addr
	for _, o := range localAddresses() {
		seen = append(seen, o.iface+" "+o.addr.String())
		switch {
		case o.iface != iface && !meant(o.addr):
		case o.addr.IsLinkLocalUnicast():
			linkLocal = o.addr.WithZone(o.iface)
		default:
			return o.addr, nil
		}
	}
	if linkLocal.IsValid() {
		return linkLocal, nil
	}
	return linkLocal, inputf("--interface %s: this host has no such interface or address; it has %v",
		terminal.Name(iface), seen)
}

// interfaceOf returns the name of the interface with an address; "": none.
func interfaceOf(addr netip.Addr) string {
	for _, o := range localAddresses() {
		if o.addr == addr.WithZone("") {
			return o.iface
		}
	}
	return ""
}
