// Package train implements the training loop: data, forward, backward, gradient reduction, optimizer step, metrics,
// checkpoint. Ranks share sequences (context parallel), and groups of such ranks share batches (data parallel). Run
// trains with the same code on every rank and device; a Trainer is one rank's part:
//
//	stopped, err := train.Run(ctx, cfg, dev, world, train.Options{RunDir: dir, ConfigYAML: text})
//
// Eval computes the loss without training.
package train

import (
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Float is a number or absent; see package metrics.
type Float = metrics.Float

// Device is a rank's device; see package device.
type Device = device.Device
