// Package train is the training loop: data, forward, backward, reduction, step, metrics,
// checkpoint, over ranks that share sequences (context parallel) and groups of such ranks
// that share batches (data parallel). It runs the same on every rank and on any device; only
// output differs.
package train

import (
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Float is a number that may be absent; see package metrics.
type Float = metrics.Float

// Device is what a rank computes on.
type Device = device.Device
