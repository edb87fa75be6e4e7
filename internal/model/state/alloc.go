// Package state lays out the device memory of a rank for a whole run: weights, gradients and moments in flat buffers,
// cut into buckets and these into the ranks' parts, and the memory of batches. New returns a State. The training loop
// allocates it on a device; a plan runs the same code over a Meter.
package state

import (
	"math"
	"runtime"
	"runtime/debug"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Allocator allocates memory of a device.
type Allocator interface {
	// Vector returns n uninitialised elements that live as long as the device. what names their use in errors and in
	// the counts of a Meter.
	Vector(what string, t tensor.DType, n int) (View, error)
	// HostVector returns n zeros of host memory.
	HostVector(what string, t tensor.DType, n int) (View, error)
}

// These name the uses of memory.
const (
	Weights   = "weights"         // float32, for the optimizer
	Compute   = "compute weights" // for the model, if in other memory
	Base      = "frozen weights"  // for the model
	Gradients = "gradients"       // also in transfers to other ranks
	Moments   = "moments"         // float32, of the optimizer
	Inputs    = "batches"         // tokens, targets and the tables of rotary embeddings
	OnHost    = "host: "          // prefix of the counts of host memory
)

// Meter is an Allocator that counts bytes by their use. Its views have no memory.
type Meter map[string]int64

// Vector counts n elements. It never fails.
func (m Meter) Vector(what string, t tensor.DType, n int) (View, error) {
	m[what] += int64(n) * int64(t.Size())
	return tensor.NewMeter().Alloc(t, n), nil
}

// HostVector counts n elements under the prefix OnHost. It never fails.
func (m Meter) HostVector(what string, t tensor.DType, n int) (View, error) {
	return m.Vector(OnHost+what, t, n)
}

// Room is the memory of a run before its first step, from the plan, the same on every rank. Buffers that need more
// grow.
type Room struct {
	Activations int64          // bytes
	RingBuffers int64          // bytes
	Tokens      int            // of one batch
	Layers      []model.Retain // what each layer keeps between the passes; nil: by memory.recompute
	Host        int64          // bytes of activations in host memory
	Copies      int            // of sharded weights, each on neighbouring ranks; 0: one over all ranks
	Slots       int            // layers whose sharded weights are in memory at once; 0: LeastSlots
}

// These bound the garbage of a process before a Go collection, unless a percent of the live memory is more. A step
// leaves some hundred KiB, and a collection takes some milliseconds, in which the host of a GPU may not wait.
const (
	leastGarbage    = 4 << 20
	leastGPUGarbage = 32 << 20
)

// Garbage returns the garbage that a process keeps before a collection, in bytes and in percent of the live bytes. arch
// is that of its GPU; 0: a CPU.
func Garbage(live int64, arch int) (percent int, bytes int64) {
	least := int64(leastGarbage)
	if live = max(live, 1); arch != 0 {
		least = leastGPUGarbage
	}
	percent = int(min(max((100*least+live-1)/live, 1), 100))
	return percent, live * int64(percent) / 100
}

// BoundGarbage applies Garbage to this process after it has allocated its memory, and returns free memory to the
// system. By default Go waits for as much garbage as live memory, such as weights, activations or the copy for a
// checkpoint, which doubles the memory of long runs. GOGC has priority.
func BoundGarbage(arch int) {
	debug.FreeOSMemory() // collects the garbage of the start
	debug.SetMemoryLimit(math.MaxInt64)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	percent, _ := Garbage(int64(m.HeapAlloc), arch)
	if asked := debug.SetGCPercent(percent); asked != 100 {
		debug.SetGCPercent(asked)
	}
}
