package device

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

// CUDAOptions select a GPU and its use.
type CUDAOptions struct {
	Ordinal int    // among the GPUs visible to this process
	Backend string // of attention: fused, flash or reference
	Compute tensor.DType
	Machine machine.Machine // from backend.Find
	// Planned is the memory of the run in bytes, which must be free at the start.
	Planned int64
	// Workspace is the size of fused attention's workspace; see kernels.FusedWorkspace.
	Workspace int64
	// HeadDim is attention's head dim, for loading its kernels early; 0: unknown.
	HeadDim int
	// Deterministic repeats gradients of attention bit for bit. Packed: sequences are packed documents.
	Deterministic, Packed bool
	// SMMargin is the number of SMs that flash attention leaves to concurrent work; see gpu.FlashOptions.
	SMMargin int

	// Beside, unless nil, runs with the stream while libraries and kernels are loaded, and must queue nothing on it. If
	// the device then fails to start, undo is called with the cause.
	Beside func(stream tensor.Stream) (undo func(cause error), err error)
	// Timed, unless nil, is called at the start of a phase and its result at the end, from several goroutines.
	Timed func(part string) (end func())
	// Note, unless nil, receives lines for the rank's log about a successful start.
	Note func(text string)
}

// MemoryError reports that a device or its host lacks memory for a run.
type MemoryError struct {
	Of                string // names the memory
	Need, Free, Total int64  // bytes; Total 0: Free is not known
	Host              bool   // the host lacks it
	Err               error
}

func (e *MemoryError) Error() string {
	text := fmt.Sprintf("%s: the run takes %s", e.Of, readable.Bytes(e.Need))
	if e.Total > 0 {
		text += fmt.Sprintf(", and %s of %s are free", readable.Bytes(e.Free), readable.Bytes(e.Total))
	}
	return text + ": " + e.Err.Error()
}

func (e *MemoryError) Unwrap() error { return e.Err }

func (o *CUDAOptions) note(format string, args ...any) {
	if o.Note != nil {
		o.Note(fmt.Sprintf(format, args...))
	}
}

func (o *CUDAOptions) timed(part string) (end func()) {
	if o.Timed == nil {
		return func() {}
	}
	return o.Timed(part)
}

// zeroWorkspace reports whether fused attention clears its workspace before each backward call.
func (o *CUDAOptions) zeroWorkspace() bool {
	return o.Packed && backends.LeavesWorkspace(o.Machine.Arch, o.Machine.CUDNN)
}
