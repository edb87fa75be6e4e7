//go:build netns

package comm_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A lab consists of two hosts, each a network namespace, and a network between them that tests can harm. This process
// carries the packets of each host's one interface to the other, or drops them. `make test-network` makes the namespace
// in which this is allowed.
type lab struct {
	hosts [2]*host
	ways  [2]*way // from host 0, from host 1
}

// A host is a network namespace.
type host struct {
	do  chan func() // run on a thread inside
	tun *os.File
}

// terms describe how a network treats packets.
type terms struct {
	delay time.Duration
	loss  float64
	rate  float64 // bytes per second; 0: any
	queue int     // bytes that wait for their turn; more are lost
}

// A way is one direction of the network.
type way struct {
	terms
	cut atomic.Bool // nothing comes through
}

// A packet arrives when it is due.
type packet struct {
	data []byte
	due  time.Time
}

const labMTU = 9000

// addressOf returns the address of a host of the lab, of IPv4 or IPv6.
func addressOf(host int, six bool) string {
	if six {
		return fmt.Sprintf("fd77::%d", host+1)
	}
	return fmt.Sprintf("10.77.0.%d", host+1)
}

// newLab makes the hosts and carries packets until the test ends.
func newLab(t testing.TB, like terms) *lab {
	l := &lab{}
	for i := range l.hosts {
		h, err := newHost(i)
		if err != nil {
			t.Fatalf("a network namespace with a tunnel, for which `make test-network` gives the right: %v", err)
		}
		l.hosts[i], l.ways[i] = h, &way{terms: like}
	}
	var carriers sync.WaitGroup
	for i, w := range l.ways {
		carriers.Go(func() { w.carry(l.hosts[i].tun, l.hosts[1-i].tun, rand.New(rand.NewPCG(7, uint64(i)))) })
	}
	t.Cleanup(func() {
		for _, h := range l.hosts {
			h.tun.Close()
			close(h.do)
		}
		carriers.Wait()
	})
	return l
}

// newHost makes a namespace on a thread that nothing else uses and that ends with it.
func newHost(i int) (*host, error) {
	h := &host{do: make(chan func())}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is of no use to others
		made <- h.enter(i)
		for f := range h.do {
			f()
		}
	}()
	return h, <-made
}

// enter makes the namespace of this thread, and its interface.
func (h *host) enter(i int) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("/dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq("lab")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	h.tun = os.NewFile(uintptr(fd), "tun")
	for _, args := range [][]string{
		{"link", "set", "lo", "up"}, {"link", "set", "lab", "mtu", fmt.Sprint(labMTU), "txqueuelen", "10000"}, {"addr", "add", addressOf(i, false) + "/24", "dev", "lab"},
		{"addr", "add", addressOf(i, true) + "/64", "dev", "lab", "nodad"}, {"link", "set", "lab", "up"},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

// ip runs the command of that name in the namespace of this thread.
func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %v: %w: %s", args, err, out)
	}
	return nil
}

// inside runs f in a host's namespace, as far as it stays on its thread; processes that f starts are there.
func (h *host) inside(f func() error) (err error) {
	done := make(chan struct{})
	h.do <- func() {
		err = f()
		close(done)
	}
	<-done
	return err
}

// carry moves packets until one of the ends is closed.
func (w *way) carry(from, to *os.File, dice *rand.Rand) {
	moving := make(chan packet, 1<<16)
	var free time.Time // when the line is free again
	go func() {
		for p := range moving {
			time.Sleep(time.Until(p.due))
			if !w.cut.Load() {
				_, _ = to.Write(p.data) // an interface that is down takes none
			}
		}
	}()
	defer close(moving)
	for buf := make([]byte, labMTU); ; {
		n, err := from.Read(buf)
		if err != nil {
			if os.IsTimeout(err) || n > 0 {
				continue
			}
			return
		}
		now := time.Now()
		if free.Before(now) {
			free = now
		}
		if w.cut.Load() || dice.Float64() < w.loss || w.rate > 0 && free.Sub(now).Seconds()*w.rate > float64(w.queue) {
			continue
		}
		if w.rate > 0 {
			free = free.Add(time.Duration(float64(n) / w.rate * 1e9))
		}
		select {
		case moving <- packet{append([]byte(nil), buf[:n]...), free.Add(w.delay)}:
		default:
		}
	}
}
