package place

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Ports made from the name of a job. They lie below net.ipv4.ip_local_port_range and the node ports of Kubernetes, from
// which systems give ports to any program, and below torchrun's, which begin at 29400.
const (
	firstPort = 20000
	ports     = 9000
	maxPort   = 65535
)

// Default ports of torchrun.
const (
	masterPort     = 29500
	rendezvousPort = 29400
)

// stepStride is prime to ports. It keeps the steps of a job away from the next jobs.
const stepStride = 1009

// stepPort returns the port of a step of Slurm. Jobs with close numbers have different ports, since the jobs of an
// array may share a node.
func stepPort(job, step uint64) int {
	return firstPort + int((job%ports+step%ports*stepStride)%ports)
}

func namedPort(name string) int {
	h := fnv.New32a()
	h.Write([]byte(name))
	return firstPort + int(h.Sum32()%ports)
}

func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// address checks host:port and returns its canonical form. The default port is port; 0: there is none.
func address(text string, port int) (string, error) {
	host, number, err := net.SplitHostPort(text)
	if err != nil && port > 0 && !strings.HasSuffix(text, ":") {
		host, number, err = strings.Trim(text, "[]"), strconv.Itoa(port), nil
	}
	if err != nil || !hostName(host) {
		return "", errors.New("want host:port, such as node01:29400")
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > maxPort {
		return "", fmt.Errorf("want a port from 1 to %d", maxPort)
	}
	return join(host, n), nil
}

// hostName reports whether a name may name a host, or is an address.
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

func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && (ip.IsLoopback() || ip.IsUnspecified())
}

// The variables that give an address to meet at.
const (
	envMasterAddr    = "MASTER_ADDR"
	envMasterPort    = "MASTER_PORT"
	envPetMasterAddr = "PET_MASTER_ADDR"
	envPetMasterPort = "PET_MASTER_PORT"
	envPetRendezvous = "PET_RDZV_ENDPOINT"
)

// master returns the address in the first of these variables that is set, and the variable for messages; "": none is
// set.
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
		if port, err = e.number(number, 1, maxPort); err != nil {
			return "", "", err
		}
	}
	return join(text, port), from, nil
}
