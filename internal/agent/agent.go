// Package agent is what the commands of cprun do on the launcher's side: it checks all input
// before any process is spawned, prepares what the workers need, runs them, shows their
// progress, and says how it ended.
package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"

	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
)

// InputError is a fault of the user's input, found before any process was spawned: exit
// status 2.
type InputError struct{ Err error }

func (e *InputError) Error() string { return e.Err.Error() }

func (e *InputError) Unwrap() error { return e.Err }

func inputf(format string, args ...any) error { return &InputError{fmt.Errorf(format, args...)} }

// Options are the flags that commands share.
type Options struct {
	NProc       string // a number, or auto
	Device      string // auto, cpu, cuda
	NNodes      string // of this build: 1, or a range from 1 on
	NodeRank    int
	Rendezvous  string
	MaxRestarts int
	Quiet       bool
	LogLevel    string // error, warn, info, debug

	// machine is what runs, found by resolve: a GPU, or the CPU.
	machine backend.Machine

	Stdout io.Writer
	Stderr *os.File
	// Version is the program's, for checkpoints.
	Version string
}

// resolve checks the flags and counts the ranks.
func (o *Options) resolve() (ranks int, device string, err error) {
	if o.machine, err = found(o.Device); err != nil {
		return 0, "", err
	}
	device = o.machine.Device()
	if o.MaxRestarts < 0 {
		return 0, "", inputf("--max-restarts %d: want 0 or more", o.MaxRestarts)
	}
	if _, ok := levels[o.LogLevel]; !ok {
		return 0, "", inputf("--log-level %q: want error, warn, info or debug", o.LogLevel)
	}
	if err := o.oneNode(); err != nil {
		return 0, "", err
	}
	if o.NProc == "auto" {
		return max(1, o.machine.GPUs), device, nil // one for each GPU, and one on a machine without
	}
	if ranks, err = count(o.NProc); err != nil {
		return 0, "", err
	}
	if n := o.machine.GPUs; n > 0 && ranks > n {
		return 0, "", inputf("--nproc %d: one process runs on each GPU, and this machine has %d; leave the flag out, or write --device cpu", ranks, n)
	}
	if most := maxProcs(); ranks > most {
		return 0, "", inputf("--nproc %d: at most %d processes are started on this machine with %d cores", ranks, most, runtime.NumCPU())
	}
	return ranks, device, nil
}

// found is the machine that --device means, with its GPUs where those are used.
func found(device string) (backend.Machine, error) {
	switch device {
	case "cpu":
		return onCPU(), nil
	case "auto", "cuda":
	default:
		return backend.Machine{}, inputf("--device %q: want auto, cpu or cuda", device)
	}
	m, gpus, err := backend.Find()
	switch {
	case device == "cuda" && !backend.Built:
		return m, inputf("--device cuda: this binary has no CUDA in it; build it with make cuda, leave the flag out, or write --device cpu")
	case err != nil:
		return m, inputf("--device %s: %w; cprun doctor says more, and --device cpu does without", device, err)
	case device == "cuda" && len(gpus) == 0:
		return m, inputf("--device cuda: no GPU is seen; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or write --device cpu")
	case m.Arch == 0:
		return onCPU(), nil
	}
	return m, nil
}

// onCPU is this machine, without GPUs.
func onCPU() backend.Machine {
	m := backend.CPU()
	_, m.Memory = launch.HostMemory()
	return m
}

func count(nproc string) (int, error) {
	n, err := strconv.Atoi(nproc)
	if err != nil || n < 1 {
		return 0, inputf("--nproc %q: want a number of processes of at least 1, or auto", nproc)
	}
	return n, nil
}

// levels orders what is shown: at error nothing but failures, at debug the output of all
// ranks.
var levels = map[string]int{"error": 0, "warn": 1, "info": 2, "debug": 3}

// maxProcs bounds a typing error such as --nproc 10000, which would take a machine down.
func maxProcs() int { return max(64, 8*runtime.NumCPU()) }

func (o *Options) show() launch.Show {
	switch {
	case o.Quiet || levels[o.LogLevel] < levels["info"]:
		return launch.ShowNone
	case o.LogLevel == "debug":
		return launch.ShowAll
	}
	return launch.ShowFirst
}

func (o *Options) printer() *progress.Printer {
	return progress.New(o.Stderr, progress.Options{
		Quiet:    o.Quiet || levels[o.LogLevel] < levels["info"],
		Terminal: launch.Terminal(o.Stderr),
	})
}

// Role is what a worker is spawned to do.
type Role string

// The roles, which are arguments of the hidden command `cprun worker`.
const (
	RoleTrain     Role = "train"
	RoleAttention Role = "attention"
	RoleBench     Role = "bench"
)

// payload is JSON for the workers.
func payload(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("agent: payload of plain fields: " + err.Error())
	}
	return b
}
