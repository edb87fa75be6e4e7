// Package state lays out the memory of a rank's device for a whole run: weights, gradients and
// moments in flat buffers, cut into buckets and the buckets into the ranks' parts, and the memory
// of batches. The training loop allocates it on a device; a plan runs the same code over a Meter.
package state

import (
	"runtime"
	"runtime/debug"

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

// leastGarbage is the garbage in a process on a CPU before Go collects it, unless a percent of the memory in use is
// more. A step leaves some hundred KiB, and a collection takes some milliseconds.
const leastGarbage = 4 << 20

// Garbage returns the bytes of garbage that a process on a CPU keeps before a collection, with live bytes in use, and
// their percentage of live.
func Garbage(live int64) (percent int, bytes int64) {
	live = max(live, 1)
	percent = int(min(max((100*leastGarbage+live-1)/live, 1), 100))
	return percent, live * int64(percent) / 100
}

// BoundGarbage makes Go collect as Garbage says, in a process on a CPU that has allocated its memory. Otherwise Go
// waits until there is as much garbage as memory in use, mostly weights and activations, and a run of some hundred
// steps takes twice the memory. A GOGC of the user's wins.
func BoundGarbage() {
	runtime.GC() // of the start
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	percent, _ := Garbage(int64(m.HeapAlloc))
	if asked := debug.SetGCPercent(percent); asked != 100 {
		debug.SetGCPercent(asked)
	}
}
