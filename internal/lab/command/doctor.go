package command

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/kernels/cpu"
)

// finding is one line of the report; a fix makes it a problem.
type finding struct {
	what, value, fix string
}

// maxSet is how many variables that are set doctor lists without --verbose.
const maxSet = 10

// Doctor prints whether something would keep a run from working, each problem with its fix, and what this machine has;
// with verbose, variables that are not set and why backends cannot run too. The status is 1 if there is a problem.
func Doctor(w io.Writer, verbose bool) (int, error) {
	gpus, machine := gpus()
	findings := slices.Concat([]finding{cores(), memory()}, gpus, []finding{exchanges(), openFiles(), processes(),
		temp()})
	var b strings.Builder
	if err := attentionReport(&b, machine, verbose); err != nil {
		findings = append(findings, finding{"attention", err.Error(), "correct the environment variable"})
	}
	variables(&b, verbose)
	slices.SortStableFunc(findings, func(a, b finding) int { // problems first
		return cmp.Compare(min(len(b.fix), 1), min(len(a.fix), 1))
	})
	var names []string
	var lines strings.Builder
	for _, f := range findings {
		mark := "ok"
		if f.fix != "" {
			mark, names = "PROBLEM", append(names, f.what)
		}
		fmt.Fprintf(&lines, "%-8s %-14s %s\n", mark, f.what, indented(f.value))
		if f.fix != "" {
			fmt.Fprintf(&lines, "         fix:           %s\n", indented(f.fix))
		}
	}
	verdict, status := "no problem found: cprun --nproc 4 examples/opticks.yaml", 0
	if len(names) > 0 {
		verdict, status = fmt.Sprintf("%d problem%s: %s", len(names), map[bool]string{true: "s"}[len(names) > 1],
			strings.Join(names, ", ")), 1
	}
	if !verbose {
		b.WriteString("\n--verbose: variables that are not set, and why other backends cannot run\n")
	}
	_, err := io.WriteString(w, terminal.Wrap(verdict+"\n\n"+lines.String(), 80, 24)+terminal.Wrap(b.String(), 80, 4))
	return status, err
}

// variables lists the environment variables that cprun reads.
func variables(b *strings.Builder, verbose bool) {
	all := launch.Environment()
	if verbose {
		b.WriteString("\nenvironment variables that cprun reads\n")
		for _, v := range all {
			value := "not set"
			if v.Set {
				value = fmt.Sprintf("%q", v.Value)
			}
			fmt.Fprintf(b, "  %-20s %s\n      %s\n", v.Name, value, v.Meaning)
		}
		return
	}
	all = slices.DeleteFunc(all, func(v launch.Variable) bool { return !v.Set })
	b.WriteString("\nenvironment variables that are set and that cprun reads\n")
	for _, v := range all[:min(len(all), maxSet)] {
		fmt.Fprintf(b, "  %-20s %s\n", v.Name, terminal.Clip(fmt.Sprintf("%q", v.Value), 56))
	}
	if more := len(all) - maxSet; more > 0 {
		fmt.Fprintf(b, "  and %d more\n", more)
	}
}

func cores() finding {
	used, best := cpu.Instructions()
	kernels := used + " kernels"
	if used != best {
		kernels += fmt.Sprintf(" (%s asks for them; this machine has %s)", launch.EnvCPU, best)
	}
	return finding{"cores", fmt.Sprintf("%d, %s/%s, %s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, kernels,
		runtime.Version()), ""}
}

func memory() finding {
	total, usable := launch.HostMemory()
	if usable == 0 {
		return finding{"memory", "not known", ""}
	}
	f := finding{"memory", readable.Bytes(total), ""}
	if usable < total {
		f.value += ", of which this cgroup may use " + readable.Bytes(usable)
	}
	return f
}

// exchanges is what ranks of this node exchange large messages by.
func exchanges() finding {
	if err := comm.SharesMemory(); err != nil {
		return finding{"exchanges", "of this node's ranks by Unix sockets, since they can share no memory: " +
			err.Error(), ""}
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
		f.fix = fmt.Sprintf("raise the limit to %d or more: ulimit -Hn %d, or nofile in /etc/security/limits.conf",
			enoughFiles, enoughFiles)
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
