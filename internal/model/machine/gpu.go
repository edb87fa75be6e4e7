package machine

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda/driver"
)

// ErrNoDriver says that this binary could use GPUs, and the machine has no driver for them.
var ErrNoDriver = driver.ErrAbsent

// GPU is a GPU of this machine.
type GPU struct {
	Ordinal int
	Name    string
	Arch    int // 10 times the compute capability
	SMs     int
	Memory  int64 // bytes
	Peers   []int // the GPUs whose memory it reaches
}

// Library is a library that a run on GPUs loads.
type Library struct {
	Name    string
	Version string // "" where it cannot be used
	Problem string // why not
}

// machineOf is what GPUs have in common: ranks must be able to do what the least of them can.
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
