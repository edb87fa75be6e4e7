// Package train is the training loop: data, forward, backward, reduction, step, metrics,
// checkpoint, over ranks that share sequences (context parallel) and groups of such ranks
// that share batches (data parallel). It runs the same on every rank; only output differs.
package train

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/optim"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels"
)

// View is a strided window onto device memory; see internal/tensor.
type View = tensor.View

// Device is what a rank computes on. Everything in it queues on Stream.
type Device struct {
	Name   string
	Stream *tensor.HostStream
	Ops    model.Ops
	Kernel attention.Kernel
	Optim  optim.Device
	Alloc  func(bytes int64) tensor.Memory
	// PeakTFLOPs is the rate that MFU is a share of; 0: not known.
	PeakTFLOPs float64
}

// CPU is the host as a device. The backend is flash, or reference, the slow definition of
// attention that flash is checked against.
func CPU(stream *tensor.HostStream, backend string) Device {
	cpu := kernels.NewCPU(stream)
	d := Device{
		Name: "cpu", Stream: stream, Ops: cpu, Kernel: cpu, Optim: cpu,
		Alloc: func(n int64) tensor.Memory { return tensor.NewHost(n) },
	}
	if backend == "reference" {
		d.Kernel = attention.NewReference[float64](stream.Do)
	}
	return d
}
