// Package lan makes a network of hosts on one machine, for tests. Each host has network namespaces with its own name
// and address; a Switch in this process carries the packets between them. It can lose, delay or cut them, for each
// direction of each pair. The kernel needs only TUN devices. The process needs root, or root in a user namespace.
//
//	net := lan.New(netip.MustParsePrefix("10.77.0.0/24"))
//	host, err := net.Host("node-a")
//	err = host.Start(exec.Command("cprun", "train.yaml"))
package lan
