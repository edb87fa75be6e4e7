package device

import (
	"fmt"

	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/tensor"
)

// CUDAOptions are which GPU is used, and how.
type CUDAOptions struct {
	Ordinal int    // of the GPUs that this process sees
	Backend string // of attention: fused, flash or reference
	Compute tensor.DType
	Machine backend.Machine // what backend.Find says of it
	// Reserve is the bytes that the device takes in one piece before anything else; Alloc hands
	// them out.
	Reserve int64
	// Workspace is the bytes of that which fused attention works in; see kernels.FusedWorkspace.
	Workspace int64
	// HeadDim is that of attention, so that its kernels are loaded beforehand; 0: not known.
	HeadDim int
	// Deterministic repeats gradients of attention bit for bit; Packed says that sequences are
	// packed documents.
	Deterministic, Packed bool

	// Beside is called when there is a stream, while libraries and kernels are loaded: for what
	// takes as long and queues nothing on it. Where the device then cannot be had for another
	// reason, undo is called with that. It may be nil.
	Beside func(stream tensor.Stream) (undo func(cause error), err error)
	// Timed is told when a part of the start begins, and calls what it returns at the end. It
	// may be nil, and is called by several goroutines.
	Timed func(part string) (end func())
	// Note is told what the rank's log should say of a start that went well. It may be nil.
	Note func(text string)
}

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
