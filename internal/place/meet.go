package place

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/terminal"
)

// Ports that are made from the name of a job are even numbers of this range, since each stands for
// itself and the next one. They lie below net.ipv4.ip_local_port_range and the node ports of Kubernetes,
// from which systems give ports to anybody.
const (
	firstPort = 20000
	lastPort  = 29000 // not one of them: torchrun's begin at 29400
	portPairs = (lastPort - firstPort) / 2
)

// Ports that torchrun takes where none is given.
const (
	masterPort     = 29500
	rendezvousPort = 29400
)

// stepStride is prime to portPairs. It keeps the steps of a job away from the jobs whose numbers follow.
const stepStride = 1009

// stepPort is the port of a step of Slurm. Jobs whose numbers are close have different ones, as those of
// an array that share a node.
func stepPort(job, step uint64) int {
	return firstPort + 2*int((job%portPairs+step%portPairs*stepStride)%portPairs)
}

// namedPort is a port that is made from a name, the same for all who know it.
func namedPort(name string) int {
	h := fnv.New32a()
	h.Write([]byte(name))
	return firstPort + 2*int(h.Sum32()%portPairs)
}

// join is net.JoinHostPort for a port that is a number.
func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// address checks host:port and returns it in the one way to write it. Where port is 0 one must be there.
func address(text string, port int) (string, error) {
	host, number, err := net.SplitHostPort(text)
	if err != nil && port > 0 && !strings.HasSuffix(text, ":") {
		host, number, err = strings.Trim(text, "[]"), strconv.Itoa(port), nil
	}
	if err != nil || !hostName(host) {
		return "", errors.New("want host:port, such as node01:29400")
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > 65534 {
		return "", errors.New("want a port from 1 to 65534; the one after it is used, too")
	}
	return join(host, n), nil
}

// hostName reports whether a name may be that of a host, or is an address.
func hostName(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	if name == "" || len(name) > maxHostName {
		return false
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`[]/\,:@'"%`, c) >= 0 {
			return false
		}
	}
	return true
}

// loopback reports whether an address leads to its own host, whoever reads it.
func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && (ip.IsLoopback() || ip.IsUnspecified())
}

// KeyAddress returns where the key of a job is asked for: the port after that of the rendezvous.
func KeyAddress(rendezvous string) (string, error) {
	host, number, err := net.SplitHostPort(rendezvous)
	if err != nil {
		return "", err
	}
	port, err := strconv.Atoi(number)
	if err != nil || port < 1 || port > 65534 {
		return "", fmt.Errorf("%s: want a port from 1 to 65534", terminal.Name(rendezvous))
	}
	return join(host, port+1), nil
}

// The variables in which an address to meet at is given.
const (
	envMasterAddr    = "MASTER_ADDR"
	envMasterPort    = "MASTER_PORT"
	envPetMasterAddr = "PET_MASTER_ADDR"
	envPetMasterPort = "PET_MASTER_PORT"
	envPetRendezvous = "PET_RDZV_ENDPOINT"
)

// master returns the address in the first of these variables that is set, and that variable as
// messages have it; "" where none is.
func (e env) master(names ...string) (addr, from string, err error) {
	name, text := e.first(names...)
	if name == "" {
		return "", "", nil
	}
	from = show(name, text)
	if name == envPetRendezvous {
		if addr, err = address(text, rendezvousPort); err != nil {
			return "", "", fmt.Errorf("%s: %w", from, err)
		}
		return addr, from, nil
	}
	if !hostName(text) {
		return "", "", fmt.Errorf("%s: want the name or address of the host with rank 0", from)
	}
	port := masterPort
	if number, text := e.first(strings.TrimSuffix(name, "ADDR")+"PORT", envMasterPort); text != "" {
		if port, err = e.number(number, 1, 65534); err != nil {
			return "", "", err
		}
	}
	return join(text, port), from, nil
}
