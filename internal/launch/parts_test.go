package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/cores"
)

func FuzzFrame(f *testing.F) {
	h := hello{
		Process: Process{RunID: "r", WorldSize: 2, LocalWorldSize: 2, SocketDir: "/d"},
		Secret:  make([]byte, secretSize),
	}
	greeting, err := encodeFrame(command{Hello: &h})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(greeting)
	f.Add([]byte(`{"stop":"SIGTERM"}` + "\n"))
	f.Add([]byte(`{"kind":"progress","step":3,"data":{"loss":1}}` + "\n" + `{"kind":"done"}`))
	f.Add([]byte("{}\n\n[]\n{\"kind\":\"x\",\"step\":-1}\n{\"kind\":\"x\"} {}\n"))
	f.Add(bytes.Repeat([]byte("["), 20000))
	f.Fuzz(func(t *testing.T, stream []byte) {
		frames := newFrames(bytes.NewReader(stream))
		for frames.Scan() {
			for _, v := range []any{new(Event), new(command)} {
				if DecodeStrict(frames.Bytes(), v) != nil {
					continue
				}
				again, err := json.Marshal(v)
				if err != nil || DecodeStrict(again, v) != nil {
					t.Fatalf("%q became %q, %v", frames.Bytes(), again, err)
				}
			}
		}
		if err := frames.Err(); err != nil && !errors.Is(err, bufio.ErrTooLong) {
			t.Fatal(err)
		}
	})
}

func TestFrameLength(t *testing.T) {
	exact := append(bytes.Repeat([]byte("a"), maxFrame-1), '\n')
	frames := newFrames(
		io.MultiReader(bytes.NewReader(exact), bytes.NewReader(exact), strings.NewReader("a"), bytes.NewReader(exact)),
	)
	for range 2 {
		if !frames.Scan() || len(frames.Bytes()) != maxFrame-1 {
			t.Fatalf("%d bytes, %v", len(frames.Bytes()), frames.Err())
		}
	}
	if frames.Scan() || !errors.Is(frames.Err(), bufio.ErrTooLong) {
		t.Errorf("a frame of one byte too much: %v", frames.Err())
	}
	if half := newFrames(strings.NewReader("half")); half.Scan() || half.Err() != nil {
		t.Errorf("half a frame: %q, %v", half.Text(), half.Err())
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, bad := range []string{``, `{"kind":"stop"}{}`, `{"kind":"stop"} x`, `{"kind":"x","other":1}`, `{"kind":3}`} {
		if DecodeStrict([]byte(bad), new(command)) == nil || DecodeStrict([]byte(bad), new(Event)) == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// TestGreetRefuses checks that a worker accepts the hello of its own run alone.
func TestGreetRefuses(t *testing.T) {
	h := func(run string, secret int) command {
		return command{Hello: &hello{Process: Process{RunID: run}, Secret: make([]byte, secret)}}
	}
	for _, c := range []struct {
		first command
		want  string
	}{
		{h("r", secretSize), ""}, {h("other", secretSize), "run"}, {h("r", 3), "secret"},
		{command{Stop: "SIGTERM"}, "before the hello"},
	} {
		ours, theirs := net.Pipe()
		go func() {
			frame, _ := encodeFrame(c.first)
			ours.Write(frame)
			ours.Close()
		}()
		w, _, err := greet(theirs, "r")
		if (w != nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.first, err)
		}
		theirs.Close()
	}
}

func TestAttachAlone(t *testing.T) {
	if _, err := Attach(func(error) {}); !errors.Is(err, ErrNotLaunched) {
		t.Errorf("without a launcher: %v", err)
	}
	t.Setenv(envRunID, "forged")
	if _, err := Attach(func(error) {}); !errors.Is(err, ErrNotLaunched) {
		t.Errorf("without its socket: %v", err)
	}
}

func TestJobDir(t *testing.T) {
	base := shortTempDir(t)
	d, err := newJobDir(base)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(d.path); err != nil || info.Mode().Perm() != 0o700 || filepath.Dir(d.path) != base {
		t.Errorf("%s: %v, %v", d.path, info.Mode(), err)
	}
	other, err := newJobDir(base)
	if err != nil || other.path == d.path {
		t.Fatalf("a second job: %v", err)
	}
	if _, err := os.Stat(d.path); err != nil {
		t.Errorf("the second job removed the first's directory: %v", err)
	}
	// The launcher dies: its lock goes, its directory stays.
	if err := os.WriteFile(filepath.Join(d.path, "rank-0.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d.lock.Close()
	// An unlocked directory without the marker also stays.
	foreign := filepath.Join(base, dirPrefix+"x")
	if err := os.Mkdir(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	third, err := newJobDir("", filepath.Join(base, "missing"), base)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(d.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stale directory: %v", err)
	}
	for _, path := range []string{other.path, foreign} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%v", err)
		}
	}
	for _, d := range []*jobDir{other, third} {
		if err := d.close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(d.path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after close: %v", err)
		}
	}
}

func TestJobDirTooLong(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("d", 100))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := newJobDir(long); err == nil || !strings.Contains(err.Error(), "too long for the path of a socket") ||
		!strings.Contains(err.Error(), "TMPDIR") {
		t.Errorf("%v", err)
	}
	d, err := newJobDir(long, shortTempDir(t))
	if err != nil {
		t.Fatal(err)
	}
	d.close()
}

// shortTempDir returns a directory with a path short enough for sockets, unlike t.TempDir.
func shortTempDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/tmp", "l")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// tree returns a directory, and a function that writes a file in it and returns its path.
func tree(t *testing.T) (root string, write func(name, text string) string) {
	t.Helper()
	root = t.TempDir()
	return root, func(name, text string) string {
		path := filepath.Join(root, name)
		os.MkdirAll(filepath.Dir(path), 0o700)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
}

func TestOOMKills(t *testing.T) {
	root, write := tree(t)
	write("job/a/memory.events", "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 1\n")
	write("memory/slurm/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
	write("memory.events", "oom_kill x\n")
	for text, want := range map[string]int64{
		"0::/job/a\n": 2,
		"9:name=systemd:/\n4:memory:/slurm\n0::/\n": 5,
		"0::/elsewhere\n": -1,
		"nonsense\n4:memory:/gone\n1:cpu,cpuacct:/\n": -1,
	} {
		if n := oomKills(write("self", text), root); n != want {
			t.Errorf("%q: %d, want %d", text, n, want)
		}
	}
	write("memory.events", "oom_kill 4\n") // of a container, mounted at the root
	if n := oomKills(write("self", "0::/host/path\n"), root); n != 4 {
		t.Errorf("container: %d", n)
	}
}

func TestMemoryLimit(t *testing.T) {
	root, write := tree(t)
	write("job/memory.max", "3000\n")
	write("job/a/memory.max", "max\n")
	write("job/b/memory.max", "2000\n")
	write("memory/slurm/memory.limit_in_bytes", "5000\n")
	write("memory/memory.limit_in_bytes", "9223372036854771712\n")
	for text, want := range map[string]int64{
		"0::/job/a\n": 3000,
		"0::/job/b\n": 2000,
		"9:name=systemd:/\n4:memory:/slurm/step\n0::/\n": 5000,
		"0::/elsewhere\n":                  0,
		"0::/../other\n":                   0,
		"nonsense\n1:cpu,cpuacct:/\n0::\n": 0,
	} {
		if n := memoryLimit(write("self", text), root); n != want {
			t.Errorf("%q: %d, want %d", text, n, want)
		}
	}
	write("memory.max", "4000\n") // of a container, mounted at the root
	if n := memoryLimit(write("self", "0::/host/path\n"), root); n != 4000 {
		t.Errorf("container: %d", n)
	}
	if total, usable := HostMemory(); usable < 1<<20 || usable > total {
		t.Errorf("of %d bytes %d are usable", total, usable)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv(envMaxProcs, "5")
	var found bool
	for _, v := range Environment() {
		found = found || v.Name == envMaxProcs && v.Value == "5" && v.Set
		if v.Name == "" || v.Meaning == "" || !v.Set && v.Value != "" {
			t.Errorf("%+v", v)
		}
	}
	if !found {
		t.Error("GOMAXPROCS is not listed as set")
	}
}

// TestWorkerEnvironmentOfGPUs checks that workers get the variables for GPU libraries unless the user has set them.
func TestWorkerEnvironmentOfGPUs(t *testing.T) {
	h := hello{Process: Process{LocalWorldSize: 1, Listen: "fd00::1"}, Interface: "ib0"}
	for name, want := range map[string]string{envMulticast: "0", envQueues: "32", envNCCLNetwork: "=ib0",
		envNCCLFamily: "AF_INET6"} {
		for _, c := range []struct{ base, want []string }{
			{nil, []string{name + "=" + want}},
			{[]string{name + "="}, []string{name + "=" + want}},
			{[]string{name + "=7"}, []string{name + "=7"}},
		} {
			var got []string
			for _, v := range workerEnv(c.base, h) {
				if strings.HasPrefix(v, name+"=") {
					got = append(got, v)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("given %q: %q, want %q", c.base, got, c.want)
			}
		}
	}
}

// TestSharers checks that ranks share the cores of their host, even if each has its own unbound launcher.
func TestSharers(t *testing.T) {
	if n := (&hello{Process: Process{LocalWorldSize: 3}}).ranksSharingCores(); n != 3 {
		t.Errorf("on one node: %d, want 3", n)
	}
	h := hello{Process: Process{LocalWorldSize: 1, Rank: 2, Hosts: []string{"a", "a", "b", "b", "b"}}}
	want := 3
	if runtime.NumCPU() < cores.Online() {
		want = 1 // this process is bound
	}
	if n := h.ranksSharingCores(); n != want {
		t.Errorf("one of three on a host: %d, want %d", n, want)
	}
}

func TestRunRefuses(t *testing.T) {
	good := Job{NProc: 1, Argv: []string{"worker", "done"}, Logs: logsIn(t, t.TempDir())}
	for want, change := range map[string]func(*Job){
		"number of processes 0": func(j *Job) { j.NProc = 0 },
		"ranks 0 to 1 of this": func(j *Job) {
			j.NProc, j.Membership = 2, &placed{singleNode{job: &Job{Logs: j.Logs}}, RankRange{WorldSize: 1}}
		},
		"arguments of the worker": func(j *Job) { j.Argv = nil },
		"payload for the workers": func(j *Job) { j.Payload = make([]byte, maxPayload+1) },
		"log directory: none":     func(j *Job) { j.Logs = nil },
	} {
		job := good
		change(&job)
		r := Run(t.Context(), job)
		if r.ExitCode != ExitFailed || r.Err == nil || !strings.HasPrefix(r.Err.Error(), want) {
			t.Errorf("%q: %+v", want, r)
		}
	}
}

func TestConsoleLeavesOutProgressOnly(t *testing.T) {
	var got []string
	began, hold := make(chan struct{}), make(chan struct{})
	m := newConsole(io.Discard)
	m.put(false, func() { close(began); <-hold })
	<-began
	for range maxWaiting + 10 {
		m.put(true, func() { got = append(got, "progress") })
	}
	m.put(false, func() { got = append(got, "done") })
	close(hold)
	m.close()
	if n := len(got); n != maxWaiting+1 || got[n-1] != "done" {
		t.Errorf("%d calls, the last %q; want %d progress and one done", n, got[n-1], maxWaiting)
	}
}

func TestRunIDs(t *testing.T) {
	now := time.Unix(1, 0)
	a, b := NewRunID(now), NewRunID(now)
	if a == b || !strings.HasPrefix(a, "19700101-000001-") {
		t.Errorf("%q, %q", a, b)
	}
	if slices.Equal(NewSecret(), NewSecret()) {
		t.Error("two secrets are the same")
	}
}

// TestEnvironmentListsWhatIsSetInC checks that Environment also lists variables that C code sets for a library.
func TestEnvironmentListsWhatIsSetInC(t *testing.T) {
	src, err := os.ReadFile("../base/nccl/nccl.c")
	if err != nil {
		t.Fatal(err)
	}
	set := regexp.MustCompile(`setenv\("([^"]+)"`).FindAllSubmatch(src, -1)
	if len(set) == 0 {
		t.Fatal("nccl.c sets nothing: this test looks in the wrong place")
	}
	for _, m := range set {
		if !slices.ContainsFunc(Environment(), func(v Variable) bool { return v.Name == string(m[1]) }) {
			t.Errorf("%s is not in Environment", m[1])
		}
	}
}

// TestDocsNameEveryVariable checks that the user documentation names every variable of Environment.
func TestDocsNameEveryVariable(t *testing.T) {
	var pages []byte
	for _, page := range []string{"../../docs/operations.md", "../../docs/cluster.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, text...)
	}
	for _, v := range Environment() {
		if !bytes.Contains(pages, []byte("`"+v.Name+"`")) {
			t.Errorf("neither docs/operations.md nor docs/cluster.md names %s", v.Name)
		}
	}
}
