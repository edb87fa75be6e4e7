//go:build linux

package lan

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// device is the name of a host's network interface.
const device = "lan0"

// mtu is the size of jumbo frames, so that the switch carries fewer packets.
const mtu = 9000

// Host is a host of the network.
type Host struct {
	Name string
	Addr netip.Addr
	do   chan func() // run on a thread in the host's namespaces
	tun  *os.File    // the host's packets, one per read or write
}

func newHost(name string, addr netip.Prefix) (*Host, error) {
	h := &Host{Name: name, Addr: addr.Addr(), do: make(chan func())}
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
func (h *Host) enter(addr netip.Prefix) error {
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
func (h *Host) attach(fd int, addr netip.Prefix) error {
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
		{"interface", fd, device, unix.TUNSETIFF, flags(unix.IFF_TUN | unix.IFF_NO_PI)},
		{"address", sock, device, unix.SIOCSIFADDR, inet(addr.Addr().As4())},
		{"network mask", sock, device, unix.SIOCSIFNETMASK, inet(mask)},
		{"packet size", sock, device, unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(mtu); return nil }},
		{"up", sock, device, unix.SIOCSIFFLAGS, flags(unix.IFF_UP | unix.IFF_RUNNING)},
		{"loopback", sock, "lo", unix.SIOCSIFFLAGS, flags(unix.IFF_UP | unix.IFF_RUNNING)},
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

func flags(f uint16) func(*unix.Ifreq) error {
	return func(r *unix.Ifreq) error { r.SetUint16(f); return nil }
}

func inet(addr [4]byte) func(*unix.Ifreq) error {
	return func(r *unix.Ifreq) error { return r.SetInet4Addr(addr[:]) }
}

// Start starts a command on the host.
func (h *Host) Start(cmd *exec.Cmd) error {
	err := make(chan error)
	h.do <- func() { err <- cmd.Start() }
	return <-err
}

// close disconnects the host. Its namespaces end with their last process.
func (h *Host) close() error {
	close(h.do)
	return h.tun.Close()
}
