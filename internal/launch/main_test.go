package launch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/launch/waits"
)

// TestMain lets the test binary act as launcher and worker, as cprun does.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case "worker":
			os.Exit(workerMain(os.Args[2]))
		case "agent":
			os.Exit(agentMain(os.Args[2:]))
		case "sleep":
			time.Sleep(time.Hour)
		}
	}
	// The race detector would make every process sleep for a second before it ends.
	os.Setenv("GORACE", os.Getenv("GORACE")+" atexit_sleep_ms=0")
	goleak.VerifyTestMain(m)
}

// quick bounds the waits for workers in tests.
var quick = times{settle: 300 * time.Millisecond, grace: 300 * time.Millisecond, exit: 1800 * time.Millisecond}

// agentMain runs a job like cprun, with the arguments SCENARIO NPROC LOGDIR.
func agentMain(args []string) int {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return 2
	}
	logs, err := files.Make(args[2])
	if err != nil {
		return 2
	}
	job := Job{
		NProc: n, Argv: []string{"worker", args[0]}, Logs: logs, Stderr: os.Stderr,
		times:   quick,
		OnEvent: func(rank int, e Event) { fmt.Printf("%d %s %s\n", rank, e.Kind, e.Data) },
	}
	return Run(context.Background(), job).ExitCode
}

// workerMain plays one scenario, and returns the exit status.
func workerMain(scenario string) int {
	if scenario == "hasty" && os.Mkdir(os.Args[3], 0o700) == nil { // one of the ranks
		syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}
	w, err := Attach(func(error) { os.Exit(1) })
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if err := w.SendData("pid", 0, os.Getpid()); err != nil {
		return 3
	}
	if play, ok := scenarios[scenario]; ok {
		return play(w)
	}
	fmt.Fprintln(os.Stderr, "no such scenario")
	return 4
}

// logsIn opens a directory for logs until the end of the test.
func logsIn(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := files.Make(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// hang blocks forever and ignores every request.
func hang(*Worker) int { select {} }

func done(w *Worker) int {
	if w.Done() != nil {
		return 3
	}
	return 0
}

func awaitStop(w *Worker) int {
	<-w.Stop()
	if w.Stopped(7) != nil {
		return 3
	}
	return 0
}

// spinning computes forever on all its threads and never reads a channel.
func spinning(w *Worker) int {
	for range 2 {
		go func() {
			for i := 0; ; i++ {
				_ = i
			}
		}()
	}
	for i := 0; ; i++ {
		_ = i
	}
}

func at(rank int, first, others func(*Worker) int) func(*Worker) int {
	return func(w *Worker) int {
		if w.Rank == rank {
			return first(w)
		}
		return others(w)
	}
}

func kill(sig syscall.Signal) func(*Worker) int {
	return func(*Worker) int {
		unix.Kill(os.Getpid(), sig)
		select {}
	}
}

func fail(text string, remote bool) func(*Worker) int {
	return func(w *Worker) int {
		if w.Fail(Failure{Cause: text, Remote: remote, Phase: "backward", Step: 12}) != nil {
			return 3
		}
		return 1
	}
}

// chainedState returns the state of a rank that waits for the next one; the last of three works.
func chainedState(w *Worker) waits.WaitState {
	s := waits.WaitState{Rank: 99, Step: 6, Phase: "step", PhaseTime: time.Minute}
	if w.Rank < 2 {
		s.Waits = []waits.Wait{{
			Op: "exchange", Label: "step 7/forward/layer 3/hop 1 owner 0", Bytes: 4096, Stalled: 30 * time.Second,
			Open: []waits.Open{{Peer: w.Rank + 1, Bytes: 4096}},
		}}
	}
	return s
}

// wait announces that this rank is about to call f, which never ends.
func wait(w *Worker, f func(*Worker) int) int {
	if os.WriteFile(filepath.Join(w.SocketDir, "new"), []byte(strconv.Itoa(os.Getpid())), 0o600) != nil ||
		os.Rename(filepath.Join(w.SocketDir, "new"), filepath.Join(w.SocketDir, "waiting")) != nil {
		return 3
	}
	return f(w)
}

// waiting returns the process id of the announced rank.
func waiting(w *Worker) int {
	for {
		b, err := os.ReadFile(filepath.Join(w.SocketDir, "waiting"))
		if pid, bad := strconv.Atoi(string(b)); err == nil && bad == nil {
			return pid
		}
		time.Sleep(time.Millisecond)
	}
}

// awaitStopped waits until a process is stopped. Another rank's failure may have killed it by then.
func awaitStopped(pid int) {
	for s := state(pid); s != 'T' && s != 'Z' && s != 0; s = state(pid) {
		time.Sleep(time.Millisecond)
	}
}

// timesOut fails because it waited for too long, once ranks 0 and 1 both have.
func timesOut(w *Worker) int {
	ready := func(rank int) string { return filepath.Join(w.SocketDir, fmt.Sprint("ready-", rank)) }
	if os.WriteFile(ready(w.Rank), nil, 0o600) != nil {
		return 3
	}
	for other := ready(1 - w.Rank); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(other); err == nil {
			break
		}
	}
	s := chainedState(w)
	f := Failure{Cause: "rank 2: no progress", Remote: true, Phase: "step", Step: 7, TimedOut: true, WaitState: &s}
	if w.Fail(f) != nil {
		return 3
	}
	return 1
}

var scenarios = map[string]func(*Worker) int{
	"done":     done,
	"hang":     hang,
	"spinning": spinning,
	"stop":     awaitStop,
	"deaf": func(w *Worker) int {
		<-w.Stop()
		w.Send(Event{Kind: "asked"})
		return hang(w)
	},
	"kill2": at(2, kill(syscall.SIGKILL), fail("lost rank 2", true)),
	"hasty": func(w *Worker) int { return fail(fmt.Sprintf("lost rank %d", (<-w.Failed()).Rank), true)(w) },
	"meeting": at(1, kill(syscall.SIGKILL), func(w *Worker) int {
		return fail(fmt.Sprintf("heard of rank %d", (<-w.Failed()).Rank), true)(w)
	}),
	"stopped": at(1, func(w *Worker) int { return wait(w, kill(syscall.SIGSTOP)) }, func(w *Worker) int {
		awaitStopped(waiting(w))
		return fail("rank 1 stands still", true)(w)
	}),
	"stopped-later": at(1, func(w *Worker) int {
		return wait(w, func(w *Worker) int { <-w.Failed(); return kill(syscall.SIGSTOP)(w) })
	}, func(w *Worker) int { waiting(w); return fail("wrong shape", false)(w) }),
	"mute": at(1, func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { select {} })
		return wait(w, hang)
	}, func(w *Worker) int { waiting(w); return fail("wrong shape", false)(w) }),
	"sigsys":    at(1, kill(syscall.SIGSYS), hang),
	"late-kill": at(2, func(w *Worker) int { <-w.Failed(); return kill(syscall.SIGKILL)(w) }, fail("lost rank 2", true)),
	"own-late": at(1, func(w *Worker) int {
		<-w.Failed()
		return fail("corpus.bin: short read\n\x1b[31mat byte 12", false)(w)
	}, fail("lost rank 1", true)),
	"no-reason": fail("\n", false),
	"stubborn":  at(0, fail("wrong shape", false), hang),
	"early":     at(1, func(*Worker) int { return 0 }, hang),
	"exit3":     at(1, func(*Worker) int { fmt.Println("so long"); return 3 }, hang),
	"panic":     at(1, func(w *Worker) int { var p *Worker; return p.Rank }, hang),
	"garbage":   at(1, func(w *Worker) int { w.conn.Write([]byte("{\"kind\":3}\n")); return hang(w) }, hang),
	"last":      at(1, hang, done),
	"linger":    at(1, func(w *Worker) int { w.Done(); return hang(w) }, done),
	"chain": func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { return chainedState(w) })
		return awaitStop(w)
	},
	"watched": at(2, kill(syscall.SIGSTOP), func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { return chainedState(w) })
		return awaitStop(w)
	}),
	"timeout": at(2, func(w *Worker) int { return wait(w, kill(syscall.SIGSTOP)) }, func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { return chainedState(w) })
		awaitStopped(waiting(w))
		return timesOut(w)
	}),
	"stuck": at(2, func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { return chainedState(w) })
		return wait(w, hang)
	}, func(w *Worker) int {
		w.OnStatus(func() waits.WaitState { return chainedState(w) })
		waiting(w)
		return timesOut(w)
	}),
	"late-done": at(1, func(w *Worker) int { w.Done(); return 5 }, done),
	"direct-stop": func(w *Worker) int {
		unix.Kill(os.Getpid(), syscall.SIGUSR1)
		return awaitStop(w)
	},
	"int-ignored": func(w *Worker) int {
		unix.Kill(os.Getpid(), syscall.SIGINT)
		time.Sleep(20 * time.Millisecond)
		return done(w)
	},
	"output": func(w *Worker) int {
		fmt.Printf("\x1b]0;title\x07hello\x00 \x1b[1mfrom\x1b[0m rank %d\r\n", w.Rank)
		fmt.Println(strings.Repeat("x", maxLine+5))
		os.Stderr.Write([]byte{0xff, 0xfe, '\n'})
		fmt.Print("no newline at the end")
		return done(w)
	},
	"grandchild": func(w *Worker) int {
		c := exec.Command(os.Args[0], "sleep", "long")
		c.Stdout = os.Stdout // the pipe to the launcher
		if c.Start() != nil || w.SendData("pid", 0, c.Process.Pid) != nil {
			return 3
		}
		return done(w)
	},
	"place": func(w *Worker) int {
		env := map[string]string{}
		for _, name := range []string{envRank, envWorldSize, envLocalRank, envLocalWorldSize, envNodeRank,
			envRunID, envRestartCount, envMaxProcs} {
			env[name] = os.Getenv(name)
		}
		exposed := bytes.Contains([]byte(strings.Join(append(os.Environ(), os.Args...), " ")), w.Secret)
		info, err := os.Stat(w.SocketDir)
		if err != nil {
			return 3
		}
		w.SendData("place", 0, map[string]any{
			"env": env, "payload": string(w.Payload), "dir": w.SocketDir, "mode": info.Mode().String(),
			"secret": []byte(w.Secret), "printed": fmt.Sprintf("%v %+v %#v", w.Secret, w.Secret, w.Secret),
			"exposed": exposed,
		})
		return done(w)
	},
	"restart": func(w *Worker) int {
		w.Send(Event{Kind: EventProgress, Step: int64(10 * (w.Restart + 1))})
		w.SendData("dir", 0, w.SocketDir)
		if w.Restart == 2 {
			return done(w)
		}
		return fail("flaky", false)(w)
	},
	"no-progress": func(w *Worker) int {
		w.Send(Event{Kind: EventProgress, Step: 10})
		return fail("always", false)(w)
	},
	"big": func(w *Worker) int {
		data := json.RawMessage(`"` + strings.Repeat("a", maxFrame) + `"`)
		if err := w.Send(Event{Kind: "big", Data: data}); !errors.Is(err, bufio.ErrTooLong) {
			return 3
		}
		w.Fail(Failure{Cause: strings.Repeat("e", maxFrame)})
		return 1
	},
}

// A ran is the outcome of a job that ran in the test's own process.
type ran struct {
	Result
	stderr string
	logs   string
	mu     sync.Mutex
	pids   []int
	events []string
	data   []json.RawMessage
}

// play runs a scenario, and checks that no process is left.
func play(t *testing.T, scenario string, n int, change ...func(*Job)) *ran {
	t.Helper()
	r := &ran{logs: filepath.Join(t.TempDir(), "logs")}
	var out bytes.Buffer
	job := Job{
		NProc: n, Argv: []string{"worker", scenario}, Logs: logsIn(t, r.logs), Stderr: &out,
		times:   quick,
		OnEvent: r.event,
	}
	for _, f := range change {
		f(&job)
	}
	r.Result = Run(t.Context(), job)
	r.stderr = out.String()
	(&agentProcess{pids: r.pids}).gone(t)
	if t.Failed() {
		t.Log(r.stderr)
	}
	return r
}

func (r *ran) event(rank int, e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf("%d %s %d", rank, e.Kind, e.Step))
	var pid int
	switch {
	case e.Kind == "pid" && json.Unmarshal(e.Data, &pid) == nil:
		r.pids = append(r.pids, pid)
	case e.Kind == "place", e.Kind == "dir":
		r.data = append(r.data, e.Data)
	}
}

// dirs returns the distinct values sent by the workers.
func (r *ran) dirs() []string {
	var out []string
	for _, d := range r.data {
		out = append(out, string(d))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// alive reports whether a process or its group exists. A zombie does not count: its parent may be another process.
func alive(pid int) bool {
	if unix.Kill(-pid, 0) != nil && unix.Kill(pid, 0) != nil {
		return false
	}
	s := state(pid)
	return s != 0 && s != 'Z'
}

// An agentProcess is a launcher in its own process.
type agentProcess struct {
	cmd  *exec.Cmd
	out  *bufio.Reader
	err  bytes.Buffer
	pids []int
}

// startAgent returns after every worker has reported its process id.
func startAgent(t *testing.T, scenario string, n int, change ...func(*exec.Cmd)) *agentProcess {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	a := &agentProcess{cmd: exec.Command(exe, "agent", scenario, strconv.Itoa(n), filepath.Join(t.TempDir(), "logs"))}
	a.cmd.Stderr = &a.err
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.out = bufio.NewReader(out)
	for _, f := range change {
		f(a.cmd)
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.cmd.Process.Kill() })
	for len(a.pids) < n {
		pid, err := strconv.Atoi(a.await(t, "pid"))
		if err != nil {
			t.Fatal(err)
		}
		a.pids = append(a.pids, pid)
	}
	return a
}

// await returns the data of the next event of a kind.
func (a *agentProcess) await(t *testing.T, kind string) (data string) {
	t.Helper()
	for {
		line, err := a.out.ReadString('\n')
		if err != nil {
			a.cmd.Wait()
			t.Fatalf("agent: %v\n%s", err, a.err.String())
		}
		var rank int
		var got string
		if fmt.Sscan(line, &rank, &got, &data); got == kind {
			return data
		}
	}
}

func (a *agentProcess) signal(t *testing.T, sig os.Signal) {
	t.Helper()
	if err := a.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

func (a *agentProcess) wait(t *testing.T, code int) string {
	t.Helper()
	io.Copy(io.Discard, a.out)
	a.cmd.Wait()
	if got := a.cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("exit status %d (%v), want %d\n%s", got, a.cmd.ProcessState, code, a.err.String())
	}
	a.gone(t)
	return a.err.String()
}

// gone polls, since the kernel and init need some time after a kill.
func (a *agentProcess) gone(t *testing.T) {
	t.Helper()
	for begin := time.Now(); slices.ContainsFunc(a.pids, alive); time.Sleep(time.Millisecond) {
		if time.Since(begin) > 10*time.Second {
			t.Errorf("workers %v are left", a.pids)
			return
		}
	}
}
