package command

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/kernels/cpu"
)

// finding is one line of the report; a fix makes it a problem.
type finding struct {
	what, value, fix string
}

// Doctor prints what this machine has. The status is 1 where something would keep a run
// from working.
func Doctor(w io.Writer) (int, error) {
	problems := 0
	gpus, machine := gpus()
	for _, f := range slices.Concat([]finding{cores(), memory()}, gpus, []finding{exchanges(), openFiles(), processes(), temp(), text()}) {
		mark := "ok"
		if f.fix != "" {
			mark = "PROBLEM"
			problems++
		}
		fmt.Fprintf(w, "%-8s %-14s %s\n", mark, f.what, indented(f.value))
		if f.fix != "" {
			fmt.Fprintf(w, "         fix:           %s\n", indented(f.fix))
		}
	}
	if err := attentionReport(w, machine); err != nil {
		problems++
		fmt.Fprintf(w, "%-8s %-14s %v\n", "PROBLEM", "attention", err)
	}
	fmt.Fprintln(w, "\nenvironment variables that cprun reads")
	for _, v := range launch.Environment() {
		value := "not set"
		if v.Set {
			value = fmt.Sprintf("%q", v.Value)
		}
		fmt.Fprintf(w, "  %-20s %-12s %s\n", v.Name, value, v.Meaning)
	}
	if problems > 0 {
		fmt.Fprintf(w, "\n%d problem(s)\n", problems)
		return 1, nil
	}
	fmt.Fprintln(w, "\nno problem found: cprun --nproc 4 examples/opticks.yaml")
	return 0, nil
}

func cores() finding {
	used, best := cpu.Instructions()
	kernels := used + " kernels"
	if used != best {
		kernels += fmt.Sprintf(" (%s asks for them; this machine has %s)", launch.EnvCPU, best)
	}
	return finding{"cores", fmt.Sprintf("%d, %s/%s, %s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, kernels, runtime.Version()), ""}
}

func memory() finding {
	total, usable := launch.HostMemory()
	if usable == 0 {
		return finding{"memory", "not known", ""}
	}
	f := finding{"memory", plan.Bytes(total), ""}
	if usable < total {
		f.value += ", of which this cgroup may use " + plan.Bytes(usable)
	}
	return f
}

// exchanges is what ranks of this node exchange large messages by.
func exchanges() finding {
	if err := comm.SharesMemory(); err != nil {
		return finding{"exchanges", "of this node's ranks by Unix sockets, since they can share no memory: " + err.Error(), ""}
	}
	return finding{"exchanges", "of this node's ranks by shared memory (memfd), small ones by Unix sockets", ""}
}

// enoughFiles covers the sockets between ranks, logs and data files.
const enoughFiles = 1024

func openFiles() finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return finding{"open files", "not known: " + err.Error(), ""}
	}
	f := finding{"open files", fmt.Sprintf("at most %d", l.Max), ""}
	if l.Max < enoughFiles {
		f.fix = fmt.Sprintf("raise the limit to %d or more: ulimit -Hn %d, or nofile in /etc/security/limits.conf", enoughFiles, enoughFiles)
	}
	return f
}

func processes() finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &l); err != nil {
		return finding{"processes", "not known: " + err.Error(), ""}
	}
	if l.Cur == unix.RLIM_INFINITY {
		return finding{"processes", "no limit", ""}
	}
	f := finding{"processes", fmt.Sprintf("at most %d threads and processes of this user", l.Cur), ""}
	if l.Cur < enoughFiles {
		f.fix = fmt.Sprintf("raise the limit to %d or more: ulimit -u %d", enoughFiles, enoughFiles)
	}
	return f
}

// temp is where the private directory of a job is made.
func temp() finding {
	dir, err := os.MkdirTemp("", "cprun-doctor-")
	if err != nil {
		return finding{"temporary", err.Error(), "point TMPDIR at a directory that this user may write to"}
	}
	defer os.Remove(dir)
	return finding{"temporary", filepath.Dir(dir) + " can be written", ""}
}

// text is the example's corpus.
func text() finding {
	matches, _ := filepath.Glob("examples/data/*.txt")
	if len(matches) == 0 {
		return finding{"example text", "not here; run from a checkout of cprun to train the example", ""}
	}
	names := make([]string, len(matches))
	for i, m := range matches {
		names[i] = filepath.Base(m)
	}
	return finding{"example text", strings.Join(names, ", "), ""}
}
