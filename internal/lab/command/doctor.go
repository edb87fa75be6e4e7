package command

import (
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
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A finding is one line of the report. With a fix it is a problem, with advice a warning.
type finding struct {
	what, value, fix, advice string
}

// mark returns the first word of the line.
func (f *finding) mark() string {
	switch {
	case f.fix != "":
		return "PROBLEM"
	case f.advice != "":
		return "WARNING"
	}
	return "ok"
}

// maxSet bounds the listed variables without --verbose.
const maxSet = 10

// Doctor prints whether this machine is ready to train, each problem with its fix, and the hardware and limits. Verbose
// adds unset variables and rejected backends. The status is 1 if there is a problem.
func Doctor(w io.Writer, verbose bool) (int, error) {
	gpus, machine := gpus()
	findings := slices.Concat([]finding{cores(), memory()}, gpus, []finding{
		exchanges(),
		limit("open files", unix.RLIMIT_NOFILE, func(l unix.Rlimit) uint64 { return l.Max }, "",
			"-Hn %d, or nofile in /etc/security/limits.conf"),
		limit("processes", unix.RLIMIT_NPROC, func(l unix.Rlimit) uint64 { return l.Cur },
			" of this user, threads included", "-u %d"),
		temp(),
		tokenCache(),
	})
	var b strings.Builder
	if f := attentionReport(&b, machine, verbose); f.value != "" {
		findings = append(findings, f)
	}
	variables(&b, verbose)
	var lines, top string
	names := map[string][]string{}
	for _, mark := range []string{"PROBLEM", "WARNING", "ok"} {
		for _, f := range findings {
			if f.mark() != mark {
				continue
			}
			names[mark] = append(names[mark], f.what)
			lines += fmt.Sprintf("%-8s %-12s %s\n", mark, f.what, indented(f.value))
			if fix := f.fix + f.advice; fix != "" {
				lines += fmt.Sprintf("         %-12s %s\n", "fix:", indented(fix))
			}
		}
	}
	status := 0
	if bad := names["PROBLEM"]; len(bad) > 0 {
		top, status = counted(bad, "problem"), 1
	} else {
		top = "ready to train on " + machine.String()
		if machine.IsCPU() {
			top = fmt.Sprintf("ready to train on %d CPU cores", runtime.NumCPU())
		} else if machine.GPUs > 1 {
			top = fmt.Sprintf("ready to train on %d GPUs (%s)", machine.GPUs, machine)
		}
	}
	if odd := names["WARNING"]; len(odd) > 0 {
		top += "; " + counted(odd, "warning")
	}
	if status == 0 {
		top += "\nto start: cprun --nproc 4 examples/opticks.yaml"
	}
	if !verbose {
		b.WriteString("\nmore: --verbose (unset variables, rejected backends)\n")
	}
	columns := terminal.Columns()
	_, err := io.WriteString(w, terminal.Wrap(top+"\n\n", columns, 2)+terminal.Wrap(lines, columns, 22)+
		terminal.Wrap(b.String(), columns, 4))
	return status, err
}

func counted(names []string, what string) string {
	return readable.Counted(len(names), what) + ": " + strings.Join(names, ", ")
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
	b.WriteString("\nenvironment variables set\n")
	for _, v := range all[:min(len(all), maxSet)] {
		fmt.Fprintf(b, "  %-20s %s\n", v.Name, terminal.Clip(fmt.Sprintf("%q", v.Value), 56))
	}
	if more := len(all) - maxSet; more > 0 {
		fmt.Fprintf(b, "  and %d more\n", more)
	}
}

func cores() finding {
	used, best := cpu.Instructions()
	f := finding{what: "cores", value: fmt.Sprintf("%d, %s/%s, %s kernels, %s", runtime.NumCPU(), runtime.GOOS,
		runtime.GOARCH, used, runtime.Version())}
	if used != best {
		f.advice = fmt.Sprintf("unset %s: this machine has %s", launch.EnvCPU, best)
	}
	return f
}

func memory() finding {
	total, usable := launch.HostMemory()
	if usable == 0 {
		return finding{what: "memory", value: "not known"}
	}
	f := finding{what: "memory", value: readable.Bytes(total)}
	if usable < total {
		f.value = fmt.Sprintf("%s in this cgroup, %s in all", readable.Bytes(usable), f.value)
	}
	return f
}

func exchanges() finding {
	if err := comm.SharesMemory(); err != nil {
		return finding{what: "exchanges", value: "over Unix sockets, since ranks cannot share memory: " + err.Error(),
			advice: "allow memfd_create; until then transfers between ranks are slower"}
	}
	return finding{what: "exchanges", value: "over shared memory (memfd), small ones over Unix sockets"}
}

// enoughFiles covers the sockets between ranks, logs and data files.
const enoughFiles = 1024

func limit(what string, resource int, of func(unix.Rlimit) uint64, unit, flag string) finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(resource, &l); err != nil {
		return finding{what: what, value: "not known: " + err.Error()}
	}
	most := of(l)
	if most == unix.RLIM_INFINITY {
		return finding{what: what, value: "no limit"}
	}
	f := finding{what: what, value: fmt.Sprintf("at most %d%s", most, unit)}
	if most < enoughFiles {
		f.fix = fmt.Sprintf("raise the limit to %d or more: ulimit "+flag, enoughFiles, enoughFiles)
	}
	return f
}

func temp() finding {
	dir, err := os.MkdirTemp("", "cprun-doctor-")
	if err != nil {
		return finding{what: "temporary", value: err.Error(),
			fix: "point TMPDIR at a directory that this user may write to"}
	}
	defer os.Remove(dir)
	return finding{what: "temporary", value: filepath.Dir(dir) + " is writable"}
}

// tokenCache reports the size of the default token cache. Entries stay until the user deletes them.
func tokenCache() finding {
	dir, size := (&config.Data{}).TokenCache().Dir, int64(0)
	filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil {
			return nil // no entries yet, or one that ends now
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			size += info.Size()
		}
		return nil
	})
	f := finding{what: "token cache", value: fmt.Sprintf("%s in %s", readable.Bytes(size), dir)}
	if size > 0 {
		f.value += fmt.Sprintf("; to free it between runs: rm -r %q", dir)
	}
	return f
}

// attentionReport prints the backends that can run causal training, the preferred one first. If verbose, it also prints
// the rules that reject the others. It returns a problem; its zero value: there is none.
func attentionReport(w io.Writer, m machine.Machine, verbose bool) (problem finding) {
	env, err := launch.Attention()
	if err != nil {
		return finding{what: "attention", value: err.Error(), fix: "correct the variable"}
	}
	r := backend.Request{
		Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: ring.Auto},
		Params: backends.Params{
			DType: tensor.BF16, Batch: 1, SeqQ: 32768, SeqKV: 32768, Heads: 32, KVHeads: 8,
			HeadDim: 128, HeadDimV: 128, Causal: true, WindowLeft: -1, Training: true, ContextSize: 8,
		},
	}
	if m.IsCPU() {
		r.DType = tensor.F32 // the type of a CPU
	}
	c, err := backend.Select(m, backend.Disabled(env.NoFlash, env.NoFused), r)
	var names []string
	var rejected []backends.Rejection
	if none := (*backends.NoBackendError)(nil); errors.As(err, &none) {
		names, rejected = []string{"none"}, none.Rejected
		problem = finding{what: "attention", value: "no backend can train: " + rejected[0].Reason, fix: rejected[0].Fix}
	} else if err != nil {
		return finding{what: "attention", value: err.Error(), fix: "correct the variable"}
	} else {
		names, rejected = []string{c.Backend.String()}, c.Rejected
		for _, b := range c.Layers[0].Able {
			if b != c.Backend {
				names = append(names, b.String())
			}
		}
	}
	fmt.Fprintf(w, "\nattention backends on %s: %s\n", m, strings.Join(names, ", "))
	for _, r := range rejected {
		if verbose && !slices.Contains(names, r.Backend.String()) {
			fmt.Fprintf(w, "  not %s, %s: %s\n    fix: %s\n", r.Backend, r.Rule, r.Reason, r.Fix)
		}
	}
	return problem
}

func gpus() ([]finding, machine.Machine) {
	devices := deviceFiles()
	if !machine.Built {
		if devices == 0 {
			return []finding{{what: "GPUs", value: "none; runs use the CPU"}}, machine.CPU()
		}
		return []finding{{what: "GPUs", value: fmt.Sprintf("%d, unused: this binary was built for the CPU", devices),
			advice: "build it with make cuda"}}, machine.CPU()
	}
	m, list, err := machine.Find()
	switch {
	case errors.Is(err, machine.ErrNoDriver) && devices == 0:
		return []finding{{what: "GPUs", value: fmt.Sprintf("none; runs use the CPU\nto use GPUs: %v", err)}},
			machine.CPU()
	case errors.Is(err, machine.ErrNoDriver):
		return []finding{{what: "GPUs", value: fmt.Sprintf("%d, but the driver cannot be loaded", devices),
			fix: err.Error() + "; in a container, mount its libraries; or run with --device cpu"}}, machine.CPU()
	case err != nil:
		return []finding{{what: "GPUs", value: err.Error(), fix: "run nvidia-smi; choose GPUs of one kind with " +
			"CUDA_VISIBLE_DEVICES, or run with --device cpu"}}, machine.CPU()
	case len(list) == 0:
		return []finding{{what: "GPUs", value: "the driver lists none; runs use the CPU"}}, machine.CPU()
	}
	out := cards(list)
	out = append(out, links(list))
	for _, l := range machine.Libraries() {
		f := finding{what: l.Name, value: l.Version}
		if l.Problem != "" { // the loader's message contains the fix
			f = finding{what: l.Name, value: "cannot be used", fix: l.Problem}
		}
		out = append(out, f)
	}
	return out, m
}

func cards(list []machine.GPU) (out []finding) {
	first := 0
	for _, g := range list {
		f := finding{what: fmt.Sprintf("GPU %d", g.Ordinal), value: fmt.Sprintf("%s, sm%d, %d SMs, %s", g.Name, g.Arch,
			g.SMs, readable.Bytes(g.Memory))}
		if n := len(out); n > 0 && out[n-1].value == f.value {
			out[n-1].what = fmt.Sprintf("GPUs %d to %d", first, g.Ordinal)
			continue
		}
		first, out = g.Ordinal, append(out, f)
	}
	return out
}

// deviceFiles counts the GPUs by their device files, without the driver's library.
func deviceFiles() int {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is right
	return len(files)
}

func links(list []machine.GPU) finding {
	if len(list) == 1 {
		return finding{what: "links", value: "one GPU"}
	}
	var without []string
	for _, g := range list {
		if len(g.Peers) < len(list)-1 {
			without = append(without, fmt.Sprintf("GPU %d reaches %d of %d others", g.Ordinal, len(g.Peers), len(list)-1))
		}
	}
	if len(without) == 0 {
		return finding{what: "links", value: "every GPU reaches the memory of every other"}
	}
	return finding{what: "links", value: strings.Join(without, "; "),
		advice: "none needed, but slower: the other transfers go through host memory, by NCCL"}
}

func indented(s string) string { return strings.ReplaceAll(s, "\n", "\n                      ") }
