//go:build netns

package comm_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// hostArg makes this binary a rank on a host of the lab. The arguments after it are the rank, its call, and whether it
// uses IPv6.
const hostArg = "one-host-of-a-lab"

func init() {
	if len(os.Args) == 5 && os.Args[1] == hostArg {
		if err := onHost(os.Args[2], os.Args[3], os.Args[4] == "true"); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// onHost runs one rank of two: it prints when it is connected, repeats its call until that fails or its input ends, and
// prints the error.
func onHost(rankText, does string, six bool) error {
	var rank int
	if _, err := fmt.Sscan(rankText, &rank); err != nil {
		return err
	}
	at := func(r int) string { return net.JoinHostPort(addressOf(r, six), "7000") }
	ln, err := net.Listen("tcp", at(rank))
	if err != nil {
		return err
	}
	g, err := comm.Connect(context.Background(), comm.Mesh{
		Rank: rank, Size: 2, Secret: []byte("0123456789abcdef"), Name: "host " + rankText, Listener: ln, Addrs: []string{at(0), at(1)},
	}, nil, comm.Options{})
	if err != nil {
		return err
	}
	if err := g.Barrier(context.Background()); err != nil {
		return err
	}
	fmt.Println("ready")
	ended := make(chan error, 1)
	go func() { ended <- untilLost(g, does) }()
	go func() {
		io.Copy(io.Discard, os.Stdin)
		ended <- nil
	}()
	if err := <-ended; err != nil {
		fmt.Println("lost", err)
	}
	return nil
}

// untilLost repeats a call of the group until it fails.
func untilLost(g *comm.Group, does string) error {
	var bytes int
	switch does {
	case "idle":
		<-g.Link().Failed()
		g.Link().AwaitNotified()
		return g.Err()
	case "small":
		bytes = 8
	case "large":
		bytes = 8 << 20
	}
	out, in := tensor.New(tensor.U8, bytes), tensor.New(tensor.U8, bytes)
	for n, start := 1, time.Now(); ; n++ {
		err := comm.Finish(context.Background())(g.Exchange(with(1-g.Rank(), out), with(1-g.Rank(), in)))
		if err != nil {
			return err
		}
		fmt.Println("moved", n, time.Since(start).Seconds())
	}
}

// A labRank is a rank on a host of the lab.
type labRank struct {
	cmd   *exec.Cmd
	stdin io.Closer
	lines chan string // closed at the end
	errs  bytes.Buffer
}

// start starts both ranks and returns when they are connected.
func (l *lab) start(t testing.TB, does string, six bool) (ranks [2]*labRank) {
	t.Helper()
	for i, h := range l.hosts {
		r := &labRank{
			cmd:   exec.Command("/proc/self/exe", hostArg, fmt.Sprint(i), does, fmt.Sprint(six)),
			lines: make(chan string, 1<<16),
		}
		r.cmd.Stderr = &r.errs
		stdin, err1 := r.cmd.StdinPipe()
		stdout, err2 := r.cmd.StdoutPipe()
		if err := errors.Join(err1, err2, h.inside(r.cmd.Start)); err != nil {
			t.Fatal(err)
		}
		r.stdin = stdin
		go func() {
			for s := bufio.NewScanner(stdout); s.Scan(); {
				r.lines <- s.Text()
			}
			close(r.lines)
		}()
		t.Cleanup(func() {
			r.stdin.Close()
			_ = r.cmd.Process.Kill()
			_ = r.cmd.Wait()
		})
		ranks[i] = r
	}
	for i, r := range ranks {
		if line := r.next(t, "ready", time.Minute); line == "" {
			t.Fatalf("host %d did not connect: %s", i, &r.errs)
		}
	}
	return ranks
}

// next returns the next line that begins with word; "": none came in time.
func (r *labRank) next(t testing.TB, word string, bound time.Duration) string {
	t.Helper()
	for late := time.After(bound); ; {
		select {
		case line, ok := <-r.lines:
			if !ok {
				return ""
			}
			if strings.HasPrefix(line, word) {
				return line
			}
			if !strings.HasPrefix(line, "moved") { // those come in between
				t.Fatalf("a rank says %q, want %q", line, word)
			}
		case <-late:
			return ""
		}
	}
}

// namesLost reports whether a line names the lost rank and the side that noticed: the other rank, by silence or by the end
// of the connection, or this rank, by the other's silence.
func namesLost(line string, rank int, six bool) bool {
	lost := func(r int, how string) bool {
		return strings.Contains(line, fmt.Sprintf("rank %d (host %d)", r, r)) &&
			strings.HasSuffix(line, ": connection lost") &&
			strings.Contains(line, how+net.JoinHostPort(addressOf(r, six), ""))
	}
	return lost(1-rank, fmt.Sprintf("rank %d hears nothing from ", rank)) || lost(1-rank, ": ") ||
		lost(rank, fmt.Sprintf("rank %d hears nothing from ", 1-rank))
}

// TestNetworkLost loses the network in every way without a word: both ranks name the other within 10 s.
func TestNetworkLost(t *testing.T) {
	for name, lose := range map[string]func(l *lab) error{
		"cut": func(l *lab) error {
			return l.hosts[0].inside(func() error { return ip("link", "set", "lab", "down") })
		},
		"from 0": func(l *lab) error { l.ways[0].cut.Store(true); return nil },
		"from 1": func(l *lab) error { l.ways[1].cut.Store(true); return nil },
	} {
		for i, does := range []string{"idle", "small", "large"} {
			t.Run(name+" "+does, func(t *testing.T) {
				t.Parallel()
				l := newLab(t, terms{delay: time.Millisecond})
				six := i%2 == 1
				ranks := l.start(t, does, six)
				if does != "idle" {
					ranks[0].next(t, "moved", 10*time.Second)
				}
				start := time.Now()
				if err := lose(l); err != nil {
					t.Fatal(err)
				}
				for r, rank := range ranks {
					line := rank.next(t, "lost", 20*time.Second)
					took := time.Since(start)
					if !namesLost(line, r, six) {
						t.Errorf("rank %d says %q", r, line)
					}
					if took > 10*time.Second {
						t.Errorf("rank %d took %v", r, took)
					}
					t.Logf("rank %d after %.1f s: %s", r, took.Seconds(), line)
				}
			})
		}
	}
}

// TestNetworkBad loses nearly a third of all packets in both directions and takes 200 ms for the others: ranks go on.
func TestNetworkBad(t *testing.T) {
	for _, does := range []string{"idle", "small", "large"} {
		t.Run(does, func(t *testing.T) {
			t.Parallel()
			ranks := newLab(t, terms{delay: 200 * time.Millisecond, loss: 0.3}).start(t, does, false)
			moved := 0
			check := func(rank int, line string) {
				if !strings.HasPrefix(line, "moved") {
					t.Fatalf("after %d exchanges rank %d says %q", moved, rank, line)
				}
			}
			for late, over := time.After(40*time.Second), false; !over; {
				select {
				case line := <-ranks[0].lines:
					check(0, line)
					moved++
				case line := <-ranks[1].lines:
					check(1, line)
				case <-late:
					over = true
				}
			}
			if does == "small" && moved == 0 {
				t.Error("nothing was moved")
			}
			t.Logf("%d exchanges", moved)
		})
	}
}

// TestNetworkStopped stops a process for longer than a network may be silent: its host answers for it, and
// the job goes on when it does.
func TestNetworkStopped(t *testing.T) {
	ranks := newLab(t, terms{delay: time.Millisecond}).start(t, "large", false)
	ranks[0].next(t, "moved", 10*time.Second)
	if err := ranks[1].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(15 * time.Second)
	for len(ranks[0].lines) > 0 {
		if line := <-ranks[0].lines; !strings.HasPrefix(line, "moved") {
			t.Fatalf("while the other stands, rank 0 says %q", line)
		}
	}
	if err := ranks[1].cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		if ranks[0].next(t, "moved", 20*time.Second) == "" {
			t.Fatalf("%d exchanges after the stop, want 10", i)
		}
	}
}
