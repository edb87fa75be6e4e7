// Package command implements the commands of cprun on the launcher's side. A command checks all input before it
// spawns a process, prepares the workers' task, runs them, shows their progress, and reports the end. Train is the
// largest one.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/kernels/cpu"
)

// InputError is a fault Err of the user's input, found before any process is spawned. The exit status is 2.
type InputError struct{ Err error }

func (e *InputError) Error() string { return e.Err.Error() }

func (e *InputError) Unwrap() error { return e.Err }

func inputf(format string, args ...any) error { return &InputError{fmt.Errorf(format, args...)} }

// Options are the flags that commands share.
type Options struct {
	NProc      string // a number, or auto
	Device     string // auto, cpu, cuda
	NNodes     string // N or MIN:MAX; "": from another launcher such as srun, else 1
	NodeRank   int    // -1: any
	Rendezvous string // host:port; "": from the launcher
	// Interface is an address of this host, a network, or an interface; "": the fastest towards the rendezvous.
	Interface   string
	MaxRestarts int
	Quiet       bool
	LogLevel    string // error, warn, info, debug

	// machine is the machine of the run, found by resolve: a GPU, or the CPU.
	machine machine.Machine

	Stdout io.Writer // keeps its own errors
	Stderr *os.File
	// Costs returns the known costs of a machine for a number of ranks; nil: auto follows the rules of package
	// config. Without Costs a command reads the user's own table, or the one that ships for this very device.
	Costs func(m machine.Machine, ranks, perHost int) planner.Costs
	// Version is the program's, for checkpoints.
	Version string
}

// spawns works like resolve, for commands that start processes on one node.
func (o *Options) spawns() (ranks int, err error) {
	if err := o.OneNode(); err != nil {
		return 0, err
	}
	return o.resolve()
}

func (o *Options) resolve() (ranks int, err error) {
	if err := launch.CheckLimits(); err != nil {
		return 0, err
	}
	if o.machine, err = found(o.Device); err != nil {
		return 0, err
	}
	if o.MaxRestarts < 0 {
		return 0, inputf("--max-restarts %d: want 0 or more", o.MaxRestarts)
	}
	if _, ok := levels[o.LogLevel]; !ok {
		return 0, inputf("--log-level %q: want error, warn, info or debug", o.LogLevel)
	}
	if o.NProc == "auto" {
		return max(1, o.machine.GPUs), nil
	}
	if ranks, err = Processes(o.NProc); err != nil {
		return 0, err
	}
	if n := o.machine.GPUs; n > 0 && ranks > n {
		return 0, inputf("--nproc %d: one process runs on each GPU, and this machine has %d; drop the flag, or "+
			"pass --device cpu", ranks, n)
	}
	if most := MaxProcs(); ranks > most {
		return 0, inputf("--nproc %d: this machine with %d cores runs at most %d processes", ranks,
			runtime.NumCPU(), most)
	}
	return ranks, nil
}

func found(device string) (machine.Machine, error) {
	switch device {
	case "cpu":
		return onCPU(), nil
	case "auto", "cuda":
	default:
		return machine.Machine{}, inputf("--device %q: want auto, cpu or cuda", device)
	}
	m, gpus, err := machine.Find()
	switch {
	case device == "cuda" && !machine.Built:
		return m, inputf("--device cuda: this binary was built without CUDA; build it with make cuda, or pass " +
			"--device cpu")
	case device == "auto" && errors.Is(err, machine.ErrNoDriver) && deviceFiles() == 0:
		return onCPU(), nil // a login node, or a container without GPUs
	case err != nil:
		return m, inputf("--device %s: %w; for details run cprun doctor, or pass --device cpu", device, err)
	case device == "cuda" && len(gpus) == 0:
		return m, inputf("--device cuda: the driver lists no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass " +
			"--device cpu")
	case m.IsCPU():
		return onCPU(), nil
	}
	_, m.RAM = launch.HostMemory()
	m.Locked, _ = launch.LockedMemory()
	return m, nil
}

func onCPU() machine.Machine {
	m := machine.CPU()
	_, m.Memory = launch.HostMemory()
	return m
}

// Processes returns the number of --nproc, if it is not auto.
func Processes(nproc string) (int, error) {
	n, err := strconv.Atoi(nproc)
	if err != nil || n < 1 {
		return 0, inputf("--nproc %q: want a number of at least 1, or auto", nproc)
	}
	return n, nil
}

// levels orders the output: only failures at error, the output of all ranks at debug.
var levels = map[string]int{"error": 0, "warn": 1, "info": 2, "debug": 3}

// MaxProcs bounds --nproc: a typo such as 10000 would bring the machine down.
func MaxProcs() int { return max(64, 8*runtime.NumCPU()) }

func (o *Options) show() launch.Show {
	switch {
	case o.Quiet || levels[o.LogLevel] < levels["info"]:
		return launch.ShowNone
	case o.LogLevel == "debug":
		return launch.ShowAll
	}
	return launch.ShowFirst
}

// Printer returns the printer of notes on standard error.
func (o *Options) Printer() *progress.Printer {
	return progress.New(o.Stderr, progress.Options{
		Quiet:    o.Quiet || levels[o.LogLevel] < levels["info"],
		Terminal: launch.Terminal(o.Stderr),
	})
}

// runWorkers runs a role on the ranks of one node, after printing notes. event receives the workers' reports. The logs
// are in a temporary directory, which is kept if the command fails.
func (o *Options) runWorkers(ctx context.Context, role job.Role, ranks int, notes []string, task any,
	event func(out *progress.Printer, e launch.Event)) (launch.Result, error) {
	dir, err := newScratch("cprun-" + string(role) + "-")
	if err != nil {
		return launch.Result{}, err
	}
	out := o.Printer()
	for _, line := range notes {
		out.Note(line)
	}
	res := launch.Run(ctx, launch.Job{
		NProc: ranks, Argv: []string{"worker", string(role)}, Logs: dir.root, Payload: payload(task),
		Stderr: out, Show: o.show(),
		OnEvent: func(_ int, e launch.Event) { event(out, e) }, Stateless: true,
	})
	out.Close()
	dir.end(res.ExitCode)
	return res, nil
}

// report does what runWorkers does, prints notices and output, and decodes the report of rank 0 into to; nil: there is
// none.
func (o *Options) report(ctx context.Context, role job.Role, ranks int, notes []string, task any,
	to any) (launch.Result, error) {
	var data []byte
	res, err := o.runWorkers(ctx, role, ranks, notes, task, func(out *progress.Printer, e launch.Event) {
		var text string
		switch {
		case e.Kind == job.EventReport:
			data = e.Data
		case e.Kind == job.EventNotice && json.Unmarshal(e.Data, &text) == nil:
			out.Note(text)
		case e.Kind == job.EventOutput && json.Unmarshal(e.Data, &text) == nil:
			io.WriteString(o.Stdout, text)
		}
	})
	switch {
	case err != nil || res.ExitCode != launch.ExitDone:
		return res, errors.Join(err, res.Err)
	case to != nil:
		if err = json.Unmarshal(data, to); err != nil {
			err = fmt.Errorf("rank 0's report: %w", err)
		}
	}
	return res, err
}

func printJSON(w io.Writer, v any) error { return files.WriteJSON(terminal.JSON(w), "  ", v) }

func payload(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("command: payload of plain fields: " + err.Error())
	}
	return b
}

// UseEnvironment takes the cache of models and the instruction set of the CPU kernels from the environment. An error is
// an InputError.
func UseEnvironment() error {
	hf.Hub = launch.HubCache()
	if err := cpu.Use(launch.Getenv(launch.EnvCPU)); err != nil {
		return inputf("%s: %w; unset it for the best that this machine has", launch.EnvCPU, err)
	}
	return nil
}

// scratch is the temporary directory of a command.
type scratch struct {
	path string
	root *os.Root
}

func newScratch(prefix string) (*scratch, error) {
	path, err := os.MkdirTemp("", prefix)
	if err != nil {
		return nil, inputf("temporary directory: %w; set TMPDIR to a directory that you may write to", err)
	}
	root, err := files.OpenDir(path)
	if err != nil {
		os.RemoveAll(path)
		return nil, fmt.Errorf("temporary directory: %w", err)
	}
	return &scratch{path, root}, nil
}

// end removes the directory. If the command failed, it stays, since the report names its logs.
func (s *scratch) end(status int) error {
	s.root.Close()
	if status == launch.ExitFailed {
		return nil
	}
	return os.RemoveAll(s.path)
}
