// Package state lays out the memory of a rank's device for a whole run: weights, gradients and
// moments in flat buffers, cut into buckets and the buckets into the ranks' parts, and the memory
// of batches. The training loop allocates it on a device; a plan runs the same code over a Meter.
package state

import (
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Allocator gives memory of a device.
type Allocator interface {
	// Vector returns n elements, uninitialised, that live as long as the device. what names
	// their use in errors, and in the counts of a Meter.
	Vector(what string, t tensor.DType, n int) (View, error)
}

// What memory is for.
const (
	Weights   = "weights"         // float32, for the optimizer
	Compute   = "compute weights" // for the model, if in other memory
	Gradients = "gradients"       // float32, also on the way to other ranks
	Moments   = "moments"         // float32, of the optimizer
	Inputs    = "batches"         // tokens, targets and the tables of rotary embeddings
)

// Meter is an Allocator that counts bytes by their use. Its views have no memory.
type Meter map[string]int64

// Vector counts n elements. It never fails.
func (m Meter) Vector(what string, t tensor.DType, n int) (View, error) {
	m[what] += int64(n) * int64(t.Size())
	return tensor.NewMeter().Alloc(t, n), nil
}

// Room is the memory that a run takes before its first step, as a plan counts it. It is the same
// on every rank. Whatever turns out to need more than its room grows.
type Room struct {
	Activations int64 // bytes
	RingBuffers int64 // bytes
	Tokens      int   // of one batch
}
