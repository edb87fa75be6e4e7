package comm_test

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

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// rankEnv makes this test binary one rank: "rank size dir secret call kind".
const rankEnv = "COMM_TEST_RANK"

// rankKind is what the ranks of a test talk over.
type rankKind struct {
	// open makes the communicator of a rank over its host group, and what makes its views.
	open func(ctx context.Context, host *comm.Group) (comm.Communicator, func(d tensor.DType, n int) tensor.View, error)
	// patience is how long a rank may take, for its devices above all.
	patience time.Duration
}

var rankKinds = map[string]rankKind{
	"host": {func(_ context.Context, host *comm.Group) (comm.Communicator, func(tensor.DType, int) tensor.View, error) {
		return host, func(d tensor.DType, n int) tensor.View { return tensor.New(d, n) }, nil
	}, 20 * time.Second},
	"fake device": {func(ctx context.Context, host *comm.Group) (comm.Communicator, func(tensor.DType, int) tensor.View, error) {
		f := comm.NewFakeDevice(host.Rank())
		g, err := comm.FakeDeviceProcess(ctx, host, f)
		return g, func(d tensor.DType, n int) tensor.View { return f.New(d, n) }, err
	}, 20 * time.Second},
}

func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv(rankEnv); ok {
		if err := rankMain(strings.Fields(spec)); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// rankMain is one rank: it says when it is ready, stands in a call, and says how that ended.
// Idle ranks stand in none; they ask again and again with a call that needs nobody.
func rankMain(spec []string) error {
	r, err1 := strconv.Atoi(spec[0])
	n, err2 := strconv.Atoi(spec[1])
	key, err3 := hex.DecodeString(spec[3])
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	kind, victim := rankKinds[strings.Join(spec[5:], " ")], victimOf(n)
	ctx, cancel := context.WithTimeout(context.Background(), kind.patience)
	defer cancel()
	opts := comm.Options{}
	if spec[4] == "stop" {
		opts.Deadline = time.Second
	}
	// Nothing is closed here: a rank that exits as soon as it sees an error must have told the
	// others why by then.
	host, err := comm.ConnectUnix(ctx, comm.Mesh{Dir: spec[2], Rank: r, Size: n, Secret: key}, nil, opts)
	if err != nil {
		return err
	}
	g, view, err := kind.open(ctx, host)
	if err != nil {
		return err
	}
	alone, err := g.Split(ctx, r, 0)
	if err != nil {
		return err
	}
	var copies *comm.CopyRank
	if connect, ok := comm.CopyWorlds[spec[4]]; ok {
		if copies, err = connect(ctx, host, spec[2]); err != nil {
			return err
		}
	}
	if err := g.Barrier(ctx); err != nil {
		return err
	}
	fmt.Println("ready", os.Getpid())
	if r == victim && spec[4] == "abort" {
		io.Copy(io.Discard, os.Stdin) // until the test says so
		g.Abort(errors.New("the loss is not a number"))
		return nil
	}
	if r == victim && copies == nil {
		time.Sleep(kind.patience)
		return errors.New("the victim was not killed")
	}
	big := view(tensor.F32, 1<<20)
	for err == nil {
		if copies != nil {
			if err = copies.Ring(ctx, 20, 100_000); err != nil {
				copies.Close() // the streams end
			}
			continue
		}
		switch spec[4] {
		case "barrier", "abort":
			err = g.Barrier(ctx)
		case "all-reduce", "stop":
			var p comm.Pending
			if p, err = g.AllReduce(big, comm.Sum); err == nil {
				err = p.Sync(ctx)
			}
		case "chain": // only rank 3 waits for the victim, and everybody for the one before
			var p comm.Pending
			if p, err = g.Exchange(nil, []comm.Message{{Peer: (r + n - 1) % n, View: view(tensor.F32, 10)}}); err == nil {
				err = p.Sync(ctx)
			}
		case "idle":
			if err = alone.Barrier(ctx); err == nil {
				time.Sleep(time.Millisecond)
			}
		}
	}
	var pe *comm.PeerError
	if !errors.As(err, &pe) {
		return err
	}
	fmt.Println("lost", pe.Rank, comm.IsRemote(err), err)
	return nil
}

// victimOf is the rank of n that a test ends.
func victimOf(n int) int { return min(2, n-1) }

func kill(p *os.Process, _ io.Closer) error { return p.Kill() }

// stop stops a process without ending it.
func stop(p *os.Process, _ io.Closer) error { return p.Signal(syscall.SIGSTOP) }

// TestKill kills one of four processes for real. All others must report it by name, however
// they stand, and none may be blamed that only suffered.
func TestKill(t *testing.T) {
	for _, call := range []string{"barrier", "all-reduce", "chain", "idle"} {
		t.Run(call, func(t *testing.T) { testEnd(t, "host", call, 4, kill, comm.ErrPeerLost.Error()) })
	}
	for call := range comm.CopyWorlds {
		t.Run(call, func(t *testing.T) { testEnd(t, "host", call, 4, kill, comm.ErrPeerLost.Error()) })
	}
}

// TestStop stops a process without ending it, so that only the deadline tells, and telling
// the stopped one must not hold up the others.
func TestStop(t *testing.T) {
	for _, kind := range []string{"host", "fake device"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			testEnd(t, kind, "stop", 4, stop, "no progress for 1s, the deadline")
		})
	}
}

// TestAbortExit has a process exit right behind its abort. The abort's cause wins over the
// end of the connection.
func TestAbortExit(t *testing.T) {
	abort := func(_ *os.Process, stdin io.Closer) error { return stdin.Close() }
	testEnd(t, "host", "abort", 4, abort, "the loss is not a number")
}

// testEnd runs n processes, ends one, and checks what the others say of it.
func testEnd(t *testing.T, kind, call string, n int, end func(p *os.Process, stdin io.Closer) error, cause string) {
	victim := victimOf(n)
	ctx, cancel := context.WithTimeout(context.Background(), rankKinds[kind].patience+10*time.Second)
	defer cancel()
	dir, key := socketDir(t), hex.EncodeToString(secret())
	type report struct {
		rank int
		line string
	}
	ready, lost := make(chan report, n), make(chan report, n)
	var wg sync.WaitGroup
	cmds, stdin := make([]*exec.Cmd, n), make([]io.WriteCloser, n)
	for r := range n {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s %s %s %s", rankEnv, r, n, dir, key, call, kind))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if stdin[r], err = cmd.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds[r] = cmd
		wg.Go(func() {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				if strings.HasPrefix(lines.Text(), "ready") {
					ready <- report{r, lines.Text()}
				} else {
					lost <- report{r, lines.Text()}
				}
			}
			cmd.Wait()
		})
	}
	defer wg.Wait()
	defer cancel()
	await := func(ch chan report, what string) report {
		select {
		case x := <-ch:
			return x
		case <-ctx.Done():
			t.Fatalf("no rank was %s in time", what)
			return report{}
		}
	}
	for range n {
		await(ready, "ready")
	}
	time.Sleep(20 * time.Millisecond) // the others go from "ready" into their call
	start := time.Now()
	if err := end(cmds[victim].Process, stdin[victim]); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("rank %d (pid %d)", victim, cmds[victim].Process.Pid)
	for range n - 1 {
		got := await(lost, "told of the end")
		if want := fmt.Sprintf("lost %d true", victim); !strings.HasPrefix(got.line, want) || !strings.Contains(got.line, name) || !strings.HasSuffix(got.line, cause) {
			t.Errorf("rank %d: %q, want %q, %q and %q", got.rank, got.line, want, name, cause)
		}
		t.Logf("rank %d after %v: %s", got.rank, time.Since(start).Round(time.Microsecond), got.line)
	}
}
