package worldtest

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// rankArg makes a test binary one rank. The arguments after it are the rank, size, dir, secret, call and kind.
const rankArg = "one-rank-of-a-test"

// ProcessKind is the transport of the ranks in a test of processes.
type ProcessKind struct {
	// Connect makes the group of the hosts; nil: over Unix sockets in m.Dir.
	Connect func(ctx context.Context, m comm.Mesh, opts comm.Options) (*comm.Group, error)
	// Open makes the communicator of a rank over the group of the hosts; nil: the group itself. The ranks can exchange
	// files in dir.
	Open func(ctx context.Context, host *comm.Group, dir string) (ProcessRank, error)
	// Patience bounds the time of a rank, mostly for its devices; 0: 20 s. The deadline of "stop" and "detour" is its
	// 40th part.
	Patience time.Duration
}

// ProcessRank is one rank of a test of processes.
type ProcessRank struct {
	Comm comm.Communicator
	New  func(d tensor.DType, n int) tensor.View // makes its views
	// Step, if set, replaces the call: all ranks repeat it until it fails.
	Step func(ctx context.Context) error
}

// ProcessKinds maps names to the kinds that a test binary supports.
type ProcessKinds map[string]ProcessKind

// Main runs one rank and exits if the binary was started for that, and otherwise returns. TestMain must call it in a
// test binary that calls End.
func (k ProcessKinds) Main() {
	if len(os.Args) != 8 || os.Args[1] != rankArg {
		return
	}
	if err := k.rank(os.Args[2:]); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (k ProcessKind) patience() time.Duration {
	if k.Patience > 0 {
		return k.Patience
	}
	return 20 * time.Second
}

// start makes the communicator of a rank.
func (k ProcessKind) start(ctx context.Context, m comm.Mesh, opts comm.Options) (ProcessRank, error) {
	connect := k.Connect
	if connect == nil {
		connect = func(ctx context.Context, m comm.Mesh, opts comm.Options) (*comm.Group, error) {
			return comm.Connect(ctx, m, nil, opts)
		}
	}
	host, err := connect(ctx, m, opts)
	if err != nil {
		return ProcessRank{}, err
	}
	if k.Open == nil {
		return ProcessRank{Comm: host, New: func(d tensor.DType, n int) tensor.View { return tensor.New(d, n) }}, nil
	}
	return k.Open(ctx, host, m.Dir)
}

// rank runs one rank: it prints "ready", repeats a call until it fails, and prints the error. Idle ranks repeat a
// call that needs no other rank.
func (k ProcessKinds) rank(spec []string) error {
	r, err1 := strconv.Atoi(spec[0])
	n, err2 := strconv.Atoi(spec[1])
	key, err3 := hex.DecodeString(spec[3])
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	call, kind := spec[4], k[spec[5]]
	aborts := call == "abort" && r == victimOf(n)
	if !aborts {
		go func() { // ends with the process
			io.Copy(io.Discard, os.Stdin)
			os.Exit(1) // the test is gone
		}()
	}
	ctx, cancel := context.WithTimeout(context.Background(), kind.patience())
	defer cancel()
	opts := comm.Options{}
	if call == "stop" || call == "detour" {
		opts.Deadline = kind.patience() / 40
	}
	// Nothing is closed here: a rank that exits at an error must have informed the others of its cause by then.
	self, err := kind.start(ctx, comm.Mesh{Dir: spec[2], Rank: r, Size: n, Secret: key}, opts)
	if err != nil {
		return err
	}
	alone, err := self.Comm.Split(ctx, r, 0)
	if err != nil {
		return err
	}
	if err := self.Comm.Barrier(ctx); err != nil {
		return err
	}
	fmt.Println("ready", os.Getpid())
	if aborts {
		io.Copy(io.Discard, os.Stdin) // until the test says so
		self.Comm.Abort(errors.New("the loss is not a number"))
		return nil
	}
	if r == victimOf(n) && self.Step == nil {
		time.Sleep(kind.patience())
		return errors.New("the victim was not killed")
	}
	step := self.Step
	if step == nil {
		step = self.steps(call, alone)
	}
	for err == nil {
		err = step(ctx)
	}
	var pe *comm.PeerError
	if !errors.As(err, &pe) {
		return err
	}
	fmt.Println("lost", pe.Rank, comm.IsRemote(err), err)
	return nil
}

// steps returns the call that a rank repeats.
func (p ProcessRank) steps(call string, alone comm.Communicator) func(ctx context.Context) error {
	c, big, small := p.Comm, p.New(tensor.F32, 1<<20), p.New(tensor.F32, 10)
	idle := func(ctx context.Context) error {
		time.Sleep(time.Millisecond)
		return alone.Barrier(ctx)
	}
	return func(ctx context.Context) error {
		finish := comm.Finish(ctx)
		switch call {
		case "barrier", "abort":
			return c.Barrier(ctx)
		case "all-reduce", "stop":
			return finish(c.AllReduce(big, comm.Sum))
		case "chain": // only rank 3 waits for the victim, and everybody for the one before
			return finish(c.Exchange(nil, []comm.Message{{Peer: (c.Rank() + c.Size() - 1) % c.Size(), View: small}}))
		case "idle":
			return idle(ctx)
		case "late": // the victim ends while the others begin to talk to it, one after the other
			time.Sleep(time.Duration(c.Rank()) * 5 * time.Millisecond)
			return finish(c.Exchange(nil, []comm.Message{{Peer: victimOf(c.Size()), View: small}}))
		case "detour": // rank 0 needs rank 3, which does nothing, when the one between them has been stopped
			if c.Rank() != 0 {
				return idle(ctx)
			}
			time.Sleep(100 * time.Millisecond)
			if err := finish(c.Exchange([]comm.Message{{Peer: 3, View: small}}, nil)); err != nil {
				return err
			}
			return finish(c.Exchange(nil, []comm.Message{{Peer: victimOf(c.Size()), View: small}}))
		}
		return fmt.Errorf("call %q is unknown", call)
	}
}

func victimOf(n int) int { return min(2, n-1) }

// Kill ends a process at once.
func Kill(p *os.Process, _ io.Closer) error { return p.Kill() }

// Stop stops a process without ending it.
func Stop(p *os.Process, _ io.Closer) error { return p.Signal(syscall.SIGSTOP) }

// Abort makes a process of the call "abort" abort and exit at once.
func Abort(_ *os.Process, stdin io.Closer) error { return stdin.Close() }

// End runs n processes of a kind in a call ("barrier", "all-reduce", "chain", "idle", "late", "abort", "stop" or
// "detour"), ends one of them, and checks that each other one blames it by name, with cause. The test binary calls
// Main.
func (k ProcessKinds) End(t *testing.T, kind, call string, n int, end func(p *os.Process, stdin io.Closer) error,
	cause string) {
	victim := victimOf(n)
	ctx, cancel := context.WithTimeout(context.Background(), k[kind].patience()+10*time.Second)
	defer cancel()
	w := startProcesses(ctx, t, kind, call, n)
	defer w.wg.Wait()
	defer cancel()
	for range n {
		w.await(ctx, t, w.ready, "ready")
	}
	time.Sleep(20 * time.Millisecond) // the others go from "ready" into their call
	start := time.Now()
	if err := end(w.cmds[victim].Process, w.stdin[victim]); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("rank %d (pid %d)", victim, w.cmds[victim].Process.Pid)
	for range n - 1 {
		got := w.await(ctx, t, w.lost, "told of the end")
		if want := fmt.Sprintf("lost %d true", victim); !strings.HasPrefix(got.line, want) ||
			!strings.Contains(got.line, name) || !strings.HasSuffix(got.line, cause) {
			t.Errorf("rank %d: %q, want %q, %q and %q", got.rank, got.line, want, name, cause)
		}
		t.Logf("rank %d after %v: %s", got.rank, time.Since(start).Round(time.Microsecond), got.line)
	}
}

// processes holds the ranks of a test.
type processes struct {
	cmds        []*exec.Cmd
	stdin       []io.WriteCloser
	ready, lost chan report
	wg          sync.WaitGroup // their output is read
}

// report holds a line of a rank.
type report struct {
	rank int
	line string
}

func startProcesses(ctx context.Context, t *testing.T, kind, call string, n int) *processes {
	dir, secret := SocketDir(t), Secret()
	w := &processes{ready: make(chan report, n), lost: make(chan report, n)}
	for r := range n {
		cmd := exec.CommandContext(ctx, os.Args[0], rankArg, strconv.Itoa(r), strconv.Itoa(n), dir,
			hex.EncodeToString(secret), call, kind)
		cmd.Stderr = os.Stderr
		out, err1 := cmd.StdoutPipe()
		stdin, err2 := cmd.StdinPipe()
		if err := errors.Join(err1, err2, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		w.cmds, w.stdin = append(w.cmds, cmd), append(w.stdin, stdin)
		w.wg.Go(func() {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				if strings.HasPrefix(lines.Text(), "ready") {
					w.ready <- report{r, lines.Text()}
				} else {
					w.lost <- report{r, lines.Text()}
				}
			}
			cmd.Wait()
		})
	}
	return w
}

func (w *processes) await(ctx context.Context, t *testing.T, ch chan report, what string) report {
	t.Helper()
	select {
	case x := <-ch:
		return x
	case <-ctx.Done():
		t.Fatalf("no rank was %s in time", what)
		return report{}
	}
}
