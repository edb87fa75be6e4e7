// Package machine describes the hardware: Find probes the GPUs and libraries of this machine, and Assume builds a
// Machine from --assume flags, with memory, links and published rates.
package machine

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/base/cuda/driver"
	"github.com/cprun/cprun/internal/model/backends"
)

// A Machine holds the facts about one device that decide the backend and the step time.
type Machine struct {
	Name   string           // of a GPU, from its driver or a Card; "": unknown
	Arch   int              // 10 times the compute capability; 0: a CPU
	CUDNN  backends.Version // 0: not installed
	Flash  backends.Version // of the CUDA kernels; 0: not built. A CPU always has its own.
	GPUs   int              // of one host; 0: unknown
	Hosts  int              // with the ranks of the run; 0: one
	Memory int64            // bytes of one device, on a CPU of all ranks of a host; 0: unknown
	Link   int64            // bytes a second that one device sends; 0: unknown
	Net    int64            // bytes a second that one device sends to other hosts; 0: unknown
	RAM    int64            // bytes of host memory that the ranks of one host may use; 0: unknown
	Locked int64            // bytes of it that they may pin; 0: all
	// Assumed: from --assume, not probed.
	Assumed bool
}

// BuiltFlash is the version of the CUDA kernels in this source. They are compiled for the GPU at run time.
var BuiltFlash = backends.V(1, 0, 0)

// CPU returns a machine without a GPU.
func CPU() Machine { return Machine{} }

// MultipliesE4M3 reports whether products in E4M3 with a factor for each row run: cuBLASLt has them for sm90 alone.
func (m Machine) MultipliesE4M3() bool { return m.IsCPU() || m.Arch == 90 }

// IsCPU reports whether the ranks share the cores of a CPU.
func (m Machine) IsCPU() bool { return m.Arch == 0 }

// Device returns the device name of config.Options.
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

// PerHost returns the largest number of ranks on one host.
func (m Machine) PerHost(ranks int) int {
	hosts := max(1, m.Hosts)
	return (ranks + hosts - 1) / hosts
}

// HostMemory returns the memory of one host for offloaded state, and the part of it that stays free; 0: unknown. On a
// CPU it is Memory.
func (m Machine) HostMemory() (all, reserve int64) {
	if all = m.RAM; m.IsCPU() {
		return 0, 0
	}
	if all == 0 && m.Assumed {
		all = 1 << 40
	}
	if all > 0 {
		reserve = min(all, max(all/10, 8<<30))
	}
	return all, reserve
}

// HostRate returns the bytes a second of copies between a device and its host, in each direction while both are busy
// (scripts/experiments/host.py): 40 GB/s for one GPU, 36 for each of two, 20 for each of four.
func (m Machine) HostRate(ranks int) float64 {
	switch n := m.PerHost(ranks); {
	case n > 2:
		return 20e9
	case n == 2:
		return 36e9
	}
	return 40e9
}

// Flag returns the --assume value for the machine.
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
	}{{"gpus", int64(m.GPUs)}, {"hosts", int64(m.Hosts)}, {"memory", m.Memory}, {"link", m.Link}, {"net", m.Net},
		{"ram", m.RAM}} {
		if f.n != 0 {
			add("%s=%d", f.name, f.n)
		}
	}
	return strings.Join(parts, ",")
}

// ErrNoDriver reports that this binary can use GPUs, but the machine has no driver for them.
var ErrNoDriver = driver.ErrAbsent

// GPU is a GPU of this machine.
type GPU struct {
	Ordinal int
	Name    string
	Arch    int // 10 times the compute capability
	SMs     int
	Memory  int64 // bytes
	Peers   []int // GPUs with memory access from this one
}

// Library is a library used by runs on GPUs.
type Library struct {
	Name    string
	Version string // "" if unusable
	Problem string // the reason
}

// machineOf returns the common capabilities of several GPUs.
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
