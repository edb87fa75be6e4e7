package command

import (
	"cmp"
	"errors"
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
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A finding is one line of the report; a fix makes it a problem.
type finding struct {
	what, value, fix string
}

// maxSet bounds the listed variables without --verbose.
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
	return limit("open files", unix.RLIMIT_NOFILE, func(l unix.Rlimit) uint64 { return l.Max }, "",
		"-Hn %d, or nofile in /etc/security/limits.conf")
}

func processes() finding {
	return limit("processes", unix.RLIMIT_NPROC, func(l unix.Rlimit) uint64 { return l.Cur },
		" threads and processes of this user", "-u %d")
}

func limit(what string, resource int, of func(unix.Rlimit) uint64, unit, flag string) finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(resource, &l); err != nil {
		return finding{what, "not known: " + err.Error(), ""}
	}
	most := of(l)
	if most == unix.RLIM_INFINITY {
		return finding{what, "no limit", ""}
	}
	f := finding{what, fmt.Sprintf("at most %d%s", most, unit), ""}
	if most < enoughFiles {
		f.fix = fmt.Sprintf("raise the limit to %d or more: ulimit "+flag, enoughFiles, enoughFiles)
	}
	return f
}

func temp() finding {
	dir, err := os.MkdirTemp("", "cprun-doctor-")
	if err != nil {
		return finding{"temporary", err.Error(), "point TMPDIR at a directory that this user may write to"}
	}
	defer os.Remove(dir)
	return finding{"temporary", filepath.Dir(dir) + " can be written", ""}
}

var doctorRuns = []struct {
	name   string
	change func(r *backend.Request)
}{
	{"causal, 32:8 heads, head dim 128, training, ring over 8", func(*backend.Request) {}},
	{"one rank", func(r *backend.Request) { r.Ranks = 1 }},
	{"all-gather instead of a ring", func(r *backend.Request) { r.Algorithm = "allgather" }},
	{"q/k head dim 192, v 128", func(r *backend.Request) { r.HeadDim, r.KVHeads = 192, r.Heads }},
	{"sliding window of 4096", func(r *backend.Request) { r.Window = 4095 }},
	{"packed documents", func(r *backend.Request) { r.Documents, r.Layout = true, "document" }},
	{"deterministic", func(r *backend.Request) { r.Deterministic = true }},
}

// attentionReport prints the backend of common runs, kinds with equal backends on one line. If verbose, it also prints
// the rules that reject each unused backend.
func attentionReport(w io.Writer, m machine.Machine, verbose bool) error {
	env, err := launch.Attention()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nattention backends on %s\n", m)
	possible, spoke := map[backends.Backend]bool{}, []backends.Rejection{}
	var order []string
	kinds := map[string][]string{} // by backends
	for _, run := range doctorRuns {
		r := backend.Request{
			Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: ring.Auto},
			DType:    tensor.BF16, Batch: 1, SeqQ: 32768, SeqKV: 32768, Heads: 32, KVHeads: 8,
			HeadDim: 128, HeadDimV: 128, Causal: true, Window: -1, Training: true, Ranks: 8,
		}
		if m.IsCPU() {
			r.DType = tensor.F32 // the type of a CPU
		}
		run.change(&r)
		line := "none"
		c, err := backend.Select(m, backend.Disabled(env.NoFlash, env.NoFused), r)
		var none *backends.NoBackendError
		switch {
		case errors.As(err, &none):
			spoke = append(spoke, none.Rejected...)
		case err != nil:
			return fmt.Errorf("attention rules for %s: %w", run.name, err)
		default:
			line = c.Backend.String()
			var others []string
			for _, b := range c.Layers[0].Able {
				possible[b] = true
				if b != c.Backend {
					others = append(others, b.String())
				}
			}
			if len(others) > 0 {
				line += " (also " + strings.Join(others, ", ") + ")"
			}
			spoke = append(spoke, c.Rejected...)
		}
		if kinds[line] == nil {
			order = append(order, line)
		}
		kinds[line] = append(kinds[line], run.name)
	}
	for _, line := range order {
		fmt.Fprintf(w, "  %s: %s\n", line, strings.Join(kinds[line], "; "))
	}
	said := map[string]bool{}
	for _, r := range spoke {
		if verbose && !possible[r.Backend] && !said[r.Rule] {
			said[r.Rule] = true
			fmt.Fprintf(w, "  not %s, %s: %s\n    fix: %s\n", r.Backend, r.Rule, r.Reason, r.Fix)
		}
	}
	return nil
}

func gpus() ([]finding, machine.Machine) {
	devices := deviceFiles()
	if !machine.Built {
		if devices == 0 {
			return []finding{{"GPUs", "none; runs go to the CPU", ""}}, machine.CPU()
		}
		return []finding{{"GPUs", fmt.Sprintf("%d, which this binary cannot use: it was built for the CPU", devices),
			""}}, machine.CPU()
	}
	m, list, err := machine.Find()
	switch {
	case errors.Is(err, machine.ErrNoDriver) && devices == 0:
		return []finding{{"GPUs", fmt.Sprintf("none; runs go to the CPU\nto use GPUs: %v", err), ""}}, machine.CPU()
	case errors.Is(err, machine.ErrNoDriver):
		return []finding{{"GPUs", fmt.Sprintf("%d, without a driver that can be loaded", devices),
			err.Error() + "; in a container, have its libraries mounted; or run with --device cpu"}}, machine.CPU()
	case err != nil:
		return []finding{{"GPUs", err.Error(),
				"look at nvidia-smi; choose GPUs of one kind with CUDA_VISIBLE_DEVICES, or run with --device cpu"}},
			machine.CPU()
	case len(list) == 0:
		return []finding{{"GPUs", "none is seen; runs go to the CPU", ""}}, machine.CPU()
	}
	out := cards(list)
	out = append(out, links(list))
	for _, l := range machine.Libraries() {
		f := finding{l.Name, l.Version, ""}
		if l.Problem != "" { // the text of the loader names the fix
			f = finding{l.Name, "cannot be used", l.Problem}
		}
		out = append(out, f)
	}
	return out, m
}

func cards(list []machine.GPU) (out []finding) {
	first := 0
	for _, g := range list {
		f := finding{fmt.Sprintf("GPU %d", g.Ordinal), fmt.Sprintf("%s, sm%d, %d SMs, %s", g.Name, g.Arch, g.SMs,
			readable.Bytes(g.Memory)), ""}
		if n := len(out); n > 0 && out[n-1].value == f.value {
			out[n-1].what = fmt.Sprintf("GPUs %d to %d", first, g.Ordinal)
			continue
		}
		first, out = g.Ordinal, append(out, f)
	}
	return out
}

// deviceFiles counts the GPUs that the system has made files for, which takes no driver's library.
func deviceFiles() int {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is right
	return len(files)
}

func links(list []machine.GPU) finding {
	if len(list) == 1 {
		return finding{"links", "one GPU", ""}
	}
	var without []string
	for _, g := range list {
		if len(g.Peers) < len(list)-1 {
			without = append(without, fmt.Sprintf("GPU %d reaches %d of %d others", g.Ordinal, len(g.Peers),
				len(list)-1))
		}
	}
	if len(without) == 0 {
		return finding{"links", "every GPU reaches the memory of every other", ""}
	}
	return finding{"links", strings.Join(without, "; ") + ": transfers between the rest go through the host's " +
		"memory, by NCCL", ""}
}

func indented(s string) string { return strings.ReplaceAll(s, "\n", "\n                        ") }
