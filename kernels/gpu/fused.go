//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Fused is attention by cuDNN: 16-bit q, k and v, float32 accumulators. It implements
// attention.Kernel, and what the rules of package attention say about attention.Fused is what it
// can do. cuDNN cannot add to anything, so that results are held back as cuDNN gives them,
// up to maxHeld of them, and go into the accumulators, or at the end into o, in one go over memory.
type Fused struct {
	stream  *cuda.Stream
	dnn     *dnn.Handle
	options FusedOptions
	kernels fusedKernels
	scratch fusedScratch
	held    heldParts
	keys    heldKeys
	tables  fusedTables
	packing packing

	forward  fusedForward // the pass under way
	backward fusedBackward
}

// FusedOptions say how Fused computes.
type FusedOptions struct {
	// Deterministic repeats gradients bit for bit. cuDNN may take a workspace of the square of the
	// sequence for it, which it is given at any size; see backends.KeepsMatrix.
	Deterministic bool
	// Packed says that sequences are packed documents, whose lengths change from step to step. If
	// set, many tiles share one call of cuDNN, and lengths of about the same size share a plan.
	// Otherwise each shape has a plan of its own; so has a backward pass where head dims are above
	// 192 or no multiples of 16, or tensors have gaps.
	Packed bool
	// ZeroWorkspace clears cuDNN's workspace before each backward call: the remedy
	// backends.ZeroWorkspace.
	ZeroWorkspace bool
	// Workspace is the device memory to begin with, as FusedWorkspace counts it. More is taken
	// when a call needs it.
	Workspace int64
}

// NewFused computes on stream. It loads cuDNN; the error names a missing library.
func NewFused(stream *cuda.Stream, loader *Loader, options FusedOptions) (*Fused, error) {
	f := &Fused{stream: stream, options: options, scratch: fusedScratch{dev: stream.Device()}, packing: defaultPacking}
	var err error
	if f.dnn, err = dnn.Open(stream); err != nil {
		return nil, err
	}
	if f.kernels, err = loadFused(loader); err != nil {
		return nil, err
	}
	return f, f.scratch.reserve(options.Workspace)
}

// Close lets go of cuDNN. The stream must be done.
func (f *Fused) Close() error { return f.dnn.Close() }

// Plans counts the plans that cuDNN has built, up to a second each.
func (f *Fused) Plans() int { return f.dnn.Built() }

// Workspace returns the device memory that is taken, in bytes.
func (f *Fused) Workspace() int64 { return f.scratch.size() }

// usable returns a fault of the inputs beyond attention's checks.
func (f *Fused) usable(q View, p attention.Softmax, views ...View) error {
	if t := q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return fmt.Errorf("fused attention in %v: cuDNN computes in bfloat16 and float16; set precision.compute to "+
			"bf16 or fp16", t)
	}
	if p.Softcap > 0 {
		return fmt.Errorf("fused attention with soft cap %v: cuDNN has none; use the flash backend", p.Softcap)
	}
	if !(p.Scale > 0) {
		return fmt.Errorf("fused attention with scale %v: cuDNN's gradients fault at 0, and its largest score is "+
			"that before scaling; use the flash backend", p.Scale)
	}
	if err := p.Plain("fused attention"); err != nil {
		return err
	}
	return fusedAligned("fused attention", views...)
}

// fusedAligned returns an error that names the first view whose rows do not begin on 16 bytes or are not
// multiples of 8 elements.
func fusedAligned(what string, views ...View) error {
	for _, v := range views {
		if v.Size() == 0 {
			continue
		}
		size := int64(v.DType().Size())
		bad := v.Len(tensor.Dim)%8 != 0 || cuda.Addr(v)%16 != 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			bad = bad || v.Len(a) > 1 && v.Stride(a)*size%16 != 0
		}
		if bad {
			return fmt.Errorf("%s: %v: head dims must be multiples of 8 and rows begin on 16 bytes; use the flash "+
				"backend, or copy it to a dense tensor", what, v)
		}
	}
	return nil
}

func cutTiles(tiles []partition.Tile) []dnn.Piece {
	var out []dnn.Piece
	for _, t := range tiles {
		out = dnn.Cut(out, t)
	}
	return out
}
