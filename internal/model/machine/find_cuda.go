//go:build cuda

package machine

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/internal/base/cuda/driver"
	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
	"github.com/cprun/cprun/internal/base/nccl"
	"github.com/cprun/cprun/internal/model/backends"
)

// Built reports whether this binary can use GPUs.
const Built = true

// Find probes the GPUs and cuDNN of this machine without using a GPU. Without a driver it returns ErrNoDriver.
func Find() (Machine, []GPU, error) {
	infos, err := cuda.Probe()
	if err != nil {
		return Machine{}, nil, err
	}
	gpus := make([]GPU, len(infos))
	for i, d := range infos {
		gpus[i] = GPU{Ordinal: d.Ordinal, Name: d.Name, Arch: d.Arch, SMs: d.SMs, Memory: d.Memory, Peers: d.Peers}
	}
	m, err := machineOf(gpus)
	if err != nil || len(gpus) == 0 {
		return m, gpus, err
	}
	if v, err := dnn.Version(); err == nil { // other backends do not need it
		m.CUDNN = backends.Version(v)
	}
	return m, gpus, nil
}

// Libraries lists the libraries of a run on GPUs.
func Libraries() []Library {
	var list []Library
	add := func(name, version string, err error) {
		l := Library{Name: name, Version: version}
		if err != nil {
			l = Library{Name: name, Problem: err.Error()}
		}
		list = append(list, l)
	}
	driven, err := driver.Version()
	c, missing := nvrtc.Open()
	version := ""
	if missing == nil {
		version = c.Version() + " in " + c.Path()
		if major, _, _ := strings.Cut(c.Version(), "."); err == nil && driven < major {
			err = fmt.Errorf("for CUDA %s, it cannot load kernels of NVRTC %s; update the driver", driven, c.Version())
		}
	}
	add("CUDA driver", "for CUDA "+driven, err)
	add("NVRTC", version, missing)
	v, err := dnn.Version()
	add("cuDNN", backends.Version(v).String(), err)
	v, err = blas.Version()
	add("cuBLASLt", backends.Version(v).String(), err)
	v, err = nccl.Version()
	add("NCCL", nccl.VersionText(v), err)
	return list
}
