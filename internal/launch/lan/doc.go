// Package lan makes hosts of a network on one machine, for tests: network namespaces with a name and an
// address of their own, between which a switch in this process carries packets. The switch loses, delays
// and cuts as it is told, each direction of each pair by itself, which needs nothing of the kernel but
// TUN devices. It takes the rights of root, or of a user namespace's.
package lan
