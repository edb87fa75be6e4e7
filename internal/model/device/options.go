package device

import (
	"fmt"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

// CUDAOptions are which GPU is used, and how.
type CUDAOptions struct {
	Ordinal int    // of the GPUs that this process sees
	Backend string // of attention: fused, flash or reference
	// Remedies are the remedies that the choice of Backend relies on, as the launcher made it.
	Remedies []backends.RemedyKind
	Compute  tensor.DType
	Machine  machine.Machine // what backend.Find says of it
	// Reserve is the bytes that the device takes in one piece before anything else; Alloc hands
	// them out.
	Reserve int64
	// Workspace is the bytes of that which fused attention works in; see kernels.FusedWorkspace.
	Workspace int64
	// HeadDim is attention's head dim, so that its kernels are loaded beforehand; 0: not known.
	HeadDim int
	// Deterministic repeats gradients of attention bit for bit; Packed says that sequences are
	// packed documents.
	Deterministic, Packed bool
	// SMMargin is how many processors of the device flash attention leaves to work beside it; see
	// gpu.FlashOptions.
	SMMargin int

	// Beside, if not nil, is called when there is a stream, while libraries and kernels are loaded:
	// for work that takes as long and queues nothing on it. If the device then fails to start for
	// another reason, undo is called with that cause.
	Beside func(stream tensor.Stream) (undo func(cause error), err error)
	// Timed is told when a part of the start begins, and calls its result at the end. It
	// may be nil, and is called by several goroutines.
	Timed func(part string) (end func())
	// Note receives lines for the rank's log about a start that went well. It may be nil.
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

// kernelRequests lists the requests of remedies to a kernel.
type kernelRequests struct {
	zeroWorkspace bool // clear the workspace before each backward call
}

// remedies returns the requests to the kernel, or an error that names a remedy that nothing here
// carries out: the choice of a launcher that knows more than this binary.
func (o *CUDAOptions) remedies() (r kernelRequests, err error) {
	for _, kind := range o.Remedies {
		switch {
		case kind == backends.ZeroWorkspace && o.Backend == backends.Fused.String():
			r.zeroWorkspace = true
		case kind == backends.GrantWorkspace && o.Backend == backends.Fused.String():
			// The kernel gives every call the workspace that its plan asks for.
		case kind == backends.SplitCall && o.Backend == backends.Fused.String():
			// The kernel cuts every band into what cuDNN has.
		default:
			return r, fmt.Errorf("attention backend %s with the remedy %s is not in this build", o.Backend, kind)
		}
	}
	return r, nil
}
