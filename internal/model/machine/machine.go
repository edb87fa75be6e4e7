// Package machine describes the hardware: the GPUs and libraries that are found here, or a
// machine that --assume describes, with its memory, links and published rates.
package machine

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/base/cuda/driver"
	"github.com/cprun/cprun/internal/model/backends"
)

// A Machine holds the facts about one device that decide the backend and the time of a step.
type Machine struct {
	Name   string           // of a GPU, as its driver or a Card has it; "": not said
	Arch   int              // 10 times the compute capability; 0: a CPU
	CUDNN  backends.Version // 0: not there
	Flash  backends.Version // of the CUDA kernels; 0: not built. A CPU always has its own.
	GPUs   int              // of one host; 0: not said
	Hosts  int              // of this kind, that the ranks are spread over; 0: one
	Memory int64            // bytes of one device, of a CPU those that all ranks of a host share; 0: not said
	Link   int64            // bytes a second that one device sends; 0: not said
	Net    int64            // bytes a second that one device sends to other hosts; 0: not said
	// Assumed: described by --assume, not looked at.
	Assumed bool
}

// BuiltFlash is the version of the CUDA kernels of this source, which are compiled for the
// GPU found.
var BuiltFlash = backends.V(1, 0, 0)

// CPU returns a machine without a GPU.
func CPU() Machine { return Machine{} }

// IsCPU reports whether the ranks share the cores of a CPU.
func (m Machine) IsCPU() bool { return m.Arch == 0 }

// Device returns the machine as config.Options calls it.
func (m Machine) Device() string {
	if m.IsCPU() {
		return "cpu"
	}
	return "cuda"
}

func (m Machine) String() string {
	if m.IsCPU() {
		return "a CPU"
	}
	flash := "no flash kernels"
	if m.Flash != 0 {
		flash = "flash kernels"
	}
	cudnn := "no cuDNN"
	if m.CUDNN != 0 {
		cudnn = "cuDNN " + m.CUDNN.String()
	}
	name := fmt.Sprintf("sm%d", m.Arch)
	if m.Assumed && m.Name != "" {
		name = m.Name + ", " + name
	}
	return fmt.Sprintf("%s, %s, %s", name, cudnn, flash)
}

// PerHost returns the most ranks that one host has.
func (m Machine) PerHost(ranks int) int {
	hosts := max(1, m.Hosts)
	return (ranks + hosts - 1) / hosts
}

// Flag returns the value of --assume that describes the machine.
func (m Machine) Flag() string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch {
	case m.IsCPU() && m.GPUs == 0:
		add("arch=cpu")
	case !m.IsCPU():
		if card, ok := CardOf(m.Name); ok && m.Assumed {
			add("gpu=%s", card.Key)
		} else {
			add("arch=sm%d", m.Arch)
		}
		add("cudnn=%s", m.CUDNN)
		if m.Flash != 0 {
			add("flash=built")
		} else {
			add("flash=none")
		}
	}
	for _, f := range []struct {
		name string
		n    int64
	}{{"gpus", int64(m.GPUs)}, {"hosts", int64(m.Hosts)}, {"memory", m.Memory}, {"link", m.Link}, {"net", m.Net}} {
		if f.n != 0 {
			add("%s=%d", f.name, f.n)
		}
	}
	return strings.Join(parts, ",")
}

// ErrNoDriver says that this binary could use GPUs, and the machine has no driver for them.
var ErrNoDriver = driver.ErrAbsent

// GPU is a GPU of this machine.
type GPU struct {
	Ordinal int
	Name    string
	Arch    int // 10 times the compute capability
	SMs     int
	Memory  int64 // bytes
	Peers   []int // it reaches the memory of these GPUs
}

// Library is a library that a run on GPUs loads.
type Library struct {
	Name    string
	Version string // "" if it cannot be used
	Problem string // why not
}

// machineOf returns the common part of GPUs: ranks must be able to do what the least of them can.
func machineOf(gpus []GPU) (Machine, error) {
	if len(gpus) == 0 {
		return Machine{}, nil
	}
	m := Machine{Name: gpus[0].Name, Arch: gpus[0].Arch, GPUs: len(gpus), Memory: gpus[0].Memory, Flash: BuiltFlash}
	for _, g := range gpus {
		if g.Arch != m.Arch {
			return m, fmt.Errorf("GPU 0 is a %s (sm%d) and GPU %d a %s (sm%d); choose GPUs of one kind with "+
				"CUDA_VISIBLE_DEVICES", gpus[0].Name, m.Arch, g.Ordinal, g.Name, g.Arch)
		}
		m.Memory = min(m.Memory, g.Memory)
	}
	return m, nil
}
