package hostile

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/cprun/cprun/internal/base/must"
)

var (
	share = flag.Int("share", 20, "try each share-th input of a kind; 1: all")
	begin = flag.Int("begin", 0, "the first of these inputs")
)

// The limits of one process.
const (
	maxResident = 512 << 20
	maxTime     = 5 * time.Second // CPU time, which does not depend on the load of the machine
	hangs       = 60 * time.Second
	addressKiB  = 6 << 20 // protects the machine from a fault; Go reserves much more than it uses
	maxPrinted  = 256 << 10
)

// program is the path of cprun, which the tests build once.
var program string

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == spawnMode {
		os.Exit(spawn(os.Args[2:]))
	}
	flag.Parse()
	os.Exit(built(m.Run))
}

// built builds cprun and runs the tests.
func built(run func() int) int {
	dir, err := os.MkdirTemp("", "cprun-hostile-")
	if err == nil {
		defer os.RemoveAll(dir)
		program = filepath.Join(dir, "cprun")
		// No debug tables, which take long to link.
		build := exec.Command("go", "build", "-ldflags=-s -w", "-o", program, "../../../cmd/cprun")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		var out []byte
		if out, err = build.CombinedOutput(); err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build of cprun:", err)
		return 1
	}
	return run()
}

// An input is one hostile input, with the command to run on it.
type input struct {
	kind, name string
	// make creates the input in the sandbox and returns the arguments.
	make func(p *sandbox) []string
	// good means that cprun must succeed, with status 0. Otherwise the status must be 2, or 1 with fail, if only a
	// worker detects the error.
	good bool
	fail bool
	// says lists words that the output must have, such as the name of the invalid file.
	says []string
	env  []string
	// beside runs concurrently with the process.
	beside func(t *testing.T, pid int, p *sandbox)
}

// A sandbox has a working directory for an input, and a second directory that must not change.
type sandbox struct {
	t        *testing.T
	dir      string
	outside  string
	precious map[string]string
}

// path returns the path of a name in the directory.
func (p *sandbox) path(name string) string { return filepath.Join(p.dir, name) }

// write writes a file in the directory and returns its path.
func (p *sandbox) write(name string, data []byte) string {
	path := p.path(name)
	p.must(os.MkdirAll(filepath.Dir(path), 0o755))
	p.must(os.WriteFile(path, data, 0o644))
	return path
}

// must stops the test if an input could not be made.
func (p *sandbox) must(err error) {
	if err != nil {
		p.t.Helper()
		p.t.Fatal(err)
	}
}

// walk calls f with each entry of a directory.
func walk(t *testing.T, dir string, f func(path string, info fs.FileInfo) error) {
	t.Helper()
	must.Do(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return f(path, info)
	}))
}

// snapshot returns the mode and content of all files in a directory, by name.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	walk(t, dir, func(path string, info fs.FileInfo) (err error) {
		var data []byte
		if info.Mode().IsRegular() {
			data, err = os.ReadFile(path)
		}
		all[strings.TrimPrefix(path, dir)] = info.Mode().String() + string(data)
		return err
	})
	return all
}

// kinds returns the inputs of each kind. They are made one kind at a time, since some are large.
var kinds = []func() []input{configs, keys, names, models, cases, tokens, runs, environments, strangers}

// TestHostile runs all inputs, or a tenth of them with -short.
func TestHostile(t *testing.T) {
	step := *share
	if testing.Short() {
		step *= 10
	}
	var mu sync.Mutex
	var most usage
	var told []string
	total := 0
	for _, make := range kinds {
		all := make()
		n, kind := 0, all[0].kind
		t.Run(kind, func(t *testing.T) {
			for i := *begin % step; i < len(all); i += step {
				in := all[i]
				n++
				t.Run(fmt.Sprintf("%d_%.60q", i, in.name), func(t *testing.T) {
					t.Parallel()
					use := try(t, in)
					mu.Lock()
					defer mu.Unlock()
					most = usage{max(most.Resident, use.Resident), max(most.Time, use.Time), 0}
				})
			}
		})
		total += n
		told = append(told, fmt.Sprintf("%s %d", kind, n))
	}
	t.Logf("%d inputs (%s): at most %d MiB and %.2f s", total, strings.Join(told, ", "), most.Resident>>20,
		most.Time.Seconds())
}

// try runs cprun on one input and checks the common requirements.
func try(t *testing.T, in input) usage {
	base := t.TempDir()
	p := &sandbox{t: t, dir: filepath.Join(base, "work"), outside: filepath.Join(base, "outside")}
	p.must(os.Mkdir(p.dir, 0o755))
	p.must(os.MkdirAll(filepath.Join(p.outside, "folder"), 0o755))
	p.must(os.WriteFile(filepath.Join(p.outside, "precious"), []byte("precious\n"), 0o644))
	args := in.make(p)
	p.precious = snapshot(t, p.outside)
	tmp := filepath.Join(base, "tmp")
	p.must(os.Mkdir(tmp, 0o700))

	self, err := os.Executable()
	p.must(err)
	limit := fmt.Sprintf("umask 0; ulimit -v %d; exec \"$@\"", addressKiB)
	c := exec.Command(self, append([]string{spawnMode, "sh", "-c", limit, "sh", program}, args...)...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr, c.Dir = &out, &errs, p.dir
	c.Env = append(append(os.Environ(), "TMPDIR="+tmp, "GOMAXPROCS=2", "GOGC="), in.env...)
	c.WaitDelay = time.Second
	report, w, err := os.Pipe()
	p.must(err)
	defer report.Close()
	c.ExtraFiles = []*os.File{w}
	p.must(c.Start())
	w.Close()
	lines := bufio.NewReader(report)
	var pid int
	if _, err := fmt.Fscanf(lines, "%d\n", &pid); err != nil {
		t.Fatal(err)
	}
	hung := time.AfterFunc(hangs, func() {
		syscall.Kill(pid, syscall.SIGKILL)
		t.Errorf("it hangs; killed after %v", hangs)
	})
	if in.beside != nil {
		in.beside(t, pid, p)
	}
	var use usage
	if _, err := fmt.Fscanf(lines, "%d %d %d\n", &use.Resident, &use.Time, &use.Status); err != nil {
		t.Fatal(err)
	}
	c.Wait()
	hung.Stop()
	if use.Resident > maxResident || use.Time > maxTime {
		t.Errorf("it took %d MiB and %.2f s", use.Resident>>20, use.Time.Seconds())
	}
	in.judge(t, p, use.Status, out.String(), errs.String())
	return use
}

// judge checks the exit status, the output and the changed files of a process.
func (in *input) judge(t *testing.T, p *sandbox, code int, stdout, stderr string) {
	tell := func(format string, args ...any) {
		t.Errorf("%s\nstderr: %.3000q\nstdout: %.300q", fmt.Sprintf(format, args...), stderr, stdout)
	}
	switch {
	case in.good && code != 0:
		tell("status %d, want 0", code)
	case !in.good && code != 2 && !(in.fail && (code == 1 || code == 0)):
		tell("status %d, want 2", code)
	case code != 0 && !strings.HasPrefix(stderr, "cprun: ") && !strings.Contains(stderr, "\ncprun: "):
		tell("status %d without a word", code)
	}
	for _, w := range []string{"panic:", "goroutine ", "fatal error:", "runtime error", "%!"} {
		if strings.Contains(stderr+stdout, w) {
			tell("it prints %q", w)
		}
	}
	for _, w := range in.says {
		if !strings.Contains(stderr+stdout, w) {
			tell("it does not say %q", w)
		}
	}
	if len(stderr) > maxPrinted {
		tell("it prints %d bytes", len(stderr))
	}
	for _, r := range stdout + stderr {
		if r != '\n' && r != '\t' &&
			(unicode.IsControl(r) || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069) {
			tell("it prints %q", r)
			break
		}
	}
	if strings.Contains("\n"+stdout+stderr, "\nFORGED") {
		tell("a line break in a name makes a line")
	}
	if after := snapshot(t, p.outside); !maps.Equal(after, p.precious) {
		tell("outside became %q, was %q", after, p.precious)
	}
	if open := modes(t, p.dir); len(open) > 0 {
		tell("others may write %q", open)
	}
}

// modes returns the names in a directory that all users may write. Inputs are made with other modes.
func modes(t *testing.T, dir string) (open []string) {
	walk(t, dir, func(path string, info fs.FileInfo) error {
		if info.Mode()&fs.ModeSymlink == 0 && info.Mode().Perm()&0o022 != 0 {
			open = append(open, path)
		}
		return nil
	})
	return open
}
